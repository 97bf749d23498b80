"""What gateway and engine say to each other: HTTP with JSON over a unix socket.

`POST /generate` takes a GenerateRequest. Streamed, it answers with one JSON line a piece, the last
one with a `finish_reason`; else with that last line alone, its `text` being the whole answer.
`POST /adapters` takes a LoadAdapter. `GET /state` says who answers.
"""

import os
import sys
import threading
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from graftwork.records.base import Record
from graftwork.records.interaction import Message
from graftwork.serve.http_messages import Answer, ApiError, Handler, Request, StreamResponse, json_response

BASE = "base"
"""The engine's name for the model without an adapter."""


class GenerateRequest(Record):
    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False


class LoadAdapter(Record):
    name: str
    folder: str


class ReplyPiece(Record):
    """A part of an answer. The last one says why it ended and what it took."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0


class EngineBackend(Protocol):
    """What answers behind the protocol: the engine, or its stand-in."""

    def state(self) -> dict[str, Any]: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        """Pieces of the answer; closing it early cancels the work. Raises ApiError."""
        ...

    async def load_adapter(self, request: LoadAdapter) -> None: ...


def make_handler(backend: EngineBackend) -> Handler:
    """The engine's side of the protocol over any backend."""

    async def handle(request: Request) -> Answer:
        route = (request.method, request.path)
        try:
            if route == ("POST", "/generate"):
                return await _generate(backend, GenerateRequest.from_json(request.body))
            if route == ("POST", "/adapters"):
                await backend.load_adapter(LoadAdapter.from_json(request.body))
                return json_response(backend.state())
        except ValidationError as error:
            raise ApiError(400, f"the gateway sent a wrong request: {error}") from error
        if route == ("GET", "/state"):
            return json_response(backend.state())
        raise ApiError(404, f"the engine has no {request.method} {request.path}")

    return handle


async def _generate(backend: EngineBackend, request: GenerateRequest) -> Answer:
    pieces = backend.generate(request)
    if not request.stream:
        parts = [piece async for piece in pieces]
        whole = parts[-1].model_copy(update={"text": "".join(piece.text for piece in parts)})
        return json_response(whole.model_dump())
    # The first piece before the head, so that a refusal still has a status of its own.
    first = await anext(pieces)
    headers = (("content-type", "application/x-ndjson"),)
    return StreamResponse(200, _encode_pieces(first, pieces), headers)


async def _encode_pieces(
    first: ReplyPiece, rest: AsyncGenerator[ReplyPiece, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield _encode(first)
        async for piece in rest:
            yield _encode(piece)
    finally:
        await rest.aclose()


def _encode(piece: ReplyPiece) -> bytes:
    value = {"text": piece.text} if piece.finish_reason is None else piece.model_dump()
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


class EngineJob(Record):
    """One base and the adapters beside it, behind a socket that only this user can open."""

    folder: str
    """The engine's own folder: lock, heartbeat, log, error."""

    base_folder: str
    template_fingerprint: str | None = None
    """The template that the releases were trained with; another one is refused."""

    reasoning: bool = True
    """Whether the template may let the model think first, as the rows were rendered."""

    adapters: dict[str, str] = {}
    """Release id to the folder of its adapter."""

    socket: str | None = None
    """Path of the unix socket; None lets the gateway choose one."""

    batch_size: int = 8
    batch_wait_ms: float = 4.0
    queue_limit: int = 128
    threads: int | None = None
    dtype: str = "float32"
    device: str = "cpu"


def end_with_parent() -> None:
    """From now on, the end of standard input is the end of this process."""
    threading.Thread(target=_wait_for_end, name="lifeline", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # Not sys.exit: a thread inside a long computation must not keep the process alive.
    os._exit(1)
