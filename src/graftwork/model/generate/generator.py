"""Generation: prompts in, answers out, through the decoder that fits the model.

Input: prompts as tokens. Output: the generated tokens and why generation stopped. Knows nothing of templates,
cases or HTTP.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from graftwork.model.adapters.lora import active_adapter
from graftwork.model.adapters.peft import activate
from graftwork.model.generate.cache import cache_shape, register_attention
from graftwork.model.generate.decoder import SlotDecoder, TokenPass
from graftwork.model.generate.sampling import (
    Generated,
    GenerationRequest,
    Sampling,
    apply_constraints,
    choose_tokens,
    note_logprobs,
)
from graftwork.model.generate.scheduler import MOST_ROWS, common_length


class StaticDecoder:
    """For models whose state does not fit slots: windows of attention, recurrent states, other kinds of
    attention. Submit requests, then `step` until nothing is left; a step answers a whole batch of requests
    with one adapter. Ended rows leave it, since they cost as much as others, and new ones wait.
    """

    def __init__(self, model: Any, *, stop_tokens: Iterable[int], slots: int) -> None:
        self._model = model
        self._stop = frozenset(stop_tokens)
        self._device = next(model.parameters()).device
        self._waiting: deque[GenerationRequest] = deque()
        self.slots = slots
        self.held_bytes = 0
        self.recording_seconds = 0.0
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        if request.most < 1:
            request.end("length")
        else:
            self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        self.running = len(batch)
        try:
            activate(self._model, batch[0].adapter)
            cache, mask, logits = self._prefill([request.prompt for request in batch])
            rows = batch
            for step in count():
                options = [row.options for row in rows]
                allowed = apply_constraints(logits, options)
                next_tokens = choose_tokens(allowed, [row.sampling for row in rows], [step] * len(rows))
                note_logprobs(logits, next_tokens, options)
                for row, token in zip(rows, next_tokens.tolist(), strict=True):
                    row.take(token, self._stop)
                keep = [number for number, row in enumerate(rows) if not row.done]
                if not keep:
                    return
                if len(keep) < len(rows):
                    index = torch.tensor(keep, device=self._device)
                    cache.batch_select_indices(index)
                    mask, next_tokens = mask[index], next_tokens[index]
                    rows = [rows[number] for number in keep]
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                logits = self._forward(next_tokens[:, None], mask, cache)
        finally:
            self.running = 0

    def finish(self) -> None:
        while self.busy:
            self.step()

    def reserve(self, slots: int, columns: int) -> None:
        """No-op: a batch allocates what it needs."""

    def reset(self) -> list[GenerationRequest]:
        forgotten = list(self._waiting)
        self._waiting.clear()
        return forgotten

    def forget_prefixes(self) -> None:
        """No-op: nothing is kept between batches."""

    def forget_adapters(self) -> None:
        """No-op: the model's own are used."""

    def update_adapters(self) -> None:
        """No-op: the model's own are used."""

    def _next_batch(self) -> list[GenerationRequest]:
        """Take the oldest request and those with the same adapter."""
        for request in [request for request in self._waiting if request.is_cancelled()]:
            request.end("stop")
            self._waiting.remove(request)
        batch: list[GenerationRequest] = []
        postponed: deque[GenerationRequest] = deque()
        for request in self._waiting:
            fits = len(batch) < self.slots and (not batch or request.adapter == batch[0].adapter)
            (batch if fits else postponed).append(request)
        self._waiting = postponed
        return batch

    def _prefill(self, prompts: list[list[int]]) -> tuple[Any, Tensor, Tensor]:
        """Read the prompts, their common prefix once, the rest padded on the left: cache, mask, logits."""
        from transformers import DynamicCache

        shared = common_length(prompts)
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
        for row, suffix in enumerate(rests):
            tokens[row, width - len(suffix) :] = torch.tensor(suffix)
            mask[row, shared + width - len(suffix) :] = 1
        mask = mask.to(self._device)
        return cache, mask, self._forward(tokens.to(self._device), mask, cache)

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits after the last token of each row."""
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


__all__ = ["Generated", "Generator", "OnToken", "Sampling", "open_decoder"]

OnToken = Callable[[int, int], bool]
"""Called with (row, token) for each new token; False ends that row."""
Decoder = SlotDecoder | StaticDecoder
ACTIVE = "\0active"
"""The adapter that is active in the model, whichever it is."""


def open_decoder(
    model: Any,
    *,
    stop_tokens: Iterable[int],
    slots: int,
    recorded: bool = False,
    token_pass: TokenPass | None = None,
) -> Decoder:
    """Open a slot decoder if the model's state fits slots, else one with static batches."""
    use_grouped_attention(model)
    shape = cache_shape(model)
    if shape is None:
        return StaticDecoder(model, stop_tokens=stop_tokens, slots=slots)
    return SlotDecoder(
        model, shape, stop_tokens=stop_tokens, slots=slots, recorded=recorded, token_pass=token_pass
    )


def use_grouped_attention(model: Any) -> None:
    """A family that caps its scores (Gemma 2) keeps its own attention."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(register_attention())


class Generator:
    """Answers batches; no more than `slots` rows run at once, and ended ones are replaced. With `recorded`, a
    GPU replays recorded passes: only for a model with fixed weights and adapters.
    """

    def __init__(
        self, model: Any, *, stop_tokens: Iterable[int], recorded: bool = False, slots: int = MOST_ROWS
    ) -> None:
        self._model = model
        self.decoder = open_decoder(model, stop_tokens=stop_tokens, slots=slots, recorded=recorded)

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = ACTIVE,
    ) -> list[Generated]:
        """Answer all prompts. The same prompts and sampling give the same answers."""
        if adapter == ACTIVE:
            adapter = active_adapter(self._model)
        self.decoder.forget_prefixes()
        self.decoder.reserve(len(prompts), max(map(len, prompts)) + sampling.max_new_tokens)
        requests = [
            GenerationRequest(
                prompt,
                sampling,
                row=row,
                adapter=adapter,
                on_token=None if on_token is None else partial(on_token, row),
            )
            for row, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.decoder.submit(request)
        try:
            self.decoder.finish()
        except BaseException:
            self.decoder.reset()
            raise
        return [request.result for request in requests]
