"""What was decided for the rows of a corpus, kept for the day when more rows stand behind them.

In: the split and group of each row and whether it was kept, once the leak check has passed. Out: a file,
and the same again from it if it fits: the same settings, the same version, the same first rows. What
does not fit, or does not read, counts as not there: everything is then decided anew, with the same
result. Does not know how rows are told apart: whoever asks says that.
"""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftwork import __version__
from graftwork.data.settings import DataSettings
from graftwork.files.disk import write_atomic
from graftwork.records.base import fingerprint
from graftwork.text.compare import Array

FORM = 1


class Decided(NamedTuple):
    """The fields of a dealing, and which rows were kept when nothing leaked: `Decided(*dealing, kept)`."""

    split: Array
    group: Array
    aside: dict[int, tuple[int, int]]
    founders: Array
    kept: Array

    @property
    def rows(self) -> int:
        return len(self.split)


Identify = Callable[[int], str]
"""A digest of the first so many rows of the corpus at hand: of all that was read and sifted of them."""


def write_decided(
    path: Path, decided: Decided, *, settings: DataSettings, identify: Identify, embedded: bool
) -> None:
    """Keep what was decided. `embedded` says whether an embedder took part."""
    founded = np.zeros(decided.rows, dtype=bool)
    founded[decided.founders] = True
    aside = [(place, *pair) for place, pair in decided.aside.items()]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        made_by=np.array(_describe(settings, embedded=embedded, rows=identify(decided.rows))),
        split=decided.split.astype(np.uint8),
        group=decided.group.astype(np.int32),
        aside=np.array(aside, dtype=np.int64).reshape(-1, 3),
        founded=np.packbits(founded),
        kept=np.packbits(decided.kept.astype(bool)),
    )
    # Of no use after a power cut that it does not survive: then it is decided anew.
    write_atomic(path, buffer.getvalue(), durable=False)


def read_decided(
    path: Path, *, rows: int, settings: DataSettings, identify: Identify, embedded: bool
) -> Decided | None:
    """What was decided for the first of these `rows`, if it still holds."""
    try:
        with np.load(path, allow_pickle=False) as file:
            known = len(file["split"])
            if known > rows or str(file["made_by"]) != _describe(
                settings, embedded=embedded, rows=identify(known)
            ):
                return None
            return Decided(
                split=file["split"],
                group=file["group"].astype(np.int64),
                aside={place: (one, other) for place, one, other in file["aside"].tolist()},
                founders=np.flatnonzero(np.unpackbits(file["founded"], count=known)),
                kept=np.unpackbits(file["kept"], count=known).astype(bool),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _describe(settings: DataSettings, *, embedded: bool, rows: str) -> str:
    # Files may come and go under `logs`: the rows themselves say what was in them.
    chosen = settings.model_dump(mode="json", exclude={"logs"})
    return fingerprint([FORM, __version__, chosen, embedded, rows])
