"""How many groups each split gets, and which.

In: the founders of groups, one after the other. Out: the split of each. A founder is dealt by the
hash of its question and the seed, so it goes where it would go in any other log; within a role or
domain that is corrected as soon as a split would be more than one group off its share. Only founders
before count.
"""

import numpy as np

from graftwork.data.bands import Columns
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import SPLITS
from graftwork.text.compare import Array, number_text, spread

_LABELS = {"role": "group", "domain": "domain"}
_ROUNDING = 1e-9


def draw(keys: Array, *, seed: int) -> Array:
    """For each key a number from 0 to below 1, evenly spread, anew for every seed."""
    salt = np.uint64(number_text(f"seed {seed}"))
    drawn: Array = (spread(spread(keys) ^ salt) >> np.uint64(11)) / 2.0**53
    return drawn


class Shares:
    """Deals founders, and keeps count of them by stratum."""

    def __init__(self, corpus: Columns, *, settings: DataSettings) -> None:
        together = corpus.column("together")
        self._drawn = draw(np.where(together != 0, together, corpus.column("turn")), seed=settings.seed)
        self._strata: Array | None = None
        if settings.stratify != "nothing":
            self._strata = corpus.labels(_LABELS[settings.stratify]).numbers
        held_out = {"validation": settings.validation, "test": settings.test}
        self._shares = [held_out.get(split, 1 - settings.validation - settings.test) for split in SPLITS]
        self._founded: dict[int, list[int]] = {}
        self.founders: list[int] = []

    def take_over(self, founders: Array, split: Array) -> None:
        """Count founders that were dealt before."""
        self.founders += founders.tolist()
        if self._strata is None or not len(founders):
            return
        cells = self._strata[founders].astype(np.int64) * len(SPLITS) + split[founders]
        for cell, count in zip(
            *(part.tolist() for part in np.unique(cells, return_counts=True)), strict=True
        ):
            stratum, dealt = divmod(cell, len(SPLITS))
            self._founded.setdefault(stratum, [0] * len(SPLITS))[dealt] += count

    def count(self, founder: int, split: int) -> int:
        """A founder whose split is settled."""
        self.founders.append(founder)
        if self._strata is not None:
            self._founded.setdefault(int(self._strata[founder]), [0] * len(SPLITS))[split] += 1
        return split

    def deal(self, founder: int) -> int:
        """The split of a new group, as an index into SPLITS."""
        self.founders.append(founder)
        drawn = float(self._drawn[founder])
        if self._strata is None:
            return _pick(drawn, self._shares)
        founded = self._founded.setdefault(int(self._strata[founder]), [0] * len(SPLITS))
        total = sum(founded) + 1
        # What each split lacks of its share, this group counted. The sum is 1, and none was more than
        # 1 off before: at most one lacks more than a group, and one at least has room for it.
        lacking = [share * total - count for share, count in zip(self._shares, founded, strict=True)]
        most = max(range(len(SPLITS)), key=lacking.__getitem__)
        if lacking[most] >= 1 - _ROUNDING:
            split = most
        else:
            split = _pick(
                drawn,
                [
                    share if lack >= -_ROUNDING else 0.0
                    for share, lack in zip(self._shares, lacking, strict=True)
                ],
            )
        founded[split] += 1
        return split


def _pick(drawn: float, shares: list[float]) -> int:
    """The share that `drawn` falls into, held-out splits first."""
    at = drawn * sum(shares)
    for split in reversed(range(1, len(shares))):
        if at < shares[split]:
            return split
        at -= shares[split]
    return 0 if shares[0] > 0 else max(range(len(shares)), key=shares.__getitem__)
