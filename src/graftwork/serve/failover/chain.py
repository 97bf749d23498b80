"""Which failures another replica or model may answer for, and who is asked next. Pure."""

from collections.abc import Mapping

from graftwork.serve.http_messages import ApiError

ANY_MODEL = "*"
_OUT_OF_TIME = "timeout"
"""The client's time is over: another model could not answer either."""


class NoReplica(ConnectionError):
    """No replica can be asked: all are down, or their circuits are open."""


def failure_code(error: BaseException) -> str | None:
    """Why another replica or model should be asked, as a short code; None if none should."""
    if isinstance(error, ApiError):
        code = error.code or "engine_error"
        if code == _OUT_OF_TIME:
            return None
        return code if error.status >= 500 or error.status == 429 else None
    if isinstance(error, TimeoutError):
        return "attempt_timeout"
    return "engine_down" if isinstance(error, OSError) else None


def is_replica_fault(error: BaseException) -> bool:
    """Whether it counts against the replica. Being full does not."""
    if isinstance(error, ApiError):
        return error.status >= 500 and error.code != _OUT_OF_TIME
    return isinstance(error, OSError)


def find_chain(chains: Mapping[str, tuple[str, ...]], model: str, *aliases: str) -> tuple[str, ...]:
    """Who answers instead of the model, in order. Its own chain goes before those of its other names."""
    found = next((chains[name] for name in (model, *aliases, ANY_MODEL) if name in chains), ())
    return tuple(name for name in found if name != model)
