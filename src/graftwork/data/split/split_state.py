"""Split state: which split each row had in earlier preparations, so that it keeps it.

In: the working folder, the corpus, the settings. Out: the previous split of each row wherever its line is
now, and the full assignment of the first rows if they are unchanged. Settings that ask for another split
start over. Written only after the leakage check has passed. Missing or damaged files only cost time.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from graftwork.data.corpus.build import FEATURES_FORM, Keys, find_places
from graftwork.data.corpus.store import Corpus, read_arrays, write_arrays
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import UNASSIGNED, SplitAssignment
from graftwork.records.base import fingerprint
from graftwork.text.similarity import Array
from graftwork.version import __version__

SPLITS_FORM = 1
SPLIT_SETTINGS = ("seed", "validation", "test", "split_by", "stratify", "question_similarity", "paraphrases")


def write_previous_splits(path: Path, *, keys: Keys, split: Array, settings: DataSettings) -> None:
    """Store these splits, and those of rows that are absent this time: they may come back."""
    old_keys, old_split = _read_splits(path, settings=settings)
    stood = find_places(keys, old_keys)
    before = np.where(stood >= 0, np.append(old_split, UNASSIGNED)[stood], UNASSIGNED)
    now = np.where(split == UNASSIGNED, before, split)
    away = find_places(old_keys, keys) < 0
    arrays = {
        "dealt_by": np.array(_fingerprint_split_settings(settings)),
        "keys": np.concatenate((keys, old_keys[away])).astype(np.uint64),
        "split": np.concatenate((now, old_split[away])).astype(np.uint8),
    }
    write_arrays(path, arrays)


def read_previous_splits(path: Path, *, keys: Keys, settings: DataSettings) -> Array:
    """Return the previous split of each of these rows; 255 for none."""
    known, split = _read_splits(path, settings=settings)
    places = find_places(keys, known)
    previous: Array = np.where(places >= 0, np.append(split, UNASSIGNED)[places], UNASSIGNED)
    return previous.astype(np.uint8)


def _read_splits(path: Path, *, settings: DataSettings) -> tuple[Keys, Array]:
    """Read the keys and the splits stored under the same settings."""
    stored = read_arrays(path, ("dealt_by", "keys", "split"))
    if stored and str(stored["dealt_by"]) == _fingerprint_split_settings(settings):
        return stored["keys"], stored["split"]
    return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8)


def _fingerprint_split_settings(settings: DataSettings) -> str:
    return fingerprint([SPLITS_FORM, settings.model_dump(mode="json", include=set(SPLIT_SETTINGS))])


ASSIGNMENT_FORM = 1


Identify = Callable[[int], str]
"""A digest of the first rows of the corpus: everything that was read of them."""


def write_assignment(
    path: Path, decided: SplitAssignment, *, settings: DataSettings, identify: Identify, embedded: bool
) -> None:
    """Store the assignment. `embedded` says whether an embedder was used."""
    founded = np.zeros(decided.rows, dtype=bool)
    founded[decided.founders] = True
    excluded = [(place, *pair) for place, pair in decided.excluded.items()]
    made_by = _fingerprint_assignment(settings, embedded=embedded, rows=identify(decided.rows))
    arrays = {
        "made_by": np.array(made_by),
        "split": decided.split.astype(np.uint8),
        "group": decided.group.astype(np.int32),
        "aside": np.array(excluded, dtype=np.int64).reshape(-1, 3),
        "founded": np.packbits(founded),
        "kept": np.packbits(decided.kept.astype(bool)),
    }
    # Not durable: after a power cut it is computed again.
    write_arrays(path, arrays, durable=False)


def read_assignment(
    path: Path, *, rows: int, settings: DataSettings, identify: Identify, embedded: bool
) -> SplitAssignment | None:
    """Read the assignment of the first of these `rows`, if it still holds."""
    stored = read_arrays(path, ("made_by", "split", "group", "aside", "founded", "kept"))
    known = len(stored["split"]) if stored else rows + 1
    if known > rows or str(stored["made_by"]) != _fingerprint_assignment(
        settings, embedded=embedded, rows=identify(known)
    ):
        return None
    return SplitAssignment(
        split=stored["split"],
        group=stored["group"].astype(np.int64),
        excluded={place: (one, other) for place, one, other in stored["aside"].tolist()},
        founders=np.flatnonzero(np.unpackbits(stored["founded"], count=known)),
        kept=np.unpackbits(stored["kept"], count=known).astype(bool),
    )


def _fingerprint_assignment(settings: DataSettings, *, embedded: bool, rows: str) -> str:
    # Log files may come and go: the rows themselves identify the input.
    chosen = settings.model_dump(mode="json", exclude={"logs", "repair"})
    return fingerprint([ASSIGNMENT_FORM, __version__, chosen, embedded, rows])


ASSIGNMENT_FILE, SPLITS_FILE = "decided.npz", "pins.npz"


class SplitState:
    """`previous` is the previous split of each row; `known` the full assignment of the first rows."""

    def __init__(self, folder: Path, corpus: Corpus, *, settings: DataSettings) -> None:
        self._folder, self._settings = folder, settings
        self._keys = corpus.column("line_key")
        self._passed = corpus.column("passed").astype(bool)
        self.previous: Array = read_previous_splits(folder / SPLITS_FILE, keys=self._keys, settings=settings)
        self.known: SplitAssignment | None = read_assignment(
            folder / ASSIGNMENT_FILE,
            rows=corpus.rows,
            settings=settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    def store(self, assignment: SplitAssignment, kept: Array) -> None:
        write_previous_splits(
            self._folder / SPLITS_FILE, keys=self._keys, split=assignment.split, settings=self._settings
        )
        write_assignment(
            self._folder / ASSIGNMENT_FILE,
            assignment._replace(kept=kept),
            settings=self._settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    @property
    def _embedded(self) -> bool:
        return self._settings.paraphrases != "off"

    def _identify(self, rows: int) -> str:
        digest = hashlib.sha256(str(FEATURES_FORM).encode())
        digest.update(self._keys[:rows].tobytes())
        digest.update(self._passed[:rows].tobytes())
        return digest.hexdigest()
