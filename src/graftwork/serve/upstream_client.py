"""An HTTP client for a server at any URL, with TLS where the URL asks for it.

In: a base URL and an optional key. Out: replies as of `http_client`. The key goes into a header only.
"""

import asyncio
import ssl
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import orjson

from graftwork.serve.http_client import Client, ClientReply, Link
from graftwork.serve.http_messages import JSON_TYPE, ApiError, Headers
from graftwork.text.messages import hide


class UpstreamClient(Client):
    """Targets are relative to the URL's path: `/chat/completions` of `https://host/v1`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._name = parts.hostname or "localhost"
        self._at = parts.port or (443 if self._tls else 80)
        self._path_prefix = parts.path
        self._key: Headers = (("authorization", f"Bearer {key}"),) if key else ()
        self.secrets = (key,) if key else ()
        """What no message to a client may repeat."""
        super().__init__(host=parts.netloc)

    async def _connect(self) -> Link:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(Link, self._name, self._at, ssl=self._tls)
        return link

    async def post(
        self, target: str, body: dict[str, Any], *, from_root: bool = False, headers: Headers = ()
    ) -> ClientReply:
        """`from_root` leaves out the path of the URL."""
        path = target if from_root else f"{self._path_prefix}{target}"
        return await self.send(
            "POST", path, body=orjson.dumps(body), headers=(JSON_TYPE, *self._key, *headers)
        )

    async def get(self, target: str, *, from_root: bool = False) -> ClientReply:
        path = target if from_root else f"{self._path_prefix}{target}"
        return await self.send("GET", path, headers=self._key)


def explain_refusal(status: int, body: bytes, secrets: Collection[str] = ()) -> ApiError:
    """A server's refusal as the gateway passes it on: its message and field, without our key or address.

    Some servers quote the key that they refuse, which is the operator's and not the client's.
    """
    message, param = f"the engine's server answered with status {status}", None
    with suppress(orjson.JSONDecodeError, AttributeError, TypeError):
        found = orjson.loads(body)
        error = found.get("error", found)
        if isinstance(error, str):
            message = error
        elif isinstance(detail := error.get("detail"), list) and detail:
            # The form of FastAPI: a list of fields with what is wrong with each.
            param = ".".join(str(part) for part in detail[0].get("loc", ()) if part != "body")
            message = f"{param} {detail[0].get('msg', '')}".strip()
        else:
            message = str(error.get("message") or detail or error)
            param = error.get("param")
    passed_on = _PASSED_ON.get(status, 502)
    named = hide(str(param), secrets)[:200] if param and passed_on == 400 else None
    # Cut last: a key that is cut in the middle would no longer be found.
    return ApiError(passed_on, hide(message, secrets)[:500], param=named, code="engine_error")


_PASSED_ON = {400: 400, 404: 404, 413: 413, 422: 400, 429: 429, 503: 503}
"""What the client can act upon; everything else is the server's fault, or ours."""
