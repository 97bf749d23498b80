"""The endpoint of this project, asked as a client on this machine asks it.

In: the settings by which it was started. Out: its answers. Its own certificate is trusted and no other; the
key comes from the environment and goes into a header only.
"""

import json
import os
import ssl
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from graftwork.process.http_client import LONGEST_ANSWER, HttpAnswer, HttpClient
from graftwork.serve.settings import ServeSettings, is_loopback


class OwnEndpoint:
    """`url` is without /v1. `admin` asks the listener for metrics and health, where there is one."""

    def __init__(self, settings: ServeSettings, *, root: Path, admin: bool = False) -> None:
        host, port = settings.host, settings.port
        if admin and settings.admin_port is not None:
            host, port = settings.admin_host or "127.0.0.1", settings.admin_port
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if settings.tls_certificate is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.is_here = is_loopback(host) and port != 0
        """Whether its address is fixed, and on this machine."""
        self._settings, self._root = settings, root

    def send(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float,
        longest: int = LONGEST_ANSWER,
        headers: Mapping[str, str] = {},
    ) -> AbstractContextManager[HttpAnswer]:
        """GET, or POST where there is a body. Raises NoAnswer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=dict(headers))
        request.add_header("content-type", "application/json")
        if key := os.environ.get(self._settings.api_key_env or "", "").strip():
            request.add_header("authorization", f"Bearer {key}")
        # No proxy of the environment: it could not reach this machine.
        client = HttpClient(longest=longest, proxies=False, context=self._trust_certificate())
        return client.send(request, seconds=seconds)

    def _trust_certificate(self) -> ssl.SSLContext | None:
        """Trusts the endpoint's own certificate; its name need not be that of this machine."""
        if self._settings.tls_certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self._root / self._settings.tls_certificate)
        except (OSError, ssl.SSLError):
            return None
        return context
