"""HTTP requests and answers as values, shared by server, gateway and engine. Knows nothing of sockets."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import orjson

JSON_TYPE = ("content-type", "application/json")

TIMEOUT_HEADER = "x-request-timeout-ms"
"""The client's timeout; passed on to the server behind."""

Headers = tuple[tuple[str, str], ...]
RETRY: Headers = (("retry-after", "1"),)

_USUAL_NAMES = (
    "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host",
    "user-agent", "x-api-key", "x-session-id", "x-stainless-arch", "x-stainless-async", "x-stainless-lang",
    "x-stainless-os", "x-stainless-package-version", "x-stainless-read-timeout",
    "x-stainless-retry-count", "x-stainless-runtime", "x-stainless-runtime-version",
)  # fmt: skip
USUAL_HEADERS = {form.encode(): name for name in _USUAL_NAMES for form in (name, name.title())}
"""Names that most clients send, which need not be decoded each time."""

_OFFER = frozenset({"connection", "expect", "http2-settings", "upgrade"})


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request. Header names are lower case; repeated ones are joined with a comma."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def has_body(self) -> bool:
        """Whether the headers announce a body."""
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    def require_no_body(self, what: str) -> None:
        """Raise ApiError if the headers announce a body."""
        if self.has_body:
            raise ApiError(400, f"{what} takes no body")

    def encode_plain_head(self, version: str) -> bytes:
        """The head of the last request of a connection, without an offer to change the protocol."""
        target = f"{self.path}?{self.query}" if self.query else self.path
        lines = [f"{name}: {value}\r\n" for name, value in self.headers.items() if name not in _OFFER]
        head = f"{self.method} {target} HTTP/{version}\r\n{''.join(lines)}connection: close\r\n\r\n"
        return head.encode("latin-1")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer in one piece. `after` is called once the bytes were handed to the socket."""

    status: int
    body: bytes = b""
    headers: Headers = (JSON_TYPE,)
    after: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """A response in pieces. The server always closes `chunks`, even when the client disconnects."""

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
    """Encode the error body that OpenAI's clients expect."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": inner})


def name_failure(error: OSError) -> str:
    """Describe the failure without the address that asyncio writes into its errors."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def error_response(error: ApiError) -> Response:
    return Response(error.status, encode_error(error), (JSON_TYPE, *error.headers))


def json_response(value: object, *, status: int = 200) -> Response:
    return Response(status, orjson.dumps(value))


Handler = Callable[[Request], Awaitable[Answer]]
