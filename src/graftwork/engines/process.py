"""What every engine process is made of: the protocol's server side, prompts, room, replies, the process.

An engine process renders prompts with the template that the releases were trained with, whatever computes the
answer, and refuses to start with another one. Releases that are a prompt on the base instead of weights are
served the same way by any engine: with the prompt before the messages.
"""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson
from pydantic import ValidationError

from graftwork.engines.protocol import (
    BASE,
    FAILURE,
    AlternativeData,
    CallData,
    EmbeddingBackend,
    EngineBackend,
    EngineJob,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
    end_with_parent,
)
from graftwork.http.messages import (
    Answer,
    ApiError,
    Handler,
    Request,
    StreamResponse,
    json_response,
    name_failure,
)
from graftwork.http.server import HttpLimits, Server
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.base import MIB
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.records.release import PROMPT_FILE, PromptVariant
from graftwork.text.tool_calls import add_tools

if TYPE_CHECKING:
    from graftwork.model.chat.tool_form import ToolForm


BEAT_SECONDS = 2.0
_BODY_BYTES = 64 * MIB  # the gateway has checked its own, smaller limit
_LONG_PROMPT = 16 * 1024
"""Length in characters from which tokenizing a prompt takes milliseconds."""
_TURN_CHARACTERS = 16
"""Approximate number of characters that a template adds to a message."""
_SYSTEM = ("system", "developer")

A = TypeVar("A")


class PromptReleases:
    def __init__(self) -> None:
        self._prompts: dict[str, PromptVariant] = {}

    @property
    def names(self) -> list[str]:
        return list(self._prompts)

    def split(self, job: EngineJob) -> EngineJob:
        """Take the prompts of the job; returns the job with what has weights."""
        weights = {name: folder for name, folder in job.adapters.items() if not self.take(name, folder)}
        return job.model_copy(update={"adapters": weights})

    def take(self, name: str, folder: str) -> bool:
        """Whether the release is a prompt; if so, it is kept for its requests."""
        file = Path(folder) / PROMPT_FILE
        if not file.is_file():
            return False
        self._prompts[name] = PromptVariant.from_json(file.read_bytes())
        return True

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request as the base answers it. Completions and embeddings take no prompt."""
        prompt = self._prompts.get(request.model)
        if prompt is None:
            return request
        update: dict[str, Any] = {"model": BASE}
        if request.prompt is None and request.embed is None:
            update["messages"] = prompt.apply(request.messages)
            if request.chat is not None:
                update["chat"] = {**request.chat, "messages": _put_before(prompt, request.chat["messages"])}
        return request.model_copy(update=update)


def _put_before(prompt: PromptVariant, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a client sent them, with the prompt; tools are not included."""
    if prompt.instruction is not None:
        messages = [turn for turn in messages if turn["role"] not in _SYSTEM]
        if prompt.instruction:
            messages = [{"role": "system", "content": prompt.instruction}, *messages]
    opening = next((i for i, turn in enumerate(messages) if turn["role"] not in _SYSTEM), len(messages))
    examples = [{"role": turn.role, "content": turn.content} for turn in prompt.examples]
    return [*messages[:opening], *examples, *messages[opening:]]


class PromptRenderer:
    """Renders conversations to tokens with the base's template. `positions` is the longest prompt with its
    answer.
    """

    def __init__(self, job: EngineJob, *, positions: int) -> None:
        from graftwork.model.chat.template import ChatTemplate

        self.template = ChatTemplate.from_folder(Path(job.base_folder), reasoning=job.reasoning)
        self.fingerprint = self.template.template_fingerprint
        self._positions = positions
        if job.template_fingerprint not in (None, self.fingerprint):
            raise UserError(
                "the base has a different chat template than the release was trained with",
                why=f"expected {job.template_fingerprint}, found {self.fingerprint}; the answers "
                "would silently be worse",
                fix="serve the release with its own base, or train again on this one",
                where=job.base_folder,
            )

    async def render(self, request: GenerateRequest) -> list[int]:
        """The prompt as tokens. A long one is tokenized in a thread, so that other streams continue."""
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
        except UserError as error:
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
    """A limit on concurrent requests and tokens; others wait in order of arrival."""

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
        """Wait for room for a request of this many tokens. Raises ApiError if too many are waiting."""
        if len(self._queue) >= self._queue_limit:
            raise ApiError(429, "the engine is full; try again soon", code="full")
        ticket = object()
        self._queue.append(ticket)
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: (
                        self._queue[0] is ticket and self.running < self._requests and tokens <= self._tokens
                    )
                )
        except BaseException:
            # Those after one that gives up may have room at once.
            self._queue.remove(ticket)
            async with self._changed:
                self._changed.notify_all()
            raise
        self._queue.remove(ticket)
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
        """Remove adapters beyond `most`: the oldest that no alias points at and no request uses."""
        idle = [name for name in self._loaded if name not in keep and not self._users.get(name)]
        surplus = idle[: max(len(self._loaded) - self._most, 0)]
        return [self._loaded.pop(name) for name in surplus]

    @contextmanager
    def using(self, name: str | None) -> Iterator[A | None]:
        """Keep an adapter loaded while the block runs; None for the base, which is always loaded."""
        if name is None:
            yield None
            return
        self._users[name] = self._users.get(name, 0) + 1
        try:
            yield self._loaded[name]
        finally:
            self._users[name] -= 1


def make_handler(backend: EngineBackend, prompts: PromptReleases) -> Handler:
    def describe() -> Answer:
        state = backend.state()
        return json_response({**state, "models": [*state["models"], *prompts.names]})

    async def handle(request: Request) -> Answer:
        route = (request.method, request.path)
        try:
            if route == ("POST", "/generate"):
                return await _generate(backend, prompts.apply(GenerateRequest.from_json(request.body)))
            if route == ("POST", "/adapters"):
                adapter = LoadAdapter.from_json(request.body)
                if not prompts.take(adapter.name, adapter.folder):
                    await backend.load_adapter(adapter)
                return describe()
        except ValidationError as error:
            raise ApiError(400, f"the gateway sent an invalid request: {error}") from error
        if route == ("GET", "/state"):
            return describe()
        raise ApiError(404, f"the engine has no {request.method} {request.path}")

    return handle


async def _generate(backend: EngineBackend, request: GenerateRequest) -> Answer:
    try:
        async with asyncio.timeout(request.timeout_seconds) as limit:
            return await _answer(backend, request)
    except TimeoutError as error:
        if not limit.expired():
            raise ApiError(503, "the engine's server is not responding", code="engine_down") from error
        raise ApiError(504, "no answer in the time that the client allows", code="timeout") from error
    except OSError as error:
        message = f"the engine's server is not responding: {name_failure(error)}"
        raise ApiError(503, message, code="engine_down") from error


async def _answer(backend: EngineBackend, request: GenerateRequest) -> Answer:
    if request.embed is not None:
        if not isinstance(backend, EmbeddingBackend):
            message = "embeddings are not supported: the engine of this server does not compute them; the "
            message += "kinds vllm, sglang and endpoint pass them on"
            raise ApiError(404, message, code="unsupported_endpoint")
        return json_response((await backend.embed(request)).to_data())
    pieces = backend.generate(request)
    if not request.stream:
        parts = [piece async for piece in pieces]
        whole = parts[-1].to_data()
        whole["text"] = "".join(piece.text for piece in parts)
        whole.pop("call_deltas", None)
        if request.logprobs is not None:
            whole["logprobs"] = [token for piece in parts for token in piece.logprobs or ()]
        return json_response(whole)
    # Wait for the first piece before sending the head, so that a refusal gets its own status.
    first = await anext(pieces)
    headers = (("content-type", "application/x-ndjson"),)
    return StreamResponse(200, _encode_pieces(first, pieces), headers)


async def _encode_pieces(
    first: ReplyPiece, pieces: AsyncGenerator[ReplyPiece, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield _encode(first)
        async for piece in pieces:
            yield _encode(piece)
    except ApiError as error:
        # The head is already sent: the error is the last line.
        what = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        yield orjson.dumps({FAILURE: what}, option=orjson.OPT_APPEND_NEWLINE)
    finally:
        await pieces.aclose()


def _encode(piece: ReplyPiece) -> bytes:
    return orjson.dumps(piece.to_data(), option=orjson.OPT_APPEND_NEWLINE)


def run_engine(start: Callable[[EngineJob], Awaitable[EngineBackend]]) -> int:
    """Run the process of an engine, from its job to its exit code."""

    def work(job: EngineJob) -> None:
        end_with_parent()
        asyncio.run(serve_backend(job, start))

    return run_worker(EngineJob, lambda job: Path(job.folder), work)


async def serve_backend(job: EngineJob, start: Callable[[EngineJob], Awaitable[EngineBackend]]) -> None:
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
    """An engine that waits for requests is healthy; one whose step does not end is not."""
    last_steps = None
    while True:
        now = state()
        if "steps" not in now or not now["running"] or now["steps"] != last_steps:
            last_steps, answered = now.get("steps"), now["answered"]
            await asyncio.to_thread(heart.beat, "serving", answered, answered, waiting=now["waiting"])
        await asyncio.sleep(BEAT_SECONDS)


class TextStream:
    """`push(text)` returns the new part. `stopped` is the stop string that appeared first. From the first of
    `holds` on, text is held back until the end.
    """

    def __init__(self, stops: tuple[str, ...], holds: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._holds = holds
        self._marks = (*stops, *holds)
        self._sent = 0
        self.text = ""
        """Everything, up to the stop string."""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """`text` is everything so far; it replaces what was pushed before."""
        if self.stopped is not None:
            return ""
        matches = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if matches:
            position, self.stopped = min(matches)
            self.text = text[:position]
            return self._advance(self._certain(self.text))
        self.text = text
        # A character of several tokens shows as U+FFFD until it is whole.
        whole = len(text.rstrip("\ufffd"))
        # The last characters could be the beginning of a mark.
        held_back = max((_overlap(text[:whole], mark) for mark in self._marks), default=0)
        return self._advance(self._certain(text[: whole - held_back]))

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(len(self.text))

    def _certain(self, text: str) -> int:
        if not self._holds:
            return len(text)
        positions = [position for mark in self._holds if (position := text.find(mark)) >= 0]
        # White space before a call belongs to the call.
        return len(text[: min(positions, default=len(text))].rstrip())

    def _advance(self, to: int) -> str:
        piece = self.text[self._sent : max(to, 0)]
        self._sent = max(self._sent, to)
        return piece


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the mark, shorter than the mark itself."""
    end = text[max(len(text) - len(mark) + 1, 0) :] if mark else ""
    start = end.find(mark[:1]) if end else -1
    while start >= 0:
        if mark.startswith(end[start:]):
            return len(end) - start
        start = end.find(mark[0], start + 1)
    return 0


class ReplyText:
    """The text of a reply to one request: what is final so far, and at the end its tool calls. `opening` is
    the start of a call that is already in the prompt: the whole reply continues it.
    """

    def __init__(self, request: GenerateRequest, form: "ToolForm | None", *, opening: str = "") -> None:
        self._form = form if request.tools else None
        self._parallel = request.parallel_tool_calls
        self._opening = opening
        self._flow = TextStream(request.stop, ("",) if opening else _call_marks(self._form))

    @property
    def stopped(self) -> str | None:
        return self._flow.stopped

    @property
    def text(self) -> str:
        return self._flow.text

    def push(self, text: str) -> str:
        """`text` is everything so far. Returns the new part that can be sent."""
        return self._flow.push(text)

    def finish(self, unsent: str = "") -> tuple[str, tuple[CallData, ...]]:
        """Return the text that is not sent yet, and the calls. `unsent` was returned and not sent."""
        remaining = unsent + self._flow.finish()
        whole = self._flow.text
        parsed = None
        if self._form is not None:
            calls = f"{self._opening}{whole}{self._form.after}" if self._opening else whole
            parsed = self._form.read(calls)
        if parsed is None:
            return remaining, ()
        tool_calls: list[CallData] = [
            {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            for call in parsed.calls
        ]
        text = parsed.text.removeprefix(whole[: len(whole) - len(remaining)])
        return text, tuple(tool_calls if self._parallel else tool_calls[:1])


def describe_token(data: bytes, logprob: float) -> AlternativeData:
    # JSON has no infinity; OpenAI writes -9999 for tokens that cannot come.
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def _call_marks(form: "ToolForm | None") -> tuple[str, ...]:
    """Where a call may begin. Text from there on is held back, since it may turn out to be a call."""
    if form is None:
        return ()
    marks = {mark for text in (form.alone, form.before) if text is not None and (mark := text.strip())}
    return tuple(sorted(marks)) if form.alone.strip() else ("{", "[")
