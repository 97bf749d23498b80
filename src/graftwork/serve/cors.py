"""Lets web pages of named origins call the endpoint. Without such origins, no header of CORS is ever sent."""

from collections.abc import Collection
from dataclasses import replace

from graftwork.http.messages import (
    Answer,
    ApiError,
    Handler,
    Headers,
    Request,
    Response,
    error_response,
)

_ALLOWED = (
    ("access-control-allow-methods", "GET, POST"),
    (
        "access-control-allow-headers",
        "authorization, content-type, x-api-key, x-session-id, anthropic-version",
    ),
    ("access-control-max-age", "600"),
)
_EXPOSED = ("access-control-expose-headers", "x-graft-release, x-graft-capture, retry-after")


def is_preflight(request: Request) -> bool:
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def allow_origins(handler: Handler, origins: Collection[str]) -> Handler:
    """The handler with CORS headers for requests of these origins. Browsers send no key with a preflight."""

    async def answer(request: Request) -> Answer:
        origin = request.headers.get("origin", "")
        allowed = origin in origins
        if is_preflight(request):
            if not allowed:
                raise ApiError(403, "this origin is not allowed", code="origin_not_allowed")
            return Response(204, headers=(*_origin(origin), *_ALLOWED))
        try:
            given = await handler(request)
        except ApiError as error:
            given = error_response(error)
        return replace(given, headers=(*given.headers, *_origin(origin), _EXPOSED)) if allowed else given

    return answer


def _origin(origin: str) -> Headers:
    return (("access-control-allow-origin", origin), ("vary", "origin"))
