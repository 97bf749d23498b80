"""Batched generation: a shared prefix is computed once, finished rows leave the batch.

In: prompts as tokens. Out: the generated tokens and why generation stopped. Knows nothing of templates, cases
or HTTP. A sampled token depends on the seed, the row and the position only, not on the device or the batch.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graftwork.model.generate.attention import register_attention
from graftwork.model.generate.recorded import RecordedDecoder, can_record

FEW_TOKENS = 512
"""The likeliest tokens are looked at first: sorting a whole vocabulary costs as much as a model's step."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `first_row` is the first prompt's place in a batch that was cut in pieces."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    first_row: int = 0


class TokenSampler:
    """Chooses for the rows of one batch."""

    def __init__(self, sampling: Sampling, *, rows: int) -> None:
        self._sampling = sampling
        self._lots: Tensor | None = None
        if sampling.temperature > 0:
            self._lots = torch.stack([_lots_of(sampling, row) for row in range(rows)])

    def choose(self, scores: Tensor, *, rows: list[int], step: int) -> Tensor:
        """A token for each of `rows`, whose scores these are; `step` counts the tokens generated so far."""
        if self._lots is None:
            return scores.argmax(dim=-1)
        kept, tokens = torch.softmax(scores.float() / self._sampling.temperature, dim=-1), None
        if self._sampling.top_p < 1:
            kept, tokens = _likeliest(kept, self._sampling.top_p)
        reached = kept.cumsum(dim=-1)
        lots = self._lots[rows, step : step + 1].to(kept.device)
        # The first whose sum exceeds the draw: a token of probability zero is never the first.
        place = torch.searchsorted(reached, lots * reached[:, -1:], right=True).clamp(max=kept.shape[1] - 1)
        return (place if tokens is None else tokens.gather(1, place)).squeeze(1)


def _lots_of(sampling: Sampling, row: int) -> Tensor:
    name = f"{sampling.seed} {sampling.first_row + row}".encode()
    seed = int.from_bytes(hashlib.sha256(name).digest()[:7])
    return torch.rand(sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed))


def _likeliest(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of tokens whose probability reaches top_p, the others 0; the first always stays."""
    few = min(FEW_TOKENS, probabilities.shape[1])
    ordered, tokens = probabilities.topk(few, dim=-1)
    if few < probabilities.shape[1] and bool((ordered.sum(dim=-1) < top_p).any()):
        ordered, tokens = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    return ordered.masked_fill(outside, 0.0), tokens


log = logging.getLogger(__name__)


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


OnToken = Callable[[int, int], bool]
"""Called with (row, token) for each new token; False ends that row."""


class _Prefilled(NamedTuple):
    """What reading the prompts left behind."""

    cache: Any
    mask: Tensor
    logits: Tensor


class _Answers:
    """The tokens of each row so far, and which rows continue."""

    def __init__(self, rows: int, longest: int, *, stop: frozenset[int], on_token: OnToken | None) -> None:
        self.results = [Generated() for _ in range(rows)]
        self.alive = set(range(rows)) if longest > 0 else set()
        self._longest, self._stop, self._on_token = longest, stop, on_token

    def take(self, rows: list[int], tokens: list[int]) -> None:
        """The newest token of each of these rows; output of finished rows is ignored."""
        for row, token in zip(rows, tokens, strict=True):
            if row in self.alive and not self._goes_on(row, token):
                self.alive.discard(row)

    def _goes_on(self, row: int, token: int) -> bool:
        result = self.results[row]
        if token in self._stop:
            result.finish_reason = "stop"
            return False
        result.tokens.append(token)
        if self._on_token is not None and not self._on_token(row, token):
            result.finish_reason = "stop"
            return False
        return len(result.tokens) < self._longest


class Generator:
    """Generates with whatever adapter is active in `model`.

    With `recorded`, a card replays one recorded step: only for a model whose adapter stays the same.
    """

    def __init__(self, model: Any, *, stop_tokens: Iterable[int], recorded: bool = False) -> None:
        self._model = model
        # A family that caps its scores (Gemma 2) keeps the attention that does so.
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(register_attention())
        self._stop = frozenset(stop_tokens)
        self._device = next(model.parameters()).device
        self._recorded = recorded
        self._decoder: RecordedDecoder | None = None

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Generated]:
        """Answer all prompts in one batch."""
        read = self._prefill(prompts)
        answers = _Answers(len(prompts), sampling.max_new_tokens, stop=self._stop, on_token=on_token)
        chooser = TokenSampler(sampling, rows=len(prompts))
        decoder = None
        if self._recorded and can_record(self._model, read.cache):
            decoder = self._record(read, columns=read.mask.shape[1] + sampling.max_new_tokens)
        if decoder is None:
            self._walk(answers, read, chooser)
        else:
            self._replay(answers, read.logits, chooser, decoder)
        return answers.results

    @property
    def held_bytes(self) -> int:
        """What the recording holds on the card; a batch of another size gives it back."""
        return 0 if self._decoder is None else self._decoder.held_bytes

    def forget_recording(self) -> None:
        self._decoder = None

    def _walk(self, answers: _Answers, read: _Prefilled, chooser: TokenSampler) -> None:
        """Token by token; finished rows leave the batch, for they cost as much as living ones."""
        rows = list(range(len(answers.results)))
        cache, mask, scores = read
        for step in count():
            if not answers.alive:
                return
            chosen = chooser.choose(scores, rows=rows, step=step)
            answers.take(rows, chosen.tolist())
            keep = [place for place, row in enumerate(rows) if row in answers.alive]
            if not keep:
                return
            if len(keep) < len(rows):
                index = torch.tensor(keep, device=self._device)
                cache.batch_select_indices(index)
                mask, chosen = mask[index], chosen[index]
                rows = [rows[place] for place in keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            scores = self._forward(chosen[:, None], mask, cache)

    def _replay(
        self, answers: _Answers, scores: Tensor, chooser: TokenSampler, decoder: RecordedDecoder
    ) -> None:
        """The same from a recording of the step: all rows stay to the end of the longest."""
        rows = list(range(len(answers.results)))
        for step in count():
            if not answers.alive:
                return
            chosen = chooser.choose(scores, rows=rows, step=step)
            answers.take(rows, chosen.tolist())
            if answers.alive:
                scores = decoder.step(chosen)

    def _record(self, read: _Prefilled, *, columns: int) -> RecordedDecoder | None:
        """A recording that holds what was read: the last one where it has the right size, else a new one.

        None where the model's step cannot be recorded: some decide in Python how they go on.
        """
        rows = len(read.mask)
        if self._decoder is not None and not self._decoder.fits(rows=rows, columns=columns):
            self._decoder = None  # its memory first
        if self._decoder is None:
            try:
                self._decoder = RecordedDecoder(self._model, read.cache, rows=rows, columns=columns)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                log.warning("the step of this model is not recorded: %s", error)
                self._recorded = False
                return None
        self._decoder.fill(read.cache, read.mask)
        return self._decoder

    def _prefill(self, prompts: list[list[int]]) -> _Prefilled:
        """Read the prompts: their common beginning once, the rest padded on the left."""
        from transformers import DynamicCache

        shared = _common_prefix(prompts)
        cache = DynamicCache(config=self._model.config)
        if shared:
            prefix = torch.tensor([prompts[0][:shared]], device=self._device)
            self._forward(prefix, torch.ones_like(prefix), cache)
            cache.batch_repeat_interleave(len(prompts))
        rests = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rests))
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), shared + width, dtype=torch.long)
        mask[:, :shared] = 1
        for row, rest in enumerate(rests):
            tokens[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, shared + width - len(rest) :] = 1
        mask = mask.to(self._device)
        return _Prefilled(cache, mask, self._forward(tokens.to(self._device), mask, cache))

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits behind the last token of each row."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _common_prefix(prompts: list[list[int]]) -> int:
    """How many first tokens all prompts share, leaving at least one to each."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    for place in range(limit):
        if any(prompt[place] != first[place] for prompt in prompts):
            return place
    return max(limit, 0)
