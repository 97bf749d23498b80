"""The split that each row had the last time, so that it has the same one this time.

In: the hashes of the rows' lines, their splits, the settings. Out: a file, and from it the split of
every row that was dealt before, wherever its line stands now. Rows that were deleted from the logs
take nothing with them: those that stood in a group with them stay where they were. Settings that ask
for another split are obeyed: then nothing is pinned.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftwork import __version__
from graftwork.data.corpus import row_features
from graftwork.data.corpus.build import Keys, find_places
from graftwork.data.corpus.store import Corpus
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import UNASSIGNED, KnownAssignment, SplitAssignment
from graftwork.files.whole import write_whole
from graftwork.records.base import fingerprint
from graftwork.text.similarity import Array

SPLITS_FORM = 1
SPLIT_SETTINGS = ("seed", "validation", "test", "split_by", "stratify", "question_similarity", "paraphrases")


class PreviousSplits(NamedTuple):
    keys: Keys
    split: Array
    conversations: bool = True
    """Whether conversations were grouped by all their turns when this was written."""


def write_previous_splits(path: Path, *, keys: Keys, split: Array, settings: DataSettings) -> None:
    """Keep these splits, and those of rows that are not there this time: they may come back."""
    old = _read_splits(path, settings=settings)
    stood = find_places(keys, old.keys)
    before = np.where(stood >= 0, np.append(old.split, UNASSIGNED)[stood], UNASSIGNED)
    now = np.where(split == UNASSIGNED, before, split)
    away = find_places(old.keys, keys) < 0
    buffer = io.BytesIO()
    np.savez(
        buffer,
        dealt_by=np.array(_fingerprint_split_settings(settings)),
        conversations=np.array(True),
        keys=np.concatenate((keys, old.keys[away])).astype(np.uint64),
        split=np.concatenate((now, old.split[away])).astype(np.uint8),
    )
    write_whole(path, buffer.getvalue())


def read_previous_splits(
    path: Path, *, keys: Keys, settings: DataSettings, conversations: Array | None = None
) -> Array:
    """The split of each of these rows the last time; 255 for a row that was in none.

    Once, `conversations` (rows of several turns) were grouped by their last turn alone: splits from that
    time are not held on to for them.
    """
    known = _read_splits(path, settings=settings)
    places = find_places(keys, known.keys)
    previous: Array = np.where(places >= 0, np.append(known.split, UNASSIGNED)[places], UNASSIGNED)
    if conversations is not None and not known.conversations:
        previous[conversations] = UNASSIGNED
    return previous.astype(np.uint8)


def _read_splits(path: Path, *, settings: DataSettings) -> PreviousSplits:
    """What was kept under the same settings; nothing where it is lost or damaged."""
    none = PreviousSplits(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8))
    try:
        with np.load(path, allow_pickle=False) as file:
            same = str(file["dealt_by"]) == _fingerprint_split_settings(settings)
            return PreviousSplits(file["keys"], file["split"], "conversations" in file) if same else none
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return none


def _fingerprint_split_settings(settings: DataSettings) -> str:
    return fingerprint([SPLITS_FORM, settings.model_dump(mode="json", include=set(SPLIT_SETTINGS))])


ASSIGNMENT_FORM = 1


Identify = Callable[[int], str]
"""A digest of the first so many rows of the corpus at hand: of all that was read and sifted of them."""


def write_assignment(
    path: Path, decided: KnownAssignment, *, settings: DataSettings, identify: Identify, embedded: bool
) -> None:
    """Keep what was decided. `embedded` says whether an embedder took part."""
    founded = np.zeros(decided.rows, dtype=bool)
    founded[decided.founders] = True
    excluded = [(place, *pair) for place, pair in decided.excluded.items()]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        made_by=np.array(_fingerprint_assignment(settings, embedded=embedded, rows=identify(decided.rows))),
        split=decided.split.astype(np.uint8),
        group=decided.group.astype(np.int32),
        aside=np.array(excluded, dtype=np.int64).reshape(-1, 3),
        founded=np.packbits(founded),
        kept=np.packbits(decided.kept.astype(bool)),
    )
    # Of no use after a power cut that it does not survive: then it is decided anew.
    write_whole(path, buffer.getvalue(), durable=False)


def read_assignment(
    path: Path, *, rows: int, settings: DataSettings, identify: Identify, embedded: bool
) -> KnownAssignment | None:
    """What was decided for the first of these `rows`, if it still holds."""
    try:
        with np.load(path, allow_pickle=False) as file:
            known = len(file["split"])
            if known > rows or str(file["made_by"]) != _fingerprint_assignment(
                settings, embedded=embedded, rows=identify(known)
            ):
                return None
            return KnownAssignment(
                split=file["split"],
                group=file["group"].astype(np.int64),
                excluded={place: (one, other) for place, one, other in file["aside"].tolist()},
                founders=np.flatnonzero(np.unpackbits(file["founded"], count=known)),
                kept=np.unpackbits(file["kept"], count=known).astype(bool),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _fingerprint_assignment(settings: DataSettings, *, embedded: bool, rows: str) -> str:
    # Files may come and go under `logs`: the rows themselves say what was in them.
    chosen = settings.model_dump(mode="json", exclude={"logs"})
    return fingerprint([ASSIGNMENT_FORM, __version__, chosen, embedded, rows])


ASSIGNMENT_FILE, SPLITS_FILE = "decided.npz", "pins.npz"


class SplitState:
    """`pinned` is the split of each row the last time; `known` all that was decided of the first rows."""

    def __init__(self, folder: Path, corpus: Corpus, *, settings: DataSettings) -> None:
        self._folder, self._settings = folder, settings
        self._keys = corpus.column("line_key")
        self._passed = corpus.column("passed").astype(bool)
        self.previous: Array = read_previous_splits(
            folder / SPLITS_FILE,
            keys=self._keys,
            settings=settings,
            conversations=corpus.column("later") != 0,
        )
        self.known: KnownAssignment | None = read_assignment(
            folder / ASSIGNMENT_FILE,
            rows=corpus.rows,
            settings=settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    def keep(self, assignment: SplitAssignment, kept: Array) -> None:
        write_previous_splits(
            self._folder / SPLITS_FILE, keys=self._keys, split=assignment.split, settings=self._settings
        )
        write_assignment(
            self._folder / ASSIGNMENT_FILE,
            KnownAssignment(*assignment, kept),
            settings=self._settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    @property
    def _embedded(self) -> bool:
        return self._settings.paraphrases != "off"

    def _identify(self, rows: int) -> str:
        told = hashlib.sha256(str(row_features.FEATURES_FORM).encode())
        told.update(self._keys[:rows].tobytes())
        told.update(self._passed[:rows].tobytes())
        return told.hexdigest()
