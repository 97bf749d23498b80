"""A client of a provider's REST API: what RunPod, Lambda and Azure's Key Vault have in common.

In: a method, a path and a body. Out: the JSON of the answer, or an error of the fleet. Requests that may be
repeated are, while the server is busy or broken; a creation is sent once.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.process.http_client import HttpClient, NoAnswer, Retries, may_pass, retry_after
from graftwork.records.errors import GraftError

SECONDS = 30.0
ATTEMPTS = 4


class RestClient:
    """`key` is sent as a bearer token."""

    name: str
    """Of the provider, in errors."""

    def __init__(self, key: str, base_url: str, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._key, self._base, self._wait = key, base_url.rstrip("/"), wait
        self._http = HttpClient()

    def get(self, path: str) -> dict[str, Any]:
        return self.checked(*self.repeat("GET", path))

    def find(self, path: str) -> dict[str, Any] | None:
        """As `get`; None: the provider does not have it."""
        status, body = self.repeat("GET", path)
        return None if status == 404 else self.checked(status, body)

    def repeat(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The answer to a request that does no harm when it is done twice."""
        retries = Retries(attempts=ATTEMPTS)
        while True:
            asked: float | None = None
            try:
                status, content, asked = self._send(method, path, body)
            except PlaceUnreachable:
                pause = retries.after_failure()
                if pause is None:
                    raise
            else:
                pause = retries.after_failure(asked=asked) if may_pass(status) else None
                if pause is None:
                    return status, content
            self._wait(pause)

    def create(self, path: str, body: Any) -> dict[str, Any]:
        """Sent once: a second attempt could make a second machine."""
        status, content, _ = self._send("POST", path, body)
        if status == 429 or status >= 500:
            raise PlaceUnreachable(
                f"{self.name} answered with status {status}",
                why="a machine may have been made all the same",
                fix="`graft fleet reconcile` finds it; then run the command again",
            )
        return self.checked(status, content)

    def checked(self, status: int, body: bytes) -> dict[str, Any]:
        """The content of an answer; an error of the provider is raised."""
        try:
            content: dict[str, Any] = json.loads(body) if body else {}
        except ValueError:
            raise PlaceUnreachable(
                f"{self.name} sent something that is no JSON",
                fix="try again later; a proxy may answer for it",
            ) from None
        with understood(self.name):
            if not isinstance(content, dict):
                raise TypeError
            if status < 300:
                return content
            raise self.explain(status, content)

    def explain(self, status: int, content: dict[str, Any]) -> GraftError:
        """The error of an answer that is none of success."""
        detail = str(content.get("detail", ""))[:300]
        if may_pass(status):
            return PlaceUnreachable(
                f"{self.name} answered with status {status}: {detail}", fix="try again later"
            )
        return Refused(
            f"{self.name} refuses the request: {detail or status}",
            why=f"status {status}",
            fix="`graft fleet offers` lists what it has now; quota and credit are in its console",
        )

    def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes, float | None]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        try:
            with self._http.send(request, seconds=SECONDS) as answer:
                return answer.status, answer.read(), retry_after(answer.header("Retry-After"))
        except NoAnswer as error:
            raise PlaceUnreachable(f"{self.name} does not answer: {error}", fix="try again later") from error


@contextmanager
def understood(name: str) -> Iterator[None]:
    """An answer that lacks what its description promises is none: what was asked may have been done."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlaceUnreachable(
            f"{name} sent an answer that cannot be understood",
            why=f"something in it is missing or of another kind ({type(error).__name__})",
            fix="try again later; a proxy may answer for it, or its API has changed",
        ) from error
