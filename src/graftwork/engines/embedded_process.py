"""The embedded engine: the base model and its adapters in one process, behind a unix socket.

Serves exactly the weights that were evaluated, with the engine that evaluated them and the template that they
were trained with, or refuses to start. A thread decodes: requests join and leave the batch at every token,
whatever adapter they ask for. Run as `python -m graftwork.engines.embedded_process JOB.json`.
"""

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.engines.constrained import GrammarCompiler, GrammarConstraint
from graftwork.engines.interface import EngineSource
from graftwork.engines.llamacpp import max_positions
from graftwork.engines.process import PromptRenderer, ReplyText, describe_token, run_engine
from graftwork.engines.protocol import (
    BASE,
    AlternativeData,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    LogprobData,
    ReplyPiece,
)
from graftwork.http.messages import ApiError
from graftwork.records.errors import GraftError

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.generate.sampling import GenerationRequest, TokenLogprobs

log = logging.getLogger(__name__)

_RESERVED_TOKENS = 512
"""Tokens reserved for each concurrent request on a GPU. A cache that grows invalidates recorded graphs."""
_BATCH_WAIT_SECONDS = 0.004
"""How long the first request of an idle engine waits for others to start with."""
_SMALLEST_TOP_P = 1e-6  # 0 would leave no token to choose from


class Ticket:
    """A request that waits for its reply. `emit` and `fail` may be called from any thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = False
        self._arrived = time.monotonic()
        self.started: float | None = None
        """When the step began in which it was started."""
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[ReplyPiece | ApiError] = asyncio.Queue()

    @property
    def queue_ms(self) -> float | None:
        return None if self.started is None else 1000 * (self.started - self._arrived)

    def emit(self, piece: ReplyPiece) -> None:
        self.ended = self.ended or piece.finish_reason is not None
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def fail(self, error: ApiError) -> None:
        self.ended = True
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, error)

    async def pieces(self) -> AsyncGenerator[ReplyPiece, None]:
        """Yield the reply; leaving early cancels the ticket."""
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


class SubmittedRequest:
    """A ticket, what the decoder gets for it, and what to do when it is answered."""

    def __init__(
        self, ticket: Ticket, generation: "GenerationRequest", *, finish: Callable[[str], None]
    ) -> None:
        self.ticket, self.generation, self.finish = ticket, generation, finish


class StepDecoder(Protocol):
    """What the loop needs of a decoder."""

    slots: int

    @property
    def busy(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def submit(self, request: "GenerationRequest") -> None: ...

    def step(self) -> None: ...

    def reset(self) -> "list[GenerationRequest]": ...


class RequestLoop:
    """Start it, submit requests, close it."""

    def __init__(self, decoder: StepDecoder, *, wait_seconds: float, queue_limit: int) -> None:
        self._decoder = decoder
        self._wait_seconds = wait_seconds
        self._queue_limit = queue_limit
        self._arrived: deque[SubmittedRequest] = deque()
        self._tasks: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open: list[SubmittedRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self.answered = 0
        self.steps = 0

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._arrived) + self._decoder.waiting

    @property
    def running(self) -> bool:
        return bool(self._open)

    def submit(self, request: SubmittedRequest) -> None:
        with self._changed:
            if self.waiting >= self._queue_limit:
                self._arrived = deque(r for r in self._arrived if not r.ticket.cancelled)
            if self.waiting >= self._queue_limit:
                raise ApiError(429, "the engine is full; try again soon", code="full")
            self._arrived.append(request)
            self._changed.notify()

    def call_between(self, task: Callable[[], None]) -> "Future[None]":
        """Call it in the thread when no request runs; new ones wait meanwhile."""
        done: Future[None] = Future()
        with self._changed:
            self._tasks.append((task, done))
            self._changed.notify()
        return done

    def close(self, *, seconds: float) -> None:
        """Start nothing more; running requests may finish within `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._wait_for_work():
            while self._tasks and not self._open:
                task, done = self._tasks.popleft()
                try:
                    task()
                except BaseException as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
            with self._changed:
                while self._arrived and not self._tasks and not self._closed:
                    request = self._arrived.popleft()
                    if not request.ticket.cancelled:
                        self._open.append(request)
                        self._decoder.submit(request.generation)
            if self._open:
                self._step()
        for request in self._arrived:
            request.ticket.fail(ApiError(503, "the engine is stopping", code="stopping"))

    def _wait_for_work(self) -> bool:
        """Wait for work; False when closed and done."""
        with self._changed:
            while not (self._open or self._arrived or self._tasks):
                if self._closed:
                    return False
                self._changed.wait()
            if self._closed and not self._open:
                return False
            if not self._open and self._arrived:
                # Prompts that arrive together are read together.
                deadline = time.monotonic() + self._wait_seconds
                while not self._closed and len(self._arrived) < self._decoder.slots:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not self._changed.wait(remaining):
                        break
            return True

    def _step(self) -> None:
        now = time.monotonic()
        for request in self._open:
            if not request.generation.launched:
                request.ticket.started = now
        try:
            self._decoder.step()
        except Exception:
            # Those that ran are the business of their callers; the next ones may be fine.
            log.exception("a step with %d requests failed", len(self._open))
            self._decoder.reset()
            for request in self._open:
                request.generation.end("stop")
                if not request.ticket.ended:
                    request.ticket.fail(ApiError(500, "the engine failed on this request; see its log"))
        self.steps += 1
        for request in [request for request in self._open if request.generation.done]:
            self._open.remove(request)
            self.answered += 1
            if not request.ticket.ended:
                request.finish(request.generation.result.finish_reason)


class GrowingReply:
    """Decodes tokens, stops, and emits what is certain."""

    def __init__(
        self,
        ticket: Ticket,
        request: GenerateRequest,
        template: "ChatTemplate",
        *,
        prompt_tokens: int,
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.ticket, self.constraint = ticket, constraint
        self.noted_logprobs: deque[TokenLogprobs] = deque()
        self._request, self._template = request, template
        self._prompt_tokens = prompt_tokens
        self._flow = ReplyText(request, template.tool_form if request.tools else None)
        self._tokens: list[int] = []
        self._unsent = ""
        self._logprobs: list[LogprobData] = []

    def take(self, token: int) -> bool:
        """Take one more token; False ends the reply."""
        if self.ticket.cancelled:
            return False
        self._tokens.append(token)
        request = self._request
        if request.logprobs is not None:
            noted = self.noted_logprobs.popleft()
            top = [self._alternative(alternative, value) for alternative, value in noted.top]
            self._logprobs.append({**self._alternative(token, noted.logprob), "top_logprobs": top})
        if request.stream or request.stop:
            self._unsent += self._flow.push(self._decode())
            if self._flow.stopped is not None:
                self.finish("stop")
                return False
        if request.stream and self._unsent:
            self.ticket.emit(ReplyPiece(text=self._unsent, logprobs=self._take_logprobs()))
            self._unsent = ""
        return True

    def finish(self, reason: str) -> None:
        """Emit the last piece."""
        if self.constraint is not None and self.constraint.error:
            message = f"the schema needs more work than is allowed for a token: {self.constraint.error}"
            self.ticket.fail(ApiError(400, message, param="response_format", code="unsupported_schema"))
            return
        if self._flow.stopped is None:
            self._unsent += self._flow.push(self._decode())
        text, calls = self._flow.finish(self._unsent)
        self.ticket.emit(
            ReplyPiece(
                text=text,
                finish_reason=reason,
                prompt_tokens=self._prompt_tokens,
                reply_tokens=len(self._tokens),
                tool_calls=calls,
                logprobs=self._take_logprobs(),
                stop=self._flow.stopped,
                queue_ms=self.ticket.queue_ms,
            )
        )

    def _decode(self) -> str:
        return self._template.decode_text(self._tokens)

    def _take_logprobs(self) -> tuple[LogprobData, ...] | None:
        if self._request.logprobs is None:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return logprobs

    def _alternative(self, token: int, logprob: float) -> AlternativeData:
        return describe_token(self._template.token_bytes(token), logprob)


class EmbeddedBackend:
    """An EngineBackend over a model. The decoder runs in the loop's thread, the rest in the event loop."""

    def __init__(self, job: EngineJob) -> None:
        import torch

        from graftwork.engines.embedded import EmbeddedEngine, choose_device, precision_on

        self._prompts = PromptRenderer(job, positions=max_positions(Path(job.base_folder)))
        device = choose_device(job.engine.device, has_gpu=torch.cuda.is_available)
        source = EngineSource(
            base_folder=Path(job.base_folder),
            adapters={name: Path(folder) for name, folder in job.adapters.items()},
            device=device,
            precision=precision_on(device),
            threads=job.threads,
            rows=job.batch_size,
        )
        self._engine = EmbeddedEngine(source, template=self._prompts.template)
        if device != "cpu":
            self._engine.decoder.reserve(job.batch_size, _RESERVED_TOKENS)
        self._grammars = GrammarCompiler(self._prompts.template)
        self._models = [BASE, *job.adapters]
        self.loop = RequestLoop(
            self._engine.decoder, wait_seconds=_BATCH_WAIT_SECONDS, queue_limit=job.queue_limit
        )

    def state(self) -> dict[str, Any]:
        return {
            "models": self._models,
            "pid": os.getpid(),
            "waiting": self.loop.waiting,
            "answered": self.loop.answered,
            "running": self.loop.running,
            "steps": self.loop.steps,
            "template_fingerprint": self._prompts.fingerprint,
            "device": self._engine.facts.details["device"],
            "precision": self._engine.facts.precision,
        }

    async def load_adapter(self, request: LoadAdapter) -> None:
        """Attach one more adapter when no request runs."""
        if request.name in self._models:
            return
        folder = Path(request.folder)
        attached = self.loop.call_between(lambda: self._engine.load_adapter(request.name, folder))
        try:
            await asyncio.wrap_future(attached)
        except (GraftError, OSError, ValueError, KeyError) as error:
            raise ApiError(400, f"the adapter could not be loaded: {error}") from error
        self._models = [*self._models, request.name]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        if request.model not in self._models:
            raise ApiError(404, f"the engine does not hold {request.model}", code="model_not_found")
        prompt = await self._prompts.render(request)
        constraint = await self._grammars.compile_for(request)
        ticket = Ticket()
        reply = GrowingReply(
            ticket, request, self._prompts.template, prompt_tokens=len(prompt), constraint=constraint
        )
        self.loop.submit(
            self._make_request(
                request, reply, prompt, min(request.max_tokens, self._prompts.room_after(prompt))
            )
        )
        pieces = ticket.pieces()
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    def _make_request(
        self, request: GenerateRequest, reply: GrowingReply, prompt: list[int], most: int
    ) -> SubmittedRequest:
        from graftwork.model.generate.sampling import GenerationRequest, Sampling, TokenOptions

        sampling = Sampling(
            max_new_tokens=most,
            temperature=request.temperature,
            top_p=max(request.top_p, _SMALLEST_TOP_P),
            seed=secrets.randbits(32) if request.seed is None else request.seed,
        )
        ticket, options = reply.ticket, None
        if reply.constraint is not None or request.logprobs is not None:
            options = TokenOptions(reply.constraint, request.logprobs, reply.noted_logprobs)
        generation = GenerationRequest(
            prompt,
            sampling,
            adapter=None if request.model == BASE else request.model,
            on_token=reply.take,
            is_cancelled=lambda: ticket.cancelled,
            options=options,
        )
        return SubmittedRequest(ticket, generation, finish=reply.finish)

    async def close(self) -> None:
        await asyncio.to_thread(self.loop.close, seconds=5.0)


async def _start(job: EngineJob) -> EmbeddedBackend:
    backend = EmbeddedBackend(job)
    backend.loop.start()
    return backend


if __name__ == "__main__":
    raise SystemExit(run_engine(_start))
