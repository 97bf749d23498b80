"""The engine: the base and its adapters in one process of their own, behind a unix socket.

In: an EngineJob as a file. Out: answers to the gateway's requests, batched. Serves exactly the
weights that were evaluated, with the template that they were trained with, or not at all.
Run as `python -m graftwork.serve.engine JOB.json`.
"""

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.interaction import Message
from graftwork.records.units import MIB
from graftwork.serve.batch import Batcher, Ticket
from graftwork.serve.flow import TextFlow
from graftwork.serve.http import HttpLimits, Server
from graftwork.serve.jobs import EngineJob
from graftwork.serve.lifeline import end_with_parent
from graftwork.serve.messages import ApiError
from graftwork.serve.protocol import BASE, GenerateRequest, LoadAdapter, Piece, make_handler

_BODY_BYTES = 64 * MIB  # the gateway has checked its own, smaller limit
_BEAT_SECONDS = 2.0
_LONG_PROMPT = 16 * 1024
"""Characters from which tokenizing a prompt takes milliseconds."""
_SMALLEST_TOP_P = 1e-6  # 0 would leave no token to choose from


class Engine:
    """A Backend over a real model. `_answer` runs in the batcher's thread, the rest in the loop."""

    def __init__(self, job: EngineJob) -> None:
        from graftwork.model.adapter import load_adapter
        from graftwork.model.generate import Generator
        from graftwork.model.load import load_base
        from graftwork.model.template import Template
        from graftwork.model.threads import guard_spinning, use_threads

        folder = Path(job.base_folder)
        self._template = Template.from_folder(folder, reasoning=job.reasoning)
        _require_template(job, self._template.template_fingerprint)
        guard_spinning(use_threads(job.threads))
        self._model = load_base(folder, dtype=job.dtype, device=job.device)
        for name, adapter in job.adapters.items():
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
        from graftwork.model.adapter import load_adapter

        with self._model_lock:
            load_adapter(self._model, Path(request.folder), name=request.name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        if request.model not in self._models:
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        prompt = await self._render(request.messages)
        room = self._max_positions - len(prompt)
        if room < 1:
            raise self._too_long(f"take {len(prompt)} tokens")
        fitted = request.model_copy(update={"max_tokens": min(request.max_tokens, room)})
        # Greedy answers do not depend on their neighbours, and sampled ones may: those with a seed
        # are answered alone, so that the same seed gives the same answer.
        sampled = request.temperature > 0
        alone = object() if sampled and request.seed is not None else None
        key = (request.model, request.temperature, request.top_p if sampled else 1.0, alone)
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
        from graftwork.model.adapter import acting
        from graftwork.model.generate import Sampling

        request = batch[0].request
        rows = [_Row(ticket, self._template.decode) for ticket in batch]
        sampling = Sampling(
            max_new_tokens=max(ticket.request.max_tokens for ticket in batch),
            temperature=request.temperature,
            top_p=max(request.top_p, _SMALLEST_TOP_P),
            seed=secrets.randbits(32) if request.seed is None else request.seed,
        )
        adapter = None if request.model == BASE else request.model
        with self._model_lock, acting(self._model, adapter):
            prompts = [ticket.prompt for ticket in batch]
            results = self._generator.generate(
                prompts, sampling, on_token=lambda row, token: rows[row].take(token)
            )
        for row, result in zip(rows, results, strict=True):
            row.finish(result.finish_reason)


class _Row:
    """One answer of a batch as it grows: decodes, stops, emits what is certain."""

    def __init__(self, ticket: Ticket, decode: Callable[[list[int]], str]) -> None:
        self._ticket = ticket
        self._decode = decode
        self._flow = TextFlow(ticket.request.stop)
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
            self._ticket.emit(Piece(text=self._unsent))
            self._unsent = ""
        return True

    def finish(self, reason: str) -> None:
        """The last piece; whoever comes first says why."""
        if self._ticket.ended:
            return
        if not self._flow.stopped:
            self._unsent += self._flow.push(self._decode(self._tokens))
        text = self._unsent + self._flow.finish()
        prompt, reply = len(self._ticket.prompt), len(self._tokens)
        self._ticket.emit(Piece(text=text, finish_reason=reason, prompt_tokens=prompt, reply_tokens=reply))


def _require_template(job: EngineJob, actual: str) -> None:
    if job.template_fingerprint not in (None, actual):
        raise UserMistake(
            "the base has another chat template than the release was trained with",
            why=f"expected {job.template_fingerprint}, found {actual}; the answers would be worse "
            "and nothing would say so",
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
        engine = Engine(job)
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
