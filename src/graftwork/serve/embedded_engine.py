"""The embedded engine: the base model and its adapters in one process, behind a unix socket.

Serves exactly the weights that were evaluated, with the template that they were trained with, or refuses to
start. Requests with the same key are answered in one batch, one batch at a time. Run as `python -m
graftwork.serve.embedded_engine JOB.json`.
"""

import asyncio
import logging
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable
from pathlib import Path
from typing import Any

from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.interaction import Message
from graftwork.records.prompt import PROMPT_FILE, PromptVariant
from graftwork.records.units import MIB
from graftwork.serve.engine_protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    end_with_parent,
    make_handler,
)
from graftwork.serve.http_messages import ApiError
from graftwork.serve.http_server import HttpLimits, Server

log = logging.getLogger(__name__)


class Ticket:
    """One request that waits for its answer. `emit` and `fail` may be called from any thread."""

    def __init__(self, request: GenerateRequest, *, key: Hashable, prompt: list[int]) -> None:
        self.request = request
        self.key = key
        self.prompt = prompt
        self.cancelled = False
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[ReplyPiece | ApiError] = asyncio.Queue()

    def emit(self, piece: ReplyPiece) -> None:
        self.ended = self.ended or piece.finish_reason is not None
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def fail(self, error: ApiError) -> None:
        self.ended = True
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, error)

    async def pieces(self) -> AsyncGenerator[ReplyPiece, None]:
        """The answer; leaving early cancels the ticket."""
        try:
            while True:
                piece = await self._pieces.get()
                if isinstance(piece, ApiError):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.cancelled = True


class Batcher:
    """Start it, submit tickets, close it."""

    def __init__(
        self,
        answer: Callable[[list[Ticket]], None],
        *,
        batch_size: int,
        wait_seconds: float,
        queue_limit: int,
    ) -> None:
        self._answer = answer
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._queue_limit = queue_limit
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self.answered = 0
        self.running = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        with self._changed:
            if len(self._waiting) >= self._queue_limit:
                self._waiting = deque(t for t in self._waiting if not t.cancelled)
            if len(self._waiting) >= self._queue_limit:
                raise ApiError(429, "the engine is full; try again soon", code="full")
            self._waiting.append(ticket)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self, *, seconds: float) -> None:
        """Answer nothing more; the batch that runs may finish for `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while batch := self._next_batch():
            self.running = True
            try:
                self._answer(batch)
            except Exception:
                # One bad batch is the business of its callers; the next one may be fine.
                log.exception("a batch of %d failed", len(batch))
            for ticket in batch:
                if not ticket.ended:
                    ticket.fail(ApiError(500, "the engine failed on this request; see its log"))
            self.answered += len(batch)
            self.running = False

    def _next_batch(self) -> list[Ticket]:
        """The oldest ticket and its like; empty when closed."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._closed:
                    return []
                if self._waiting:
                    break
                self._changed.wait()
            key = self._waiting[0].key
            deadline = time.monotonic() + self._wait_seconds
            while not self._closed and self._count(key) < self._batch_size:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._take(key)

    def _count(self, key: Hashable) -> int:
        return sum(1 for ticket in self._waiting if ticket.key == key and not ticket.cancelled)

    def _take(self, key: Hashable) -> list[Ticket]:
        batch: list[Ticket] = []
        kept: deque[Ticket] = deque()
        for ticket in self._waiting:
            if ticket.key == key and not ticket.cancelled and len(batch) < self._batch_size:
                batch.append(ticket)
            elif not ticket.cancelled:
                kept.append(ticket)
        self._waiting = kept
        return batch


class TextStream:
    """Feed it `push(text)`; it gives the new part. `stopped` is set once a stop string appeared."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._sent = 0
        self._text = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """`text` is everything so far; it replaces what was pushed before."""
        if self.stopped:
            return ""
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.stopped = True
            self._text = text[: min(places)]
            return self._advance(len(self._text))
        self._text = text
        # A character of several tokens shows as U+FFFD until it is whole.
        certain = len(text.rstrip("\ufffd"))
        return self._advance(certain - self._held_back(text[:certain]))

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(len(self._text))

    def _held_back(self, text: str) -> int:
        """How many last characters could be the beginning of a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )

    def _advance(self, to: int) -> str:
        piece = self._text[self._sent : to]
        self._sent = max(self._sent, to)
        return piece


_BODY_BYTES = 64 * MIB  # the gateway has checked its own, smaller limit
_BEAT_SECONDS = 2.0
_LONG_PROMPT = 16 * 1024
"""Characters from which tokenizing a prompt takes milliseconds."""
_SMALLEST_TOP_P = 1e-6  # 0 would leave no token to choose from


class EmbeddedBackend:
    """A Backend over a real model. `_answer` runs in the batcher's thread, the rest in the loop."""

    def __init__(self, job: EngineJob) -> None:
        from graftwork.model.adapters.peft import load_adapter
        from graftwork.model.chat.template import ChatTemplate
        from graftwork.model.generate.generator import Generator
        from graftwork.model.load import load_base
        from graftwork.model.threads import guard_spinning, use_threads

        folder = Path(job.base_folder)
        self._template = ChatTemplate.from_folder(folder, reasoning=job.reasoning)
        _require_template(job, self._template.template_fingerprint)
        guard_spinning(use_threads(job.threads))
        self._model = load_base(folder, dtype=job.dtype, device=job.device)
        self._prompts: dict[str, PromptVariant] = {}
        for name, adapter in job.adapters.items():
            if not self._take_prompt(name, Path(adapter)):
                load_adapter(self._model, Path(adapter), name=name)
        self._models = [BASE, *job.adapters]
        self._generator = Generator(self._model, stop_tokens=[self._template.eos])
        self._max_positions = int(self._model.config.max_position_embeddings)
        self._model_lock = threading.Lock()
        self.batcher = Batcher(
            self._answer,
            batch_size=job.batch_size,
            wait_seconds=job.batch_wait_ms / 1000,
            queue_limit=job.queue_limit,
        )

    def state(self) -> dict[str, Any]:
        return {
            "models": self._models,
            "pid": os.getpid(),
            "waiting": self.batcher.waiting,
            "answered": self.batcher.answered,
            "template_fingerprint": self._template.template_fingerprint,
        }

    async def load_adapter(self, request: LoadAdapter) -> None:
        """Attach one more adapter between two batches."""
        if request.name in self._models:
            return
        try:
            await asyncio.to_thread(self._attach, request)
        except (GraftError, OSError, ValueError, KeyError) as error:
            raise ApiError(400, f"the adapter could not be loaded: {error}") from error
        self._models = [*self._models, request.name]

    def _attach(self, request: LoadAdapter) -> None:
        from graftwork.model.adapters.peft import load_adapter

        if self._take_prompt(request.name, Path(request.folder)):
            return
        with self._model_lock:
            load_adapter(self._model, Path(request.folder), name=request.name)

    def _take_prompt(self, name: str, folder: Path) -> bool:
        """Whether the release is a prompt on the base; if so, it is kept for its requests."""
        if not (folder / PROMPT_FILE).is_file():
            return False
        self._prompts[name] = PromptVariant.from_json((folder / PROMPT_FILE).read_bytes())
        return True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        if request.model not in self._models:
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        before = self._prompts.get(request.model)
        prompt = await self._render(before.apply(request.messages) if before else request.messages)
        room = self._max_positions - len(prompt)
        if room < 1:
            raise self._too_long(f"take {len(prompt)} tokens")
        fitted = request.model_copy(update={"max_tokens": min(request.max_tokens, room)})
        # Greedy answers do not depend on their neighbours, and sampled ones may: those with a seed
        # are answered alone, so that the same seed gives the same answer.
        sampled = request.temperature > 0
        alone = object() if sampled and request.seed is not None else None
        answering = BASE if before else request.model
        key = (answering, request.temperature, request.top_p if sampled else 1.0, alone)
        ticket = Ticket(fitted, key=key, prompt=prompt)
        self.batcher.submit(ticket)
        pieces = ticket.pieces()
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def _render(self, messages: tuple[Message, ...]) -> list[int]:
        """The prompt as tokens. A long one is tokenized in a thread, so that other streams go on."""
        characters = sum(len(message.content) for message in messages)
        if characters > self._max_positions * self._template.longest_token:
            raise self._too_long(f"have {characters} characters")
        try:
            if characters > _LONG_PROMPT:
                return await asyncio.to_thread(self._template.prompt, messages)
            return self._template.prompt(messages)
        except UserMistake as error:
            raise ApiError(400, f"{error.what}: {error.fix}", param="messages") from error

    def _too_long(self, size: str) -> ApiError:
        message = f"the messages {size}; the model has room for {self._max_positions} tokens"
        return ApiError(400, message, param="messages", code="context_length_exceeded")

    def _answer(self, batch: list[Ticket]) -> None:
        from graftwork.model.adapters.peft import acting
        from graftwork.model.generate.generator import Sampling

        request = batch[0].request
        rows = [_GrowingReply(ticket, self._template.decode) for ticket in batch]
        sampling = Sampling(
            max_new_tokens=max(ticket.request.max_tokens for ticket in batch),
            temperature=request.temperature,
            top_p=max(request.top_p, _SMALLEST_TOP_P),
            seed=secrets.randbits(32) if request.seed is None else request.seed,
        )
        adapter = None if request.model == BASE or request.model in self._prompts else request.model
        with self._model_lock, acting(self._model, adapter):
            prompts = [ticket.prompt for ticket in batch]
            results = self._generator.generate(
                prompts, sampling, on_token=lambda row, token: rows[row].take(token)
            )
        for row, result in zip(rows, results, strict=True):
            row.finish(result.finish_reason)


class _GrowingReply:
    """One answer of a batch as it grows: decodes, stops, emits what is certain."""

    def __init__(self, ticket: Ticket, decode: Callable[[list[int]], str]) -> None:
        self._ticket = ticket
        self._decode = decode
        self._flow = TextStream(ticket.request.stop)
        self._tokens: list[int] = []
        self._unsent = ""

    def take(self, token: int) -> bool:
        """One more token; False ends the row."""
        request = self._ticket.request
        if self._ticket.cancelled:
            return False
        self._tokens.append(token)
        if request.stream or request.stop:
            self._unsent += self._flow.push(self._decode(self._tokens))
            if self._flow.stopped:
                self.finish("stop")
                return False
        if len(self._tokens) >= request.max_tokens:
            self.finish("length")
            return False
        if request.stream and self._unsent:
            self._ticket.emit(ReplyPiece(text=self._unsent))
            self._unsent = ""
        return True

    def finish(self, reason: str) -> None:
        """Emit the last piece, unless it was emitted already."""
        if self._ticket.ended:
            return
        if not self._flow.stopped:
            self._unsent += self._flow.push(self._decode(self._tokens))
        text = self._unsent + self._flow.finish()
        prompt, reply = len(self._ticket.prompt), len(self._tokens)
        self._ticket.emit(
            ReplyPiece(text=text, finish_reason=reason, prompt_tokens=prompt, reply_tokens=reply)
        )


def _require_template(job: EngineJob, actual: str) -> None:
    if job.template_fingerprint not in (None, actual):
        raise UserMistake(
            "the base has another chat template than the release was trained with",
            why=f"expected {job.template_fingerprint}, found {actual}; the answers would be worse "
            "and nothing would show it",
            fix="serve the release with its own base, or train again on this one",
            where=job.base_folder,
        )


def work(job: EngineJob) -> None:
    end_with_parent()
    asyncio.run(_serve(job))


async def _serve(job: EngineJob) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with Heart(Path(job.folder)) as heart:
        heart.beat("loading", 0, 1)
        engine = EmbeddedBackend(job)
        engine.batcher.start()
        server = Server(make_handler(engine), limits=HttpLimits(max_body_bytes=_BODY_BYTES))
        await server.listen_unix(str(job.socket))
        beating = asyncio.create_task(_beat(heart, engine.batcher))
        await stop.wait()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await server.close()
        await asyncio.to_thread(engine.batcher.close, seconds=5.0)


async def _beat(heart: Heart, batcher: Batcher) -> None:
    """An engine that waits for requests is well; one whose batch does not end is not."""
    seen = -1
    while True:
        if not batcher.running or batcher.answered != seen:
            seen = batcher.answered
            await asyncio.to_thread(heart.beat, "serving", seen, seen, waiting=batcher.waiting)
        await asyncio.sleep(_BEAT_SECONDS)


if __name__ == "__main__":
    raise SystemExit(run_worker(EngineJob, lambda job: Path(job.folder), work))
