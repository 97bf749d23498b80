"""Requests for answers, and sampling: the next token of each row, chosen on the device with the logits.

Input: logits, how each row is sampled and which of its tokens comes next. Output: token ids, without waiting
for a GPU. A sampled token depends on the seed, the row and the position only, not on the device or the batch.

A request may constrain which tokens come next and ask for log-probabilities; rows without either cost
nothing.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

FEW_TOKENS = 512
"""A CPU checks the likeliest first: sorting a whole vocabulary costs as much as a model's step."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; `top_k` 0 keeps all tokens. `first_row` is the first prompt's index in a batch
    that was split.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    first_row: int = 0
    top_k: int = 0


class RowSampling:
    """The sampling of one row, with the random numbers of all its tokens."""

    def __init__(self, sampling: Sampling, *, row: int = 0) -> None:
        self.sampling = sampling
        self._row = row

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature <= 0

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens are left out: these are drawn in the order of their probability."""
        return not self.is_greedy and (self.sampling.top_p < 1 or self.sampling.top_k > 0)

    def random_number(self, step: int) -> float:
        return float(self._numbers[step]) if not self.is_greedy else 0.0

    @cached_property
    def _numbers(self) -> Tensor:
        name = f"{self.sampling.seed} {self.sampling.first_row + self._row}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:7])
        return torch.rand(self.sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed))


def choose_tokens(logits: Tensor, rows: Sequence[RowSampling | None], steps: Sequence[int]) -> Tensor:
    """Choose a token for each row of logits. `steps` counts the tokens of each row; rows that are None are
    ignored.
    """
    likeliest = logits.argmax(dim=-1)
    drawn = [row for row in rows if row is not None and not row.is_greedy]
    if not drawn:
        return likeliest
    vocabulary = logits.shape[1]
    table = []
    for row, step in zip(rows, steps, strict=True):
        if row is None or row.is_greedy:
            table.append([1.0, 1.0, vocabulary, 0.0, 0.0, 0.0])
            continue
        sampling = row.sampling
        most = min(sampling.top_k or vocabulary, vocabulary)
        number = row.random_number(step)
        table.append([sampling.temperature, sampling.top_p, most, number, 1.0, float(row.is_restricted)])
    values = torch.tensor(table, dtype=torch.float32)
    if logits.is_cuda:
        values = values.pin_memory().to(logits.device, non_blocking=True)
    temperature, top_p, top_k, numbers, drawn_flags, restricted_flags = values.T[:, :, None]
    is_restricted = restricted_flags.squeeze(1) > 0
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    next_tokens = likeliest
    if not all(row.is_restricted for row in drawn):
        next_tokens = torch.where(drawn_flags.squeeze(1) > 0, _draw(probabilities, numbers), next_tokens)
    if any(row.is_restricted for row in drawn):
        bounded = any(line[2] < vocabulary for line in table)
        candidates, tokens = _likeliest(probabilities, top_p, top_k if bounded else None, is_restricted)
        index = _draw(candidates, numbers)
        next_tokens = torch.where(is_restricted, tokens.gather(1, index[:, None]).squeeze(1), next_tokens)
    return next_tokens


def _draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the first index whose cumulative probability exceeds the random number; never one of probability
    0.
    """
    with any_order(probabilities):
        reached = probabilities.cumsum(dim=-1)
    index = torch.searchsorted(reached, numbers * reached[:, -1:], right=True)
    return index.clamp(max=probabilities.shape[1] - 1).squeeze(1)


def _likeliest(
    probabilities: Tensor, top_p: Tensor, top_k: Tensor | None, is_restricted: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest set of tokens whose probability reaches top_p, at most top_k, the others 0; the first
    always stays."""
    if probabilities.is_cuda:
        # Whether a few of them suffice is known to the GPU only, and asking it would wait for it.
        ordered, tokens = probabilities.sort(dim=-1, descending=True)
    else:
        few = min(FEW_TOKENS, probabilities.shape[1])
        ordered, tokens = probabilities.topk(few, dim=-1)
        enough = (ordered.sum(dim=-1, keepdim=True) >= top_p) | ~is_restricted[:, None]
        if top_k is not None:
            enough |= top_k <= few
        if few < probabilities.shape[1] and not bool(enough.all()):
            ordered, tokens = probabilities.sort(dim=-1, descending=True)
    with any_order(ordered):
        outside = ordered.cumsum(dim=-1) - ordered >= top_p
    if top_k is not None:
        outside |= torch.arange(ordered.shape[1], device=ordered.device) >= top_k
    outside[:, 0] = False
    return ordered.masked_fill(outside, 0.0), tokens


@contextmanager
def any_order(operand: Tensor) -> Iterator[None]:
    """Operations on this tensor may sum in any order inside, which suffices for sampling a token. In
    deterministic mode, torch refuses all such operations, and the cumulative sum on a GPU is one of them.
    """
    if not operand.is_cuda or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


class TokenConstraint(Protocol):
    """Decides which tokens may come next. Never raises: it ends the answer instead."""

    def allowed(self, vocabulary: int) -> Tensor:
        """Which tokens may come next, as booleans; at least one."""
        ...

    def advance(self, token: int) -> None:
        """Advance by a token."""
        ...


class TokenLogprobs(NamedTuple):
    """The log-probability of a token under the model, and the likeliest tokens in its place."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class TokenOptions:
    """`logprobs` requests the log-probabilities of this many tokens at each position, besides the chosen
    one.
    """

    constraint: TokenConstraint | None = None
    logprobs: int | None = None
    noted: deque[TokenLogprobs] = field(default_factory=deque)
    """Log probabilities of the chosen tokens, in order; the listener takes those of its token."""


def has_constraint(rows: Sequence[TokenOptions | None]) -> bool:
    return any(row is not None and row.constraint is not None for row in rows)


def apply_constraints(logits: Tensor, rows: Sequence[TokenOptions | None]) -> Tensor:
    if not has_constraint(rows):
        return logits
    logits = logits.clone()  # a recorded pass writes its logits to the same place each time
    for index, row in enumerate(rows):
        if row is not None and row.constraint is not None:
            forbidden = ~row.constraint.allowed(logits.shape[1])
            logits[index].masked_fill_(forbidden.to(logits.device), -torch.inf)
    return logits


def wants_own_logprobs(row: TokenOptions | None) -> bool:
    """Whether only the log-probability of the chosen token is requested, as in training."""
    return row is not None and row.logprobs == 0


def chosen_logprobs(
    logits: Tensor, next_tokens: Tensor, rows: Sequence[TokenOptions | None]
) -> Tensor | None:
    """Return the log probability of the chosen token of each row, in one operation and without waiting for a
    GPU. None if no row asks for it.
    """
    if not any(map(wants_own_logprobs, rows)):
        return None
    return torch.log_softmax(logits.float(), dim=-1).gather(1, next_tokens[:, None]).squeeze(1)


def note_top_logprobs(logits: Tensor, next_tokens: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    """Note the log-probabilities before any constraint, temperature or restriction, with the likeliest."""
    for index, row in enumerate(rows):
        if row is None or not row.logprobs:
            continue
        logprobs = torch.log_softmax(logits[index].float(), dim=-1)
        values, tokens = logprobs.topk(row.logprobs)
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        row.noted.append(TokenLogprobs(float(logprobs[next_tokens[index]]), top))


def note_logprobs(logits: Tensor, next_tokens: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    """Record all requested log-probabilities at once."""
    logprobs = chosen_logprobs(logits, next_tokens, rows)
    if logprobs is not None:
        note_own_logprobs(logprobs, rows)
    note_top_logprobs(logits, next_tokens, rows)


def note_own_logprobs(logprobs: Tensor, rows: Sequence[TokenOptions | None]) -> None:
    for row, value in zip(rows, logprobs.tolist(), strict=True):
        if row is not None and wants_own_logprobs(row):
            row.noted.append(TokenLogprobs(value, []))


@dataclass
class Generated:
    """An answer: its tokens without the stop token, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


class GenerationRequest:
    """One prompt. `on_token` gets each new token and ends the answer by returning False."""

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        row: int = 0,
        adapter: str | None = None,
        on_token: Callable[[int], bool] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        options: TokenOptions | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = RowSampling(sampling, row=row)
        self.most = sampling.max_new_tokens
        self.adapter = adapter
        self.cancellable = is_cancelled is not None
        self.is_cancelled = is_cancelled or (lambda: False)
        self.result = Generated()
        self.done = False
        self.error: BaseException | None = None
        self.launched = 0
        """Tokens that are computed or being computed; a GPU runs ahead of the host."""
        self._on_token = on_token
        self.options = options

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer, except the newest, whose keys come next."""
        return len(self.prompt) + self.launched - 1

    @property
    def final_length(self) -> int:
        return len(self.prompt) + self.most

    def take(self, token: int, stop: frozenset[int]) -> bool:
        """Take the next token; returns whether the answer ended: at a stop token, the limit, or by its
        listener.
        """
        if self.done:
            return False
        if self.options is not None and self.options.constraint is not None:
            self.options.constraint.advance(token)
        if token in stop:
            self.end("stop")
            return True
        self.result.tokens.append(token)
        if self._on_token is not None and not self._on_token(token):
            self.end("stop")
        elif len(self.result.tokens) >= self.most:
            self.end("length")
        return self.done

    def end(self, reason: Literal["stop", "length"], error: BaseException | None = None) -> None:
        self.result.finish_reason = reason
        self.done, self.error = True, error
