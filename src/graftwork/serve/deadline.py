"""The time that a client allows: from its header into the request, and on to the engine."""

import math
import time
from dataclasses import replace

from graftwork.serve.api.call import ChatCall
from graftwork.serve.http_messages import ApiError, Headers, Request

TIMEOUT_HEADER = "x-request-timeout-ms"


def with_deadline(call: ChatCall, request: Request) -> ChatCall:
    """The call with the deadline that the client's header sets, if it has one. Raises ApiError."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return call
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        message = f"the header {TIMEOUT_HEADER} must be a positive number of milliseconds"
        raise ApiError(400, message, param=TIMEOUT_HEADER)
    return replace(call, deadline=time.monotonic() + milliseconds / 1000)


def timeout_headers(seconds: float | None) -> Headers:
    """What passes the remaining time on to another server."""
    return () if seconds is None else ((TIMEOUT_HEADER, f"{max(seconds * 1000, 1):.0f}"),)
