"""The split that each row had the last time, so that it has the same one this time.

In: the hashes of the rows' lines, their splits, the settings. Out: a file, and from it the split of
every row that was dealt before, wherever its line stands now. Rows that were deleted from the logs
take nothing with them: those that stood in a group with them stay where they were. Settings that ask
for another split are obeyed: then nothing is pinned.
"""

import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftwork.data.dealing import NOT_DEALT
from graftwork.data.settings import DataSettings
from graftwork.data.sight import Keys, find_places
from graftwork.files.disk import write_atomic
from graftwork.records.base import fingerprint
from graftwork.text.compare import Array

FORM = 1
DEALT_BY = ("seed", "validation", "test", "split_by", "stratify", "question_similarity", "paraphrases")


class Pins(NamedTuple):
    keys: Keys
    split: Array
    conversations: bool = True
    """Whether conversations were grouped by all their turns when this was written."""


def write_pins(path: Path, *, keys: Keys, split: Array, settings: DataSettings) -> None:
    """Keep these splits, and those of rows that are not there this time: they may come back."""
    old = _read(path, settings=settings)
    stood = find_places(keys, old.keys)
    before = np.where(stood >= 0, np.append(old.split, NOT_DEALT)[stood], NOT_DEALT)
    now = np.where(split == NOT_DEALT, before, split)
    away = find_places(old.keys, keys) < 0
    buffer = io.BytesIO()
    np.savez(
        buffer,
        dealt_by=np.array(_describe(settings)),
        conversations=np.array(True),
        keys=np.concatenate((keys, old.keys[away])).astype(np.uint64),
        split=np.concatenate((now, old.split[away])).astype(np.uint8),
    )
    write_atomic(path, buffer.getvalue())


def read_pins(path: Path, *, keys: Keys, settings: DataSettings, conversations: Array | None = None) -> Array:
    """The split of each of these rows the last time; 255 for a row that was in none.

    Once, `conversations` (rows of several turns) were grouped by their last turn alone: splits from that
    time are not held on to for them.
    """
    known = _read(path, settings=settings)
    places = find_places(keys, known.keys)
    pinned: Array = np.where(places >= 0, np.append(known.split, NOT_DEALT)[places], NOT_DEALT)
    if conversations is not None and not known.conversations:
        pinned[conversations] = NOT_DEALT
    return pinned.astype(np.uint8)


def _read(path: Path, *, settings: DataSettings) -> Pins:
    """What was kept under the same settings; nothing where it is lost or damaged."""
    none = Pins(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8))
    try:
        with np.load(path, allow_pickle=False) as file:
            same = str(file["dealt_by"]) == _describe(settings)
            return Pins(file["keys"], file["split"], "conversations" in file) if same else none
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return none


def _describe(settings: DataSettings) -> str:
    return fingerprint([FORM, settings.model_dump(mode="json", include=set(DEALT_BY))])
