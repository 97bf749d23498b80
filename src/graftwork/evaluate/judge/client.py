"""The judge's endpoint over HTTP: one question, one reply, with patience for a busy server.

In: messages. Out: what was said and the tokens that it took. Retries what may pass (429, 5xx, timeouts,
torn replies) with growing pauses; gives up at once on what will not (a wrong key, an unknown model). The
key is read from the environment at the last moment, sent in one header, to one host, and never told.
"""

import json
import os
import time
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

from graftwork.evaluate.settings import JudgeSettings
from graftwork.inference.endpoint import count_tokens, fits_header, mask_answer, tell, writable
from graftwork.process.http_client import HttpAnswer, HttpClient, NoAnswer
from graftwork.process.retry import Retries, may_pass, retry_after
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.units import MIB

Chat = list[dict[str, str]]
LONGEST_REPLY = 4 * MIB
LONGEST_REFUSAL = 16 * 1024
LONGEST_REASON = 200
LONGEST_PAUSE = 30.0


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
        self._client = HttpClient(longest=LONGEST_REPLY)

    def say(self, chat: Chat) -> Said:
        retries = Retries(attempts=self._settings.attempts, longest_pause=LONGEST_PAUSE)
        while True:
            try:
                return self._ask_once(chat)
            except _MayPass as failure:
                pause = retries.after_failure(asked=failure.pause)
                if pause is None:
                    often = f", {retries.failed} times" if retries.failed > 1 else ""
                    raise Unanswered(f"{failure}{often}") from failure
                if self._wait(pause):
                    raise Unanswered(f"{failure}, and the run is being stopped") from failure

    def _ask_once(self, chat: Chat) -> Said:
        try:
            with self._client.send(self._request(chat), seconds=self._settings.timeout_seconds) as answer:
                if answer.status != 200:
                    raise self._explain(answer)
                said = _read(answer.read())
        except NoAnswer as error:
            # Not chained: the error itself may hold what the server said.
            raise _MayPass(f"the judge could not be reached ({self._tell(str(error))})") from None
        return said._replace(text=mask_answer(said.text, self._key()))

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

    def _explain(self, answer: HttpAnswer) -> Exception:
        if may_pass(answer.status):
            return _MayPass(
                f"the judge answered with status {answer.status}",
                pause=retry_after(answer.header("Retry-After")),
            )
        where = f"{self._settings.url}/chat/completions"
        if answer.status in (401, 403):
            variable = self._settings.key_variable
            fix = f"check the key in {variable}" if variable else "name its variable as judge.key_variable"
            return EnvironmentLacks(f"the judge refuses us (status {answer.status})", fix=fix, where=where)
        return EnvironmentLacks(
            f"the judge answered with status {answer.status}",
            why=self._tell(_plain_reason(answer.read(most=LONGEST_REFUSAL))),
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
        said = Said(text, count_tokens(usage, "prompt_tokens"), count_tokens(usage, "completion_tokens"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _MayPass("the judge's reply is no chat completion") from error
    if not isinstance(text, str):
        raise _MayPass("the judge's reply holds no text")
    return said._replace(text=writable(text))


def _plain_reason(body: bytes) -> str:
    """What the server says was wrong."""
    try:
        said = json.loads(body)["error"]
        message = said["message"] if isinstance(said, dict) else said
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return str(message)
