"""An HTTP client that goes where it was sent and nowhere else.

What is meant for one host (a key, a prompt, an alert) is not carried to another because a server says so.
"""

import urllib.request
from http.client import HTTPMessage
from typing import IO


class StayHere(urllib.request.HTTPRedirectHandler):
    """A redirect is an error like any other answer that is none."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def open_here() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(StayHere)
