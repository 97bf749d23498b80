"""The split that each row had the last time, so that it has the same one this time.

In: the hashes of the rows' lines, their splits, the settings. Out: a file, and from it the split of
every row that was dealt before, wherever its line stands now. Rows that were deleted from the logs
take nothing with them: those that stood in a group with them stay where they were. Settings that ask
for another split are obeyed: then nothing is pinned.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

from graftwork.data.dealing import NOT_DEALT
from graftwork.data.settings import DataSettings
from graftwork.data.sight import Keys, find_places
from graftwork.files.whole import write_whole
from graftwork.records.base import fingerprint
from graftwork.text.compare import Array

FORM = 1
DEALT_BY = ("seed", "validation", "test", "split_by", "stratify", "question_similarity", "paraphrases")


def write_pins(path: Path, *, keys: Keys, split: Array, settings: DataSettings) -> None:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        dealt_by=np.array(_describe(settings)),
        keys=keys.astype(np.uint64),
        split=split.astype(np.uint8),
    )
    write_whole(path, buffer.getvalue())


def read_pins(path: Path, *, keys: Keys, settings: DataSettings) -> Array:
    """The split of each of these rows the last time; 255 for a row that was in none."""
    pinned = np.full(len(keys), NOT_DEALT, dtype=np.uint8)
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["dealt_by"]) != _describe(settings):
                return pinned
            known, split = file["keys"], file["split"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return pinned
    places = find_places(keys, known)
    pinned[places >= 0] = split[places[places >= 0]]
    return pinned


def _describe(settings: DataSettings) -> str:
    return fingerprint([FORM, settings.model_dump(mode="json", include=set(DEALT_BY))])
