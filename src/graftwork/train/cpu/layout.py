"""The tokens of a batch side by side: the shared beginning once, then every row's rest, no padding.

In: rows. Out: which tokens stand where, and at which places a reply token is predicted. The last
token of a row predicts nothing that is trained, so it is not read at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.train.order import shared_tokens


@dataclass(frozen=True)
class TokenLayout:
    """`shared` tokens, then `rests[i]` of row i, the last `predicting[i]` of which predict its reply."""

    shared: int
    rests: tuple[int, ...]
    predicting: tuple[int, ...]

    @property
    def parts(self) -> list[int]:
        return [self.shared, *self.rests]

    def positions(self) -> Tensor:
        """Where each token stands in its row."""
        return torch.cat([torch.arange(self.shared), *(torch.arange(n) + self.shared for n in self.rests)])


def layout_tokens(rows: Sequence[Row]) -> TokenLayout:
    shared = shared_tokens(rows)
    return TokenLayout(
        shared=shared,
        rests=tuple(len(row.tokens) - 1 - shared for row in rows),
        predicting=tuple(len(row.tokens) - row.trained_from for row in rows),
    )
