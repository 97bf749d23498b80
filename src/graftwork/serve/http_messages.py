"""HTTP requests and answers as values, shared by server, gateway and engine. Knows nothing of sockets."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import orjson

JSON_TYPE = ("content-type", "application/json")

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request. Header names are lower case; repeated ones are joined with a comma."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def require_no_body(self, what: str) -> None:
        """Raise ApiError where the headers announce a body."""
        if self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers:
            raise ApiError(400, f"{what} takes no body")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer in one piece. `after` is called once the bytes were handed to the socket."""

    status: int
    body: bytes = b""
    headers: Headers = (JSON_TYPE,)
    after: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """An answer in pieces. The server closes `chunks` in every case, also when the client leaves."""

    status: int
    chunks: AsyncGenerator[bytes, None]
    headers: Headers = ()


Answer = Response | StreamResponse


class ApiError(Exception):
    """A refused request: the status and the error for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def encode_error(error: ApiError) -> bytes:
    """The body that OpenAI's clients know how to read."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": inner})


def name_failure(error: OSError) -> str:
    """What went wrong, without the address that asyncio writes into its errors."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def error_response(error: ApiError) -> Response:
    return Response(error.status, encode_error(error), (JSON_TYPE, *error.headers))


def json_response(value: object, *, status: int = 200) -> Response:
    return Response(status, orjson.dumps(value))


Handler = Callable[[Request], Awaitable[Answer]]
