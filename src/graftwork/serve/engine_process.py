"""What engines of other programs share: rendered prompts, growing texts, adapters in use, the process itself.

An engine process renders prompts with the template that the releases were trained with, whatever computes the
answer, and refuses to start with another one.
"""

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from graftwork.process.heartbeat import Heart
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message
from graftwork.records.units import MIB
from graftwork.serve.engine_handler import make_handler
from graftwork.serve.engine_protocol import EngineBackend, EngineJob, GenerateRequest
from graftwork.serve.http_messages import ApiError
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.prompt_releases import PromptReleases
from graftwork.text.tool_calls import add_tools

BEAT_SECONDS = 2.0
_BODY_BYTES = 64 * MIB  # the gateway has checked its own, smaller limit
_LONG_PROMPT = 16 * 1024
"""Characters from which tokenizing a prompt takes milliseconds."""
_TURN_CHARACTERS = 16
"""About what a template writes around a message."""

A = TypeVar("A")


class PromptRenderer:
    """Conversations as tokens of the base's template. `positions` is the longest prompt with its answer."""

    def __init__(self, job: EngineJob, *, positions: int) -> None:
        from graftwork.model.chat.template import ChatTemplate

        self.template = ChatTemplate.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        self.fingerprint = self.template.template_fingerprint
        self._positions = positions
        if job.template_fingerprint not in (None, self.fingerprint):
            raise UserMistake(
                "the base has another chat template than the release was trained with",
                why=f"expected {job.template_fingerprint}, found {self.fingerprint}; the answers would be "
                "worse and nothing would show it",
                fix="serve the release with its own base, or train again on this one",
                where=job.base_folder,
            )

    async def render(self, request: GenerateRequest) -> list[int]:
        """The prompt as tokens. A long one is tokenized in a thread, so that other streams go on."""
        messages = add_tools(request.messages, request.tools)
        param = "messages" if request.prompt is None else "prompt"
        characters = sum(len(message.content) for message in messages) + len(request.prompt or "")
        if characters > self._positions * self.template.longest_token:
            raise self._too_long(f"has {characters} characters", param)
        # Templates write something around every message, also around an empty one.
        if len(messages) > self._positions:
            raise self._too_long(f"has {len(messages)} messages", param)
        try:
            if characters + _TURN_CHARACTERS * len(messages) > _LONG_PROMPT:
                prompt = await asyncio.to_thread(self._encode, messages, request.prompt)
            else:
                prompt = self._encode(messages, request.prompt)
        except UserMistake as error:
            raise ApiError(400, f"{error.what}: {error.fix}", param=param) from error
        if len(prompt) >= self._positions:
            raise self._too_long(f"takes {len(prompt)} tokens", param)
        return prompt

    def _encode(self, messages: tuple[Message, ...], prompt: str | None) -> list[int]:
        return self.template.prompt(messages) if prompt is None else self.template.encode_prompt(prompt)

    def room_after(self, prompt: list[int]) -> int:
        return self._positions - len(prompt)

    def _too_long(self, size: str, param: str) -> ApiError:
        message = f"the prompt {size}; the engine has room for {self._positions} tokens"
        return ApiError(400, message, param=param, code="context_length_exceeded")


class RequestRoom:
    """A limited number of requests and tokens at once; others wait in the order in which they came."""

    def __init__(self, *, requests: int, tokens: int, queue_limit: int) -> None:
        self._requests, self._tokens, self._queue_limit = requests, tokens, queue_limit
        self._changed = asyncio.Condition()
        self._queue: list[object] = []
        self.running = 0
        self.answered = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def take(self, tokens: int) -> AsyncGenerator[None, None]:
        """Wait for room for a request of so many tokens. Raises ApiError where too many wait already."""
        if len(self._queue) >= self._queue_limit:
            raise ApiError(429, "the engine is full; try again soon", code="full")
        place = object()
        self._queue.append(place)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._queue[0] is place and self._fits(tokens))
        except BaseException:
            # Those behind one that gives up may have room at once.
            self._queue.remove(place)
            async with self._changed:
                self._changed.notify_all()
            raise
        self._queue.remove(place)
        self.running += 1
        self._tokens -= tokens
        try:
            # The next one may have room as well.
            async with self._changed:
                self._changed.notify_all()
            yield
        finally:
            self.running -= 1
            self.answered += 1
            self._tokens += tokens
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, tokens: int) -> bool:
        return self.running < self._requests and tokens <= self._tokens


class AdapterSet(Generic[A]):
    """Loaded adapters by release, and how many requests use each."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._loaded: dict[str, A] = {}
        self._users: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def add(self, name: str, adapter: A) -> None:
        self._loaded[name] = adapter

    def items(self) -> dict[str, A]:
        return dict(self._loaded)

    def take_surplus(self, *, keep: Collection[str]) -> list[A]:
        """Remove what is more than `most`: the oldest that no alias points at and no request uses."""
        idle = [name for name in self._loaded if name not in keep and not self._users.get(name)]
        surplus = idle[: max(len(self._loaded) - self._most, 0)]
        return [self._loaded.pop(name) for name in surplus]

    @contextmanager
    def using(self, name: str | None) -> Iterator[A | None]:
        """Keep an adapter loaded while the block runs; None for the base, which always is."""
        if name is None:
            yield None
            return
        self._users[name] = self._users.get(name, 0) + 1
        try:
            yield self._loaded[name]
        finally:
            self._users[name] -= 1


class ProcessBackend(EngineBackend, Protocol):
    """A backend that has something to close."""

    async def close(self) -> None: ...


async def serve_backend(job: EngineJob, start: Callable[[EngineJob], Awaitable[ProcessBackend]]) -> None:
    """Start the backend, serve it on the job's socket until SIGTERM, and keep the heartbeat going."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with Heart(Path(job.folder)) as heart:
        heart.beat("loading", 0, 1)
        prompts = PromptReleases()
        backend = await start(prompts.split(job))
        server = Server(make_handler(backend, prompts), limits=HttpLimits(max_body_bytes=_BODY_BYTES))
        await server.listen_unix(str(job.socket))
        beating = asyncio.create_task(_beat(heart, backend.state))
        await stop.wait()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await server.close()
        await backend.close()


async def _beat(heart: Heart, state: Callable[[], dict[str, Any]]) -> None:
    while True:
        now = state()
        answered = now["answered"]
        await asyncio.to_thread(heart.beat, "serving", answered, answered, waiting=now["waiting"])
        await asyncio.sleep(BEAT_SECONDS)
