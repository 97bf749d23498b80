"""Continuous batching: ended rows are replaced by waiting ones at every step.

Input: requests, at any time. Output: their tokens, one step after the other. Keys and values lie in slots;
the same passes run on a CPU and, recorded as CUDA graphs, on a GPU, which is one step ahead of what is known
here, so that it never waits. What a row answers depends on its batch only by rounding.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from graftwork.model.adapters.lora import AdapterRows, weights_of_adapter
from graftwork.model.adapters.peft import activate
from graftwork.model.generate.cache import CacheShape, PassLayout, SlotCache
from graftwork.model.generate.lean import LeanPass
from graftwork.model.generate.recorded import GraphRecorder
from graftwork.model.generate.sampling import (
    GenerationRequest,
    apply_constraints,
    choose_tokens,
    chosen_logprobs,
    has_constraint,
    note_own_logprobs,
    note_top_logprobs,
)
from graftwork.model.generate.scheduler import (
    PREFILL_TOKENS,
    RECORDED_PREFILLS,
    DecoderSizes,
    SlotContents,
    SlotScheduler,
    common_length,
    cut_prompts,
)


class Unwanted(Exception):
    """All callers of this pass have left."""


@contextmanager
def interrupted_when(model: Any, nobody_waits: Callable[[], bool]) -> Iterator[None]:
    """Passes end early, with `Unwanted`, once nobody waits for their result. A long prompt takes a CPU
    seconds: a client that disconnects must not hold it up that long.
    """

    def look(_module: Any, _inputs: Any) -> None:
        if nobody_waits():
            raise Unwanted

    hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


LONG_PROMPTS = 256
"""Tokens of prompts from which reading them on a CPU is interrupted when their callers leave."""
SHRINKING_PAYS = 128
"""Steps that must be left before rows are moved to a smaller recording: making one takes as long as many
steps.
"""


class TokenPass(Protocol):
    """Computes one more token of each row with fewer kernels than the model's own pass. Its adapter, if any,
    acts on its own.
    """

    def run(self, tokens: Tensor, positions: Tensor, cache: SlotCache, columns: int) -> Tensor: ...

    def update(self) -> None:
        """The adapters changed."""
        ...


class SlotDecoder:
    """Submit requests, then `step` until nothing is left. One thread only.

    With `recorded` a GPU replays recorded passes: only for a model whose weights and adapters stay the same.
    """

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        *,
        stop_tokens: Iterable[int],
        slots: int,
        recorded: bool = False,
        lookahead: int | None = None,
        token_pass: TokenPass | None = None,
    ) -> None:
        self._model = model
        self._stop = frozenset(stop_tokens)
        self._device: torch.device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._recorder = GraphRecorder(enabled=recorded and self._on_gpu, state=lambda: self._positions)
        self._padded = recorded
        self._sizes = DecoderSizes(slots, padded=recorded)
        self._lookahead = int(self._on_gpu) if lookahead is None else lookahead
        self._scheduler: SlotScheduler[GenerationRequest] = SlotScheduler(
            slots, group_of=lambda request: weights_of_adapter(model, request.adapter)
        )
        self._cache = SlotCache(shape, self._device)
        self._contents = SlotContents(slots)
        self._flights: deque[tuple[list[GenerationRequest | None], Tensor, Tensor | None, Any]] = deque()
        """Tokens in transfer: their requests, log-probabilities if requested, the event of arrival."""
        self._rows, self._columns = 0, 0
        self._token_pass = token_pass
        # Where passes are not recorded on a GPU, the model may be sharded: its own modules gather it.
        lean = token_pass is None and (recorded or not self._on_gpu)
        self._lean = LeanPass.of(model) if lean else None
        self._adapters: AdapterRows | None = None
        self._acting: tuple[str | None, bool] | None = None
        self._tokens, self._positions, self._choice = (
            torch.zeros(slots, dtype=torch.long, device=self._device) for _ in range(3)
        )
        self._slot_numbers = torch.arange(slots, device=self._device)
        # The inputs of a recorded prefill: one row of each length.
        self._prefill_inputs = {
            length: torch.zeros(2, 1, length, dtype=torch.long, device=self._device)
            for length in RECORDED_PREFILLS
        }
        self._prefill_slot = torch.zeros(1, dtype=torch.long, device=self._device)

    @property
    def slots(self) -> int:
        """Most requests that run at once."""
        return self._scheduler.limit

    @slots.setter
    def slots(self, limit: int) -> None:
        self._scheduler.limit = max(min(limit, self._scheduler.slots), 1)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def busy(self) -> bool:
        return bool(self._flights or self._scheduler.running or self._scheduler.waiting)

    @property
    def held_bytes(self) -> int:
        return self._cache.held_bytes

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on recording passes so far."""
        return self._recorder.seconds

    def submit(self, request: GenerationRequest) -> None:
        if request.most < 1:
            request.end("length")
            return
        if not self.busy:
            self._acting = None  # others may have used the model since
        self._scheduler.submit(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Start waiting requests, compute one more token of each running one, deliver tokens that have
        arrived.
        """
        for request in self._scheduler.drop_waiting(lambda request: request.is_cancelled()):
            request.end("stop")
        self._prefill()
        self._land(self._lookahead)
        if self._launch():
            self._land(self._lookahead)
        else:
            self._land(0)
        if not self._scheduler.running:
            self._rows = self._columns = 0
        if not self.busy and self._adapters is not None:
            self._adapters.act(False)

    def finish(self) -> None:
        while self.busy:
            self.step()

    def reserve(self, slots: int, columns: int) -> None:
        """Make room beforehand, if the load is known."""
        self._ensure(*self._sizes.room(min(slots, self.slots), columns))

    def reset(self) -> list[GenerationRequest]:
        """Free all memory, and restore the model for other users; returns the open requests."""
        if self._adapters is not None:
            self._adapters.act(False)
        self._acting = None
        self._flights.clear()
        self._recorder.forget()
        self._cache.drop()
        self._contents.forget()
        self._rows = self._columns = 0
        return self._scheduler.clear()

    def forget_prefixes(self) -> None:
        """Forget prefixes: later results then do not depend on earlier requests."""
        self._contents.forget()

    def forget_adapters(self) -> None:
        """Call after adapters were added or exchanged."""
        self._adapters = None
        self._recorder.forget()
        self._contents.forget()

    @torch.inference_mode()
    def update_adapters(self) -> None:
        """Call after training changed the weights of adapters in place: recordings stay valid, cached values
        are read again.
        """
        if self._adapters is not None:
            self._adapters.update()
        if self._token_pass is not None:
            self._token_pass.update()
        self._contents.forget()

    def _ensure(self, slots: int, columns: int) -> None:
        if slots > self._cache.slots or columns > self._cache.columns:
            self._recorder.forget()
            if not self.busy:
                # Nothing is kept: the old cache makes room for the new one.
                slots, columns = max(slots, self._cache.slots), max(columns, self._cache.columns)
                self._cache.drop()
                self._contents.forget()
        self._cache.ensure(slots, columns)

    # Prompts

    def _prefill(self) -> None:
        admitted = self._scheduler.admit()
        if not admitted:
            return
        self._activate()
        longest = max(len(request.prompt) for _, request in admitted)
        rows = min(self._scheduler.used + self._scheduler.waiting, self.slots)
        self._ensure(*self._sizes.room(rows, longest + 1))
        for slot, request in admitted:
            request.launched = 1
            self._contents.clear_slot(slot)
            has_adapter = request.adapter is not None
            self._choice[slot] = self._rows_of_adapters().number_of(request.adapter) if has_adapter else 0
        try:
            with self._interruptible(admitted):
                starts = self._share_prefixes(admitted)
        except Unwanted:
            self._drop(admitted)
            return
        # Prompts of like length together, as many as one pass reads.
        for indices in cut_prompts([len(request.prompt) - starts[slot] for slot, request in admitted]):
            batch = [admitted[index] for index in indices]
            try:
                with self._interruptible(batch):
                    self._read_prompts(batch, starts)
            except Unwanted:
                self._drop(batch)

    def _interruptible(self, rows: list[tuple[int, GenerationRequest]]) -> AbstractContextManager[None]:
        """Passes inside end with Unwanted when the callers of all these rows have left."""
        requests = [request for _, request in rows]
        long = sum(len(request.prompt) for request in requests) >= LONG_PROMPTS
        if self._on_gpu or not long or not all(request.cancellable for request in requests):
            return nullcontext()
        return interrupted_when(self._model, lambda: all(request.is_cancelled() for request in requests))

    def _drop(self, rows: list[tuple[int, GenerationRequest]]) -> None:
        """End rows whose prompts were not read to the end: nothing may be copied from their slots."""
        for slot, request in rows:
            self._contents.clear_slot(slot)
            self._scheduler.release(slot)
            request.end("stop")

    def _share_prefixes(self, admitted: list[tuple[int, GenerationRequest]]) -> dict[int, int]:
        """Return the token from which each prompt has to be read; what comes before is copied from another
        slot.
        """
        starts = {slot: 0 for slot, _ in admitted}
        by_adapter: dict[str | None, list[tuple[int, GenerationRequest]]] = {}
        for slot, request in admitted:
            by_adapter.setdefault(request.adapter, []).append((slot, request))
        for adapter, rows in by_adapter.items():
            prompts = [request.prompt for _, request in rows]
            if 1 < len(set(map(tuple, prompts))) <= len(rows) // 2:
                starts.update(self._share_prompts(rows))
                continue
            common = common_length(prompts)
            source, length = self._contents.find(adapter, prompts[0])
            length = min(length, common) if len(rows) > 1 else min(length, len(prompts[0]) - 1)
            if len(rows) > 1 and common > length:
                source, length = rows[0][0], common
                self._pass_pieces(source, prompts[0][:common])
            if length:
                self._cache.copy_prefix(source, [slot for slot, _ in rows], length)
                starts.update({slot: length for slot, _ in rows})
            for slot, request in rows:
                self._contents.hold(slot, adapter, request.prompt)
        return starts

    def _share_prompts(self, rows: list[tuple[int, GenerationRequest]]) -> dict[int, int]:
        """Several groups of rows with one prompt each: every prompt is read once, but for its last token."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, request in rows:
            groups.setdefault(tuple(request.prompt), []).append(slot)
            self._contents.hold(slot, request.adapter, request.prompt)
        first = [(slots[0], list(prompt[:-1])) for prompt, slots in groups.items() if len(prompt) > 1]
        for indices in cut_prompts([len(tokens) for _, tokens in first]):
            batch = [first[index] for index in indices]
            if len(batch[0][1]) > PREFILL_TOKENS:
                self._pass_pieces(*batch[0])
            else:
                self._pass_prompts([(slot, tokens, 0) for slot, tokens in batch])
        for prompt, slots in groups.items():
            self._cache.copy_prefix(slots[0], slots[1:], len(prompt) - 1)
        return {slot: len(request.prompt) - 1 for slot, request in rows}

    def _pass_pieces(self, slot: int, tokens: list[int], begin: int = 0) -> None:
        for start in range(begin, len(tokens), PREFILL_TOKENS):
            self._pass_prompts([(slot, tokens[start : start + PREFILL_TOKENS], start)])

    def _read_prompts(self, rows: list[tuple[int, GenerationRequest]], starts: dict[int, int]) -> None:
        """Read the last pieces of these prompts, and return the first token of each answer."""
        begins = dict(starts)
        for slot, request in rows:
            start, unread = begins[slot], len(request.prompt) - begins[slot]
            if unread > PREFILL_TOKENS:
                begins[slot] = start + (unread - 1) // PREFILL_TOKENS * PREFILL_TOKENS
                self._pass_pieces(slot, request.prompt[: begins[slot]], start)
        pieces = [(slot, request.prompt[begins[slot] :], begins[slot]) for slot, request in rows]
        logits = self._pass_prompts(pieces)
        requests: list[GenerationRequest | None] = [request for _, request in rows]
        next_tokens, logprobs = self._choose(logits, requests, [0] * len(rows))
        slots = torch.tensor([slot for slot, _ in rows], device=self._device)
        self._tokens[slots] = next_tokens
        self._positions[slots] = torch.tensor([len(request.prompt) for _, request in rows]).to(self._device)
        self._send(requests, next_tokens, logprobs)

    def _pass_prompts(self, rows: list[tuple[int, list[int], int]]) -> Tensor:
        """Read (slot, tokens, first position) of some rows, padded on the left; returns logits after each."""
        width = max(len(tokens) for _, tokens, _ in rows)
        needed = max(start + len(tokens) for _, tokens, start in rows)
        recorded = self._sizes.recorded_width(len(rows), width)
        if not self._padded and self._lean is not None:
            choice, stacks = self._choice, self._rows_of_adapters() if self._adapted else None

            def choose(slots: Tensor) -> None:
                if stacks is not None:
                    stacks.choose(choice[slots])

            return self._lean.read(rows, self._cache, choose=choose)
        width = recorded or width
        inputs = torch.full((2, len(rows), width), self._cache.padding, dtype=torch.long)
        inputs[0] = 0
        for row, (_, tokens, start) in enumerate(rows):
            inputs[0, row, width - len(tokens) :] = torch.tensor(tokens)
            inputs[1, row, width - len(tokens) :] = torch.arange(start, start + len(tokens))
        columns = self._sizes.columns(needed)
        slots = [slot for slot, _, _ in rows]
        if recorded is None:
            placed = torch.tensor(slots, device=self._device)
            sent = inputs.to(self._device)
            return self._pass(sent[0], sent[1], placed, columns, leading=False, adapted=self._adapted)
        buffer = self._prefill_inputs[width]
        buffer.copy_(inputs)
        self._prefill_slot.fill_(slots[0])
        adapted = self._adapted
        key = ("prompt", width, columns, adapted, self._scheduler.group)
        # Most lengths of a handful of requests come once.
        return self._recorder.run(
            key,
            lambda: self._pass(
                buffer[0], buffer[1], self._prefill_slot, columns, leading=False, adapted=adapted
            ),
            after=1,
        )

    # Tokens

    def _launch(self) -> bool:
        """Compute one more token of each row that has not reached its limit; returns whether there was
        one.
        """
        if not any(row is not None and row.launched < row.most for row in self._scheduler.rows):
            return False
        self._activate()
        self._settle_sizes()
        rows, columns = self._rows, self._columns
        # Of the first slots, the requests that want another token.
        requests = [
            row if row is not None and row.launched < row.most else None
            for row in self._scheduler.rows[:rows]
        ]
        requests += [None] * (rows - len(requests))
        steps = [0 if request is None else request.launched for request in requests]
        adapted = self._adapted
        key = ("token", rows, columns, adapted, self._scheduler.group)
        logits = self._recorder.run(key, lambda: self._advance(rows, columns, adapted))
        if has_constraint([None if request is None else request.options for request in requests]):
            self._land(0)  # which token may come next depends on the one before
        next_tokens, logprobs = self._choose(logits, requests, steps)
        self._tokens[:rows].copy_(next_tokens)
        for request in requests:
            if request is not None:
                request.launched += 1
        self._send(requests, next_tokens, logprobs)
        return True

    def _choose(
        self, logits: Tensor, requests: Sequence[GenerationRequest | None], steps: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """A token for each row, and the log-probabilities of all if a request asks for them."""
        samplings = [None if request is None else request.sampling for request in requests]
        options = [None if request is None else request.options for request in requests]
        next_tokens = choose_tokens(apply_constraints(logits, options), samplings, steps)
        note_top_logprobs(logits, next_tokens, options)
        return next_tokens, chosen_logprobs(logits, next_tokens, options)

    def _settle_sizes(self) -> None:
        """Choose the rows and columns of the next pass. Depends only on the batch, so that results are
        reproducible.
        """
        running = [row for row in self._scheduler.rows if row is not None]
        target_rows = self._sizes.rows(self._scheduler.running)
        if not self._padded:
            self._rows = target_rows
        elif self._sizes.rows(self._scheduler.used) > self._rows:
            self._rows = self._sizes.rows(self._scheduler.used)
        elif target_rows <= self._rows // 4 and not self._scheduler.waiting:
            steps_left = max(row.most - row.launched for row in running)
            self._rows = target_rows if steps_left >= SHRINKING_PAYS else self._rows
        moves, rows = self._scheduler.compact(to=self._rows), self._scheduler.rows
        if moves:
            self._cache.move(moves, [row.length for _, target in moves if (row := rows[target]) is not None])
            sources, targets = torch.tensor(moves, device=self._device).T
            for state in (self._tokens, self._positions, self._choice):
                state[targets] = state[sources]
            for source, target in moves:
                self._contents.move(source, target)
        now = max(row.length for row in running) + 1
        ahead = self._sizes.token_columns(now, max(row.final_length for row in running))
        if not self._padded:
            self._columns = now
            self._ensure(self._rows, ahead if now > self._cache.columns else now)
        elif now > self._columns:
            self._columns = ahead
            self._ensure(self._rows, self._columns)
        else:
            self._ensure(self._rows, self._columns)

    def _advance(self, rows: int, columns: int, adapted: bool) -> Tensor:
        positions = self._positions[:rows]
        slots = self._slot_numbers[:rows]
        if self._token_pass is not None:
            logits = self._token_pass.run(self._tokens[:rows], positions, self._cache, columns)
        elif self._lean is None:
            logits = self._pass(
                self._tokens[:rows, None], positions[:, None], slots, columns, leading=True, adapted=adapted
            )
        else:
            if adapted:
                self._rows_of_adapters().choose(self._choice[:rows])
            logits = self._lean.run(self._tokens[:rows], positions, self._cache, columns)
        # An empty slot is computed too; its output is never read.
        positions.add_(1).clamp_(max=self._cache.padding)
        return logits

    def _pass(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, columns: int, *, leading: bool, adapted: bool
    ) -> Tensor:
        """Logits after the last token of each row."""
        self._cache.layout = PassLayout(slots, positions, columns, leading)
        if adapted:
            assert self._adapters is not None
            self._adapters.choose(self._choice[: len(slots)] if leading else self._choice[slots])
        visible = torch.arange(columns, device=self._device) <= positions[:, None, :, None]
        output = self._model(
            input_ids=tokens,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=self._cache.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    # Adapters

    @property
    def _adapted(self) -> bool:
        """Whether each row of a pass has its own adapter."""
        return self._acting is not None and self._acting[1]

    def _rows_of_adapters(self) -> AdapterRows:
        if self._adapters is None:
            self._adapters = AdapterRows(self._model, self._cache.dtype)
        return self._adapters

    def _activate(self) -> None:
        """Activate the adapters of the running rows: one for all if they agree, else per row. If passes are
        recorded, always per row, so that one recording serves all adapters.
        """
        names = {row.adapter for row in self._scheduler.rows if row is not None}
        adapted = names != {None} and (self._recorder.enabled or len(names) > 1)
        adapted = adapted and self._scheduler.group is None
        acting = (None if adapted else next(iter(names)), adapted)
        if acting == self._acting:
            return
        activate(self._model, acting[0])
        if self._adapters is not None or adapted:
            self._rows_of_adapters().act(adapted)
        self._acting = acting

    # Arrivals

    def _send(
        self, requests: list[GenerationRequest | None], tokens: Tensor, logprobs: Tensor | None
    ) -> None:
        """Start copying the tokens to the host."""
        if not self._on_gpu:
            self._flights.append((requests, tokens, logprobs, None))
            return
        tokens = _copy_here(tokens)
        logprobs = None if logprobs is None else _copy_here(logprobs)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._flights.append((requests, tokens, logprobs, arrived))

    def _land(self, still_flying: int) -> None:
        """Deliver tokens until this many copies are in flight; free the slots of rows that ended."""
        while len(self._flights) > still_flying:
            requests, tokens, logprobs, arrived = self._flights.popleft()
            if arrived is not None:
                arrived.synchronize()
            if logprobs is not None:
                note_own_logprobs(logprobs, [None if row is None else row.options for row in requests])
            for request, token in zip(requests, tokens.tolist(), strict=True):
                if request is not None and request.take(token, self._stop):
                    slot = self._scheduler.slot_of(request)
                    if slot is not None:
                        self._scheduler.release(slot)


def _copy_here(tensor: Tensor) -> Tensor:
    """A copy in host memory, ready when the next event of the GPU has passed."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
