"""The embedded engine: the base model and its adapters in one process, behind a unix socket.

Serves exactly the weights that were evaluated, with the engine that evaluated them and the template that they
were trained with, or refuses to start. Requests join and leave the batch at every token, whatever adapter
they ask for. Run as `python -m graftwork.serve.embedded_engine JOB.json`.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from graftwork.inference.engine import EngineSource
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.interaction import Message
from graftwork.records.units import MIB
from graftwork.serve.constrained import GrammarCompiler
from graftwork.serve.engine_handler import make_handler
from graftwork.serve.engine_protocol import (
    BASE,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    end_with_parent,
)
from graftwork.serve.http_messages import ApiError
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.prompt_releases import PromptReleases
from graftwork.serve.replies import GrowingReply
from graftwork.serve.request_loop import RequestLoop, SubmittedRequest, Ticket
from graftwork.text.tool_calls import add_tools

_BODY_BYTES = 64 * MIB  # the gateway has checked its own, smaller limit
_BEAT_SECONDS = 2.0
_LONG_PROMPT = 16 * 1024
"""Characters from which tokenizing a prompt takes milliseconds."""
_TURN_CHARACTERS = 16
"""About what a template writes around a message."""
_RESERVED_TOKENS = 512
"""Of each request that runs at once on a card. A cache that grows voids what was recorded."""
_SMALLEST_TOP_P = 1e-6  # 0 would leave no token to choose from


class EmbeddedBackend:
    """A Backend over a real model. The decoder runs in the loop's thread, the rest in the event loop."""

    def __init__(self, job: EngineJob) -> None:
        import torch

        from graftwork.inference.embedded import EmbeddedEngine, choose_device, precision_on
        from graftwork.model.chat.template import ChatTemplate

        self._template = ChatTemplate.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        _require_template(job, self._template.template_fingerprint)
        device = choose_device(job.engine.device, has_gpu=torch.cuda.is_available)
        source = EngineSource(
            base_folder=Path(job.base_folder),
            adapters={name: Path(folder) for name, folder in job.adapters.items()},
            device=device,
            precision=precision_on(device),
            threads=job.threads,
            rows=job.batch_size,
        )
        self._engine = EmbeddedEngine(source, template=self._template)
        if device != "cpu":
            self._engine.decoder.reserve(job.batch_size, _RESERVED_TOKENS)
        self._grammars = GrammarCompiler(self._template)
        self._models = [BASE, *job.adapters]
        self._max_positions = self._engine.max_positions
        self.loop = RequestLoop(
            self._engine.decoder, wait_seconds=job.batch_wait_ms / 1000, queue_limit=job.queue_limit
        )

    def state(self) -> dict[str, Any]:
        return {
            "models": self._models,
            "pid": os.getpid(),
            "waiting": self.loop.waiting,
            "answered": self.loop.answered,
            "template_fingerprint": self._template.template_fingerprint,
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
        prompt = await self._render(request)
        room = self._max_positions - len(prompt)
        if room < 1:
            raise self._too_long(f"take {len(prompt)} tokens")
        constraint = await self._grammars.compile_for(request)
        ticket = Ticket()
        reply = GrowingReply(
            ticket, request, self._template, prompt_tokens=len(prompt), constraint=constraint
        )
        self.loop.submit(self._make_request(request, reply, prompt, min(request.max_tokens, room)))
        pieces = ticket.pieces()
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    def _make_request(
        self, request: GenerateRequest, reply: GrowingReply, prompt: list[int], most: int
    ) -> SubmittedRequest:
        from graftwork.model.generate.constraint import TokenOptions
        from graftwork.model.generate.requests import GenerationRequest
        from graftwork.model.generate.sampling import Sampling

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

    async def _render(self, request: GenerateRequest) -> list[int]:
        """The prompt as tokens. A long one is tokenized in a thread, so that other streams go on."""
        messages = add_tools(request.messages, request.tools)
        characters = sum(len(message.content) for message in messages) + len(request.prompt or "")
        if characters > self._max_positions * self._template.longest_token:
            raise self._too_long(f"have {characters} characters")
        # Templates write something around every message, also around an empty one.
        if len(messages) > self._max_positions:
            raise self._too_long(f"are {len(messages)} in number")
        try:
            if characters + _TURN_CHARACTERS * len(messages) > _LONG_PROMPT:
                return await asyncio.to_thread(self._encode, messages, request.prompt)
            return self._encode(messages, request.prompt)
        except UserMistake as error:
            param = "prompt" if request.prompt is not None else "messages"
            raise ApiError(400, f"{error.what}: {error.fix}", param=param) from error

    def _encode(self, messages: tuple[Message, ...], prompt: str | None) -> list[int]:
        return self._template.prompt(messages) if prompt is None else self._template.encode_prompt(prompt)

    def _too_long(self, size: str) -> ApiError:
        message = f"the messages {size}; the model has room for {self._max_positions} tokens"
        return ApiError(400, message, param="messages", code="context_length_exceeded")


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
        prompts = PromptReleases()
        engine = EmbeddedBackend(prompts.split(job))
        engine.loop.start()
        server = Server(make_handler(engine, prompts), limits=HttpLimits(max_body_bytes=_BODY_BYTES))
        await server.listen_unix(str(job.socket))
        beating = asyncio.create_task(_beat(heart, engine.loop))
        await stop.wait()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await server.close()
        await asyncio.to_thread(engine.loop.close, seconds=5.0)


async def _beat(heart: Heart, loop: RequestLoop) -> None:
    """An engine that waits for requests is well; one whose step does not end is not."""
    seen = -1
    while True:
        if not loop.running or loop.steps != seen:
            seen = loop.steps
            answered = loop.answered
            await asyncio.to_thread(heart.beat, "serving", answered, answered, waiting=loop.waiting)
        await asyncio.sleep(_BEAT_SECONDS)


if __name__ == "__main__":
    raise SystemExit(run_worker(EngineJob, lambda job: Path(job.folder), work))
