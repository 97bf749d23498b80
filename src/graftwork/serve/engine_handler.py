"""The server side of the engine protocol, over any `EngineBackend`.

In: a backend and the releases that are a prompt on the base. Out: a handler of `/generate`, `/adapters` and
`/state`. Knows no model.
"""

import asyncio
from collections.abc import AsyncGenerator

import orjson
from pydantic import ValidationError

from graftwork.serve.engine_protocol import (
    FAILURE,
    EmbeddingBackend,
    EngineBackend,
    GenerateRequest,
    LoadAdapter,
    ReplyPiece,
)
from graftwork.serve.http_messages import (
    Answer,
    ApiError,
    Handler,
    Request,
    StreamResponse,
    json_response,
    name_failure,
)
from graftwork.serve.prompt_releases import PromptReleases


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
                asked = LoadAdapter.from_json(request.body)
                if not prompts.take(asked.name, asked.folder):
                    await backend.load_adapter(asked)
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
            raise ApiError(503, "the engine's server does not answer", code="engine_down") from error
        raise ApiError(504, "no answer in the time that the client allows", code="timeout") from error
    except OSError as error:
        message = f"the engine's server does not answer: {name_failure(error)}"
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
    first: ReplyPiece, rest: AsyncGenerator[ReplyPiece, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield _encode(first)
        async for piece in rest:
            yield _encode(piece)
    except ApiError as error:
        # The head is already sent: the error is the last line.
        yield _encode_failure(error)
    finally:
        await rest.aclose()


def _encode(piece: ReplyPiece) -> bytes:
    return orjson.dumps(piece.to_data(), option=orjson.OPT_APPEND_NEWLINE)


def _encode_failure(error: ApiError) -> bytes:
    what = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
    return orjson.dumps({FAILURE: what}, option=orjson.OPT_APPEND_NEWLINE)
