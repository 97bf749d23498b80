"""Per-request changes to sampling: which tokens may come next, and log-probabilities of those that came.

In: logits and the requests of their rows. Out: logits without the tokens that a constraint forbids, and the
log-probabilities that requests ask for. Rows without either cost nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenConstraint(Protocol):
    """Decides which tokens may come next. Never raises: it lets the answer end instead."""

    def allowed(self, vocabulary: int) -> Tensor:
        """Which tokens may come next, as booleans; at least one."""
        ...

    def advance(self, token: int) -> None:
        """The token that came."""
        ...


class TokenLogprobs(NamedTuple):
    """The log-probability of a token under the model, and the likeliest tokens in its place."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class TokenOptions:
    """`logprobs` asks for the log-probabilities of so many tokens in each place, besides the chosen one."""

    constraint: TokenConstraint | None = None
    logprobs: int | None = None
    noted: deque[TokenLogprobs] = field(default_factory=deque)
    """Of the tokens that were chosen, in their order; the listener takes those of its token."""


def has_constraint(rows: Sequence[TokenOptions | None]) -> bool:
    return any(row is not None and row.constraint is not None for row in rows)


def apply_constraints(logits: Tensor, rows: Sequence[TokenOptions | None]) -> Tensor:
    if not has_constraint(rows):
        return logits
    logits = logits.clone()  # a recorded pass writes its logits to the same place each time
    for place, row in enumerate(rows):
        if row is not None and row.constraint is not None:
            forbidden = ~row.constraint.allowed(logits.shape[1])
            logits[place].masked_fill_(forbidden.to(logits.device), -torch.inf)
    return logits


def wants_own_logprobs(row: TokenOptions | None) -> bool:
    """Whether only the log-probability of the chosen token is asked for, as in training."""
    return row is not None and row.logprobs == 0


def chosen_logprobs(logits: Tensor, chosen: Tensor, rows: Sequence[TokenOptions | None]) -> Tensor | None:
    """Of the chosen token of each row, in one go and without waiting for a card. None if no row asks."""
    if not any(map(wants_own_logprobs, rows)):
        return None
    return torch.log_softmax(logits.float(), dim=-1).gather(1, chosen[:, None]).squeeze(1)


def note_top_logprobs(logits: Tensor, chosen: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    """Note the log-probabilities before any constraint, temperature or restriction, with the likeliest."""
    for place, row in enumerate(rows):
        if row is None or not row.logprobs:
            continue
        known = torch.log_softmax(logits[place].float(), dim=-1)
        values, tokens = known.topk(row.logprobs)
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        row.noted.append(TokenLogprobs(float(known[chosen[place]]), top))


def note_logprobs(logits: Tensor, chosen: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    """All log-probabilities that rows ask for, at once."""
    own = chosen_logprobs(logits, chosen, rows)
    if own is not None:
        note_own_logprobs(own, rows)
    note_top_logprobs(logits, chosen, rows)


def note_own_logprobs(own: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    for row, value in zip(rows, own.tolist(), strict=True):
        if row is not None and wants_own_logprobs(row):
            row.noted.append(TokenLogprobs(value, []))
