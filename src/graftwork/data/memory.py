"""What the preparation remembers from one time to the next: the split of every row, and how it came about.

In: the folder that it works in, and the corpus. Out: what is still valid of what was decided before. If
nothing is, all is decided anew. Written only after the leak check has passed.
"""

import hashlib
from pathlib import Path

from graftwork.data import sift
from graftwork.data.corpus import Corpus
from graftwork.data.dealing import Dealing
from graftwork.data.decided import Decided, read_decided, write_decided
from graftwork.data.pins import read_pins, write_pins
from graftwork.data.settings import DataSettings
from graftwork.text.compare import Array

DECIDED, PINS = "decided.npz", "pins.npz"


class Memory:
    """`pinned` is the split of each row the last time; `known` all that was decided of the first rows."""

    def __init__(self, folder: Path, corpus: Corpus, *, settings: DataSettings) -> None:
        self._folder, self._settings = folder, settings
        self._keys = corpus.column("line_key")
        self._passed = corpus.column("passed").astype(bool)
        self.pinned: Array = read_pins(
            folder / PINS, keys=self._keys, settings=settings, conversations=corpus.column("later") != 0
        )
        self.known: Decided | None = read_decided(
            folder / DECIDED,
            rows=corpus.rows,
            settings=settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    def keep(self, dealing: Dealing, kept: Array) -> None:
        write_pins(self._folder / PINS, keys=self._keys, split=dealing.split, settings=self._settings)
        write_decided(
            self._folder / DECIDED,
            Decided(*dealing, kept),
            settings=self._settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    @property
    def _embedded(self) -> bool:
        return self._settings.paraphrases != "off"

    def _identify(self, rows: int) -> str:
        told = hashlib.sha256(str(sift.FEATURES_FORM).encode())
        told.update(self._keys[:rows].tobytes())
        told.update(self._passed[:rows].tobytes())
        return told.hexdigest()
