"""What a server said, made fit to be kept and shown: some servers repeat the key that they refuse.

In: text and figures that a server sent, the key that was sent to it. Out: the text without the key, made
short only after that: a key that is cut in the middle would no longer be found; figures that are some. Pure.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from graftwork.process.http_client import HttpAnswer, HttpClient, NoAnswer
from graftwork.process.retry import may_pass, retry_after
from graftwork.records.errors import EnvironmentLacks, GraftError, UserMistake
from graftwork.records.interaction import Message
from graftwork.records.report import Endpoint
from graftwork.records.units import MIB
from graftwork.text.unsaid import hide, leave_unsaid

MOST_TOKENS = 10**9
SHORTEST_IN_ANSWERS = 16
"""A shorter key, such as the word `none` that some servers want, may well be a part of an answer."""


def mask(text: str, key: str | None) -> str:
    """The text without the key, however it was written into it."""
    return hide(text, [key]) if key else text


def mask_answer(text: str, key: str | None) -> str:
    """As `mask`, for what is graded and kept: only what cannot be a word of the answer."""
    return mask(text, key) if key and len(key) >= SHORTEST_IN_ANSWERS else text


def tell(text: str, *, key: str | None, longest: int) -> str:
    """What a server said, on one line: without the key and without a login in an address, then made short."""
    return leave_unsaid(text, [key] if key else [], longest=longest)


def fits_header(key: str) -> bool:
    """Whether a header can carry it. What cannot would end up in the words of an error instead."""
    return key.isascii() and key.isprintable()


def writable(text: str) -> str:
    """The text as UTF-8 can hold it: JSON may name halves of characters that no file takes."""
    return text.encode("utf-8", "replace").decode()


def count_tokens(usage: Any, name: str) -> int:
    """The tokens that a server says it took, 0 where it says nothing; ValueError where that is no number."""
    count = (usage or {}).get(name) or 0
    if not isinstance(count, int | float) or not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"{name} is no number of tokens")
    return int(count)


LONGEST_WORDS = 300
LONGEST_REFUSAL = 64 * 2**10
SHORTEST_LIMIT, BYTES_A_TOKEN = MIB, 4 * 2**10
"""How large an answer may be: an event for each token is a few hundred bytes."""


class Settings(NamedTuple):
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class EndpointReply(NamedTuple):
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    first_token_seconds: float
    seconds: float


class TryAgain(Exception):
    """The endpoint may answer the next time; `wait` is how long it asked us to wait.

    `adapted`: the next request is another one, without what this endpoint does not understand. That happens
    a few times at most, and is no failed attempt.
    """

    def __init__(self, why: str, *, wait: float | None = None, adapted: bool = False) -> None:
        super().__init__(why)
        self.wait, self.adapted = wait, adapted


class EndpointClient:
    """Threads may share one. What an endpoint turns out not to understand is left out from then on."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._key = _read_key(endpoint)
        self._client = HttpClient(longest=SHORTEST_LIMIT + BYTES_A_TOKEN * settings.max_new_tokens)
        self._limit_name = "max_tokens"
        self._left_out: frozenset[str] = frozenset()

    def ask(self, messages: Sequence[Message], *, repeat: int = 0) -> EndpointReply:
        """Raise TryAgain where another attempt makes sense, a GraftError where it does not."""
        began = time.perf_counter()
        try:
            request = self._request(messages, repeat)
            with self._client.send(request, seconds=self._endpoint.timeout_seconds) as answer:
                if answer.status != 200:
                    raise self._explain(answer)
                return self._hear(answer, began)
        except NoAnswer as error:
            # Not chained: the error itself may hold what the server said.
            raise TryAgain(self._tell(str(error))) from None
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise TryAgain(f"the stream holds something else than events ({type(error).__name__})") from None

    def _tell(self, words: str) -> str:
        return tell(words, key=self._key, longest=LONGEST_WORDS)

    def _request(self, messages: Sequence[Message], repeat: int) -> urllib.request.Request:
        said = self._settings
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            self._limit_name: said.max_new_tokens,
            "temperature": said.temperature,
            "seed": said.seed + repeat,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if said.temperature > 0:
            body["top_p"] = said.top_p
        for name in self._left_out:
            body.pop(name, None)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return urllib.request.Request(
            f"{self._endpoint.url}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
            method="POST",
        )

    def _hear(self, answer: HttpAnswer, began: float) -> EndpointReply:
        pieces: list[str] = []
        first: float | None = None
        finish: str | None = None
        usage: dict[str, Any] = {}
        for event in self._events(answer):
            if "error" in event:
                said = self._tell(json.dumps(event["error"], ensure_ascii=False))
                raise TryAgain(f"an error came in the stream: {said}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                text = (choice.get("delta") or choice.get("message") or {}).get("content")
                if text:
                    first = first if first is not None else time.perf_counter() - began
                    pieces.append(text)
        total = time.perf_counter() - began
        if finish is None:
            raise TryAgain(f"the stream was cut off after {len(pieces)} pieces")
        return EndpointReply(
            text=mask_answer(writable("".join(pieces)), self._key),
            tokens=count_tokens(usage, "completion_tokens") or len(pieces),
            prompt_tokens=count_tokens(usage, "prompt_tokens"),
            finish_reason="length" if finish == "length" else "stop",
            first_token_seconds=total if first is None else first,
            seconds=total,
        )

    def _events(self, answer: HttpAnswer) -> Iterator[dict[str, Any]]:
        """The stream's events; of an endpoint that does not stream, its one answer."""
        plain: list[bytes] = []
        for line in answer.lines():
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield self._parse(data)
            elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                plain.append(line)
        if plain:
            yield self._parse(b"\n".join(plain))

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise TryAgain(f"the stream holds no JSON: {self._tell(data.decode(errors='replace'))}") from None
        if not isinstance(event, dict):
            raise TryAgain("the stream holds something else than events")
        return event

    def _explain(self, answer: HttpAnswer) -> Exception:
        status, wait = answer.status, retry_after(answer.header("Retry-After"))
        try:
            words = self._tell(answer.read(most=LONGEST_REFUSAL).decode(errors="replace"))
        except NoAnswer:
            words = ""
        if may_pass(status):
            return TryAgain(f"{status} {words}", wait=wait)
        if status in (400, 422) and self._adapt(words):
            return TryAgain(f"{status} {words}", adapted=True)
        where = f"{self._endpoint.url}#{self._endpoint.model}"
        if status in (401, 403):
            variable = self._endpoint.key_variable
            return EnvironmentLacks(
                f"the endpoint refuses us: {status} {words}",
                why=f"the key is read from ${variable}" if variable else "no key is sent",
                fix="put a valid key into an environment variable and name it: URL#model,key=VARIABLE",
                where=where,
            )
        return UserMistake(
            f"the endpoint refuses the question: {status} {words}",
            why="another attempt would be answered the same",
            fix="check the URL (it ends before /chat/completions), the model and the settings",
            where=where,
        )

    def _adapt(self, words: str) -> bool:
        """Leave out what the endpoint says that it does not understand; whether there was such a thing."""
        if (
            self._limit_name in words
            and "max_completion_tokens" in words
            and self._limit_name == "max_tokens"
        ):
            self._limit_name = "max_completion_tokens"
            return True
        for name in ("stream_options", "seed", "temperature", "top_p"):
            if name in words and name not in self._left_out:
                self._left_out |= {name}
                return True
        return False

    @property
    def left_out(self) -> tuple[str, ...]:
        """Settings that the endpoint did not take: the report says so."""
        return tuple(sorted(self._left_out))


def _read_key(endpoint: Endpoint) -> str | None:
    if endpoint.key_variable is None:
        return None
    key = os.environ.get(endpoint.key_variable, "").strip()
    if not key:
        raise EnvironmentLacks(
            f"the environment variable {endpoint.key_variable} is empty or not set",
            why=f"the key of {endpoint.url} is read from it",
            fix=f"export {endpoint.key_variable}=… and run the same command again",
        )
    if not fits_header(key):
        raise EnvironmentLacks(
            f"the environment variable {endpoint.key_variable} holds no key",
            why="it has characters that no header can carry",
            fix="copy the key once more",
        )
    return key


__all__ = ["EndpointClient", "EndpointReply", "GraftError", "Settings", "TryAgain"]
