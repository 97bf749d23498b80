"""An engine as the gateway uses it, whatever answers behind it: one process, several, another server."""

from collections.abc import Collection
from typing import Literal, NotRequired, Protocol, TypedDict

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import ChatCall

EngineState = Literal["starting", "ready", "frozen", "unreachable", "down", "stopped"]
"""`frozen`: its process does not answer. `unreachable`: the server behind it does not."""

CircuitState = Literal["closed", "open", "half_open"]

OUT_OF_TIME = "timeout"
"""The client's time is over: another model could not answer either."""


class ReplicaStatus(TypedDict):
    name: str
    state: EngineState
    reason: str
    restarts: int
    pid: int | None
    circuit: CircuitState
    outstanding: int
    requests: int
    failures: int


class EngineStatus(TypedDict):
    state: EngineState
    reason: str
    restarts: int
    pid: int | None
    replicas: NotRequired[list[ReplicaStatus]]
    retries: NotRequired[int]
    retries_refused: NotRequired[int]
    """Retries that the budget did not allow."""


class ReplyStream(Protocol):
    """A streamed reply. Closing it early cancels the work."""

    async def next_pieces(self) -> list[PieceData] | None:
        """The pieces that have arrived since the last call; None at the end. Raises OSError or ApiError."""
        ...

    def close(self) -> None: ...


class ServingEngine(Protocol):
    """An engine as the gateway uses it. Its calls raise OSError if the engine cannot be reached."""

    @property
    def state(self) -> EngineState: ...

    @property
    def models(self) -> list[str]:
        """The loaded models: BASE and the ids of releases."""
        ...

    def describe(self) -> EngineStatus: ...

    async def complete(self, call: ChatCall, *, model: str) -> PieceData:
        """The whole reply. Raises ApiError if the engine refuses the request."""
        ...

    async def stream(self, call: ChatCall, *, model: str) -> ReplyStream:
        """The reply in pieces, once the engine has accepted the request. Raises ApiError if it does not."""
        ...

    async def load_adapter(self, name: str, folder: str, *, keep: Collection[str] = ()) -> None:
        """Load an adapter. Those in `keep` stay loaded whatever room it needs."""
        ...


class NoReplica(ConnectionError):
    """No replica can be asked: all are down, or their circuits are open."""


def failure_code(error: BaseException) -> str | None:
    """Why another replica or model should be asked, as a short code; None if none should."""
    if isinstance(error, ApiError):
        code = error.code or "engine_error"
        if code == OUT_OF_TIME:
            return None
        return code if error.status >= 500 or error.status == 429 else None
    if isinstance(error, TimeoutError):
        return "attempt_timeout"
    return "engine_down" if isinstance(error, OSError) else None
