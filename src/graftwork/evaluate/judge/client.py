"""The judge's endpoint over HTTP: one question, one reply, with patience for a busy server.

In: messages. Out: what was said and the tokens that it took. Retries what may pass (429, 5xx, timeouts,
torn replies) with growing pauses; gives up at once on what will not (a wrong key, an unknown model). The
key is read from the environment at the last moment, sent in one header, to one host, and never told.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import IO, NamedTuple

from graftwork.evaluate.judge.settings import JudgeSettings
from graftwork.evaluate.judge.wording import Chat
from graftwork.evaluate.secrets import fits_header, mask_answer, tell
from graftwork.process.stay_here import open_here
from graftwork.records.errors import EnvironmentLacks

LONGEST_REPLY = 4 * 1024 * 1024
LONGEST_REASON = 200
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
_BUSY = (408, 409, 425, 429)


class Said(NamedTuple):
    text: str
    tokens_in: int
    tokens_out: int


class Unanswered(Exception):
    """All attempts failed in ways that may pass; this question has no reply for now."""


class _MayPass(Exception):
    def __init__(self, reason: str, *, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class ChatClient:
    """`wait` passes a pause; where it gives true, the run is being stopped and nothing more is asked."""

    def __init__(self, settings: JudgeSettings, *, wait: Callable[[float], object] = time.sleep) -> None:
        self._settings = settings
        self._wait = wait
        self._opener = open_here()

    def say(self, chat: Chat) -> Said:
        reason = ""
        for attempt in range(self._settings.attempts):
            try:
                return self._ask_once(chat)
            except _MayPass as failure:
                reason = str(failure)
                last = attempt + 1 == self._settings.attempts
                if not last and self._wait(_pause(attempt, asked_for=failure.pause)):
                    raise Unanswered(f"{reason}, and the run is being stopped") from failure
        often = f", {self._settings.attempts} times" if self._settings.attempts > 1 else ""
        raise Unanswered(f"{reason}{often}")

    def _ask_once(self, chat: Chat) -> Said:
        try:
            with self._opener.open(self._request(chat), timeout=self._settings.timeout_seconds) as reply:
                said = _read(self._read_in_time(reply))
                return said._replace(text=mask_answer(said.text, self._key()))
        except urllib.error.HTTPError as error:
            with error:
                raise self._explain(error) from error
        except (OSError, HTTPException) as error:
            reason = self._tell(str(getattr(error, "reason", None) or error)) or type(error).__name__
            # Not chained: the error itself may hold what the server said.
            raise _MayPass(f"the judge could not be reached ({reason})") from None

    def _request(self, chat: Chat) -> urllib.request.Request:
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": chat,
            "temperature": 0,
            "max_tokens": settings.max_tokens,
            "stream": False,
        }
        headers = {"Content-Type": "application/json"}
        if settings.key_variable is not None:
            headers["Authorization"] = f"Bearer {read_key(settings.key_variable)}"
        return urllib.request.Request(
            f"{settings.url}/chat/completions", data=json.dumps(body).encode(), headers=headers, method="POST"
        )

    def _read_in_time(self, reply: IO[bytes]) -> bytes:
        """The body, unless it drips in over more than the time or grows beyond all measure."""
        until = time.monotonic() + self._settings.timeout_seconds
        pieces, size = [], 0
        while piece := reply.read(65536):
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST_REPLY:
                raise _MayPass(f"the judge's reply is over {LONGEST_REPLY} bytes")
            if time.monotonic() > until:
                raise _MayPass(f"the judge's reply took over {self._settings.timeout_seconds:g} s")
        return b"".join(pieces)

    def _explain(self, error: urllib.error.HTTPError) -> Exception:
        if error.code >= 500 or error.code in _BUSY:
            return _MayPass(
                f"the judge answered with status {error.code}",
                pause=_seconds(error.headers.get("Retry-After")),
            )
        where = f"{self._settings.url}/chat/completions"
        if error.code in (401, 403):
            variable = self._settings.key_variable
            fix = f"check the key in {variable}" if variable else "name its variable as judge.key_variable"
            return EnvironmentLacks(f"the judge refuses us (status {error.code})", fix=fix, where=where)
        return EnvironmentLacks(
            f"the judge answered with status {error.code}",
            why=self._tell(_plain_reason(error)),
            fix="check evaluate.judge.url and evaluate.judge.model",
            where=where,
        )

    def _tell(self, words: str) -> str:
        """Some servers repeat the key that they refuse."""
        return tell(words, key=self._key(), longest=LONGEST_REASON)

    def _key(self) -> str | None:
        variable = self._settings.key_variable
        return os.environ.get(variable, "").strip() if variable else None


def read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise EnvironmentLacks(
            f"the environment variable {variable} is not set",
            why="the judge's key is read from it",
            fix=f"export {variable}=…, or leave out evaluate.judge.key_variable",
        )
    if not fits_header(key):
        raise EnvironmentLacks(
            f"the environment variable {variable} holds no key",
            why="it has characters that no header can carry",
            fix="copy the key once more",
        )
    return key


def _read(body: bytes) -> Said:
    try:
        document = json.loads(body)
        text = document["choices"][0]["message"]["content"]
        usage = document.get("usage") or {}
        said = Said(text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _MayPass("the judge's reply is no chat completion") from error
    if not isinstance(text, str):
        raise _MayPass("the judge's reply holds no text")
    return said


def _pause(attempt: int, *, asked_for: float | None) -> float:
    """What the server asks for, else twice as long each time; spread, so that not all come back at once."""
    if asked_for is not None:
        return min(asked_for, LONGEST_PAUSE)
    return min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        # A date is allowed too; our own pauses do then.
        return None


def _plain_reason(error: urllib.error.HTTPError) -> str:
    """What the server says was wrong."""
    try:
        said = json.loads(error.read(4096))["error"]
        message = said["message"] if isinstance(said, dict) else said
    except (ValueError, LookupError, TypeError, OSError, HTTPException):
        return ""
    return str(message)
