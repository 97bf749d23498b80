"""An OpenAI-compatible endpoint: one chat client for subjects, components, the teacher and the judge.

Input: messages. Output: the answer with its times, or what went wrong: something that another attempt may
cure (busy, broken, too slow, a stream cut off), or something that it cannot. The key comes from the
environment and goes nowhere but into the header; redirects are not followed, so that it reaches no other
host; and it is removed from whatever the server says.
"""

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from graftwork.engines.interface import DecodingSettings, EngineFacts, EngineReply, EngineUnavailable
from graftwork.process.http_client import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    HttpAnswer,
    HttpClient,
    NoAnswer,
    Retries,
    may_pass,
    retry_after,
)
from graftwork.records.base import MIB, fingerprint
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.interaction import Message
from graftwork.records.report import Endpoint
from graftwork.text.redact import hide, redact_message

LONGEST_REASON = 300
LONGEST_REFUSAL = 64 * 2**10
SHORTEST_LIMIT, BYTES_PER_TOKEN = MIB, 4 * 2**10
"""Size limit of an answer: an event for each token is a few hundred bytes."""
MOST_TOKENS = 10**9
SHORTEST_IN_ANSWERS = 16
"""A shorter key, such as the word `none` that some servers require, may occur in an answer."""


class EndpointRole(NamedTuple):
    """How errors name an endpoint, and what fixes them."""

    name: str = "the endpoint"
    key_fix: str = "put a valid key into an environment variable and name it: URL#model,key=VARIABLE"
    fix: str = "check the URL (it ends before /chat/completions), the model and the settings"
    refusal: type[GraftError] = UserError


SUBJECT = EndpointRole()
JUDGE = EndpointRole(
    name="the judge",
    key_fix="check the key, or name its variable as evaluate.judge.api_key_env",
    fix="check evaluate.judge.url and evaluate.judge.model",
    refusal=EnvironmentFailure,
)


class EndpointPolicy(NamedTuple):
    """Retry policy of an endpoint. `wait` sleeps; a true result means: stop retrying."""

    role: EndpointRole = SUBJECT
    streamed: bool = True
    wait: Callable[[float], object] = time.sleep
    first_pause: float = FIRST_PAUSE
    longest_pause: float = LONGEST_PAUSE


class TryAgain(Exception):
    """The endpoint may answer the next time; `wait` is how long it asked us to wait. `adapted`: the next
    request leaves out what this endpoint does not understand. That happens a few times at most, and is not a
    failed attempt.
    """

    def __init__(self, why: str, *, wait: float | None = None, adapted: bool = False) -> None:
        super().__init__(why)
        self.wait, self.adapted = wait, adapted


class EndpointEngine:
    """May be shared by threads. Fields that an endpoint rejects are left out from then on."""

    def __init__(self, endpoint: Endpoint, policy: EndpointPolicy = EndpointPolicy()) -> None:  # noqa: B008
        self._endpoint, self._policy = endpoint, policy
        self._limit_name = "max_tokens"
        self._left_out: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self.retries = 0
        """Requests that were sent again."""

    @property
    def facts(self) -> EngineFacts:
        url, model = self._endpoint.url, self._endpoint.model
        details = {
            "engine": "endpoint",
            "endpoint": url,
            "model": model,
            "concurrency": self._endpoint.concurrency,
            "asked_again": self.retries,
            "left_out": sorted(self._left_out),
            "device": "not known",
        }
        return EngineFacts("endpoint", "not known", fingerprint(["endpoint", url, model]), details)

    def ask_once(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply:
        """Raise TryAgain if another attempt makes sense, else a GraftError."""
        began = time.perf_counter()
        try:
            client = HttpClient(longest=SHORTEST_LIMIT + BYTES_PER_TOKEN * decoding.max_new_tokens)
            request = self._request(messages, decoding)
            with client.send(request, seconds=self._endpoint.timeout_seconds) as answer:
                if answer.status != 200:
                    raise self._explain(answer)
                return self._read(answer, began)
        except NoAnswer as error:
            # Not chained: the error itself may contain the server's reply.
            raise TryAgain(f"no answer: {self._clean(str(error))}") from None
        except (AttributeError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise TryAgain(f"the reply is not a chat completion ({type(error).__name__})") from None

    def ask(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply:
        """Retry as the policy says. Raises EngineUnavailable, or an error that no retry fixes."""
        policy = self._policy
        retries = Retries(
            attempts=self._endpoint.attempts,
            first_pause=policy.first_pause,
            longest_pause=policy.longest_pause,
        )
        while True:
            try:
                return self.ask_once(messages, decoding)
            except TryAgain as trouble:
                with self._lock:
                    self.retries += 1
                pause = 0.0 if trouble.adapted else retries.after_failure(asked=trouble.wait)
                if pause is None:
                    raise EngineUnavailable(str(trouble), attempts=retries.failed) from trouble
                if policy.wait(pause):
                    why = f"{trouble}, and the run is stopping"
                    raise EngineUnavailable(why, attempts=retries.failed) from trouble

    def _request(self, messages: Sequence[Message], decoding: DecodingSettings) -> urllib.request.Request:
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            self._limit_name: decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "stream": self._policy.streamed,
        }
        if decoding.seed is not None:
            body["seed"] = decoding.seed
        if self._policy.streamed:
            body["stream_options"] = {"include_usage": True}
        if decoding.temperature > 0:
            body["top_p"] = decoding.top_p
        for name in self._left_out:
            body.pop(name, None)
        headers = {"Content-Type": "application/json"}
        if self._policy.streamed:
            headers["Accept"] = "text/event-stream"
        if (key := self._key()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        return urllib.request.Request(
            f"{self._endpoint.url}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
            method="POST",
        )

    def _read(self, answer: HttpAnswer, began: float) -> EngineReply:
        pieces: list[str] = []
        first: float | None = None
        finish: str | None = None
        usage: dict[str, Any] = {}
        spoke = False
        for event in self._events(answer):
            if "error" in event:
                reason = self._clean(json.dumps(event["error"], ensure_ascii=False))
                raise TryAgain(f"an error came in the stream: {reason}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                text = (choice.get("delta") or choice.get("message") or {}).get("content")
                spoke = spoke or isinstance(text, str)
                if text:
                    first = first if first is not None else time.perf_counter() - began
                    pieces.append(text)
        total = time.perf_counter() - began
        if finish is None and (self._policy.streamed or not spoke):
            cut = f"the stream was cut off after {len(pieces)} pieces"
            raise TryAgain(cut if self._policy.streamed else "the reply is not a chat completion")
        if not self._policy.streamed and not spoke:
            raise TryAgain("the reply contains no text")
        return EngineReply(
            text=self._mask_answer("".join(pieces)),
            tokens=_count_tokens(usage, "completion_tokens") or (len(pieces) if self._policy.streamed else 0),
            prompt_tokens=_count_tokens(usage, "prompt_tokens"),
            finish_reason="length" if finish == "length" else "stop",
            first_token_seconds=total if first is None else first,
            seconds=total,
        )

    def _events(self, answer: HttpAnswer) -> Iterator[dict[str, Any]]:
        """The stream's events; the single answer of an endpoint that does not stream."""
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
            excerpt = self._clean(data.decode(errors="replace"))
            raise TryAgain(f"the reply contains no JSON: {excerpt}") from None
        if not isinstance(event, dict):
            raise TryAgain("the reply contains something other than events")
        return event

    def _explain(self, answer: HttpAnswer) -> Exception:
        role, status = self._policy.role, answer.status
        try:
            reason = self._clean(answer.read(most=LONGEST_REFUSAL).decode(errors="replace"))
        except NoAnswer:
            reason = ""
        failure = f"status {status} {reason}".strip()
        if may_pass(status):
            return TryAgain(failure, wait=retry_after(answer.header("Retry-After")))
        if status in (400, 422) and self._adapt(reason):
            return TryAgain(failure, adapted=True)
        where = f"{self._endpoint.url}#{self._endpoint.model}"
        if status in (401, 403):
            variable = self._endpoint.api_key_env
            return EnvironmentFailure(
                f"{role.name} rejected us: {failure}",
                why=f"the key is read from ${variable}" if variable else "no key is sent",
                fix=role.key_fix,
                where=where,
            )
        why = "another attempt would get the same answer"
        return role.refusal(
            f"{role.name} rejected the question: {failure}", why=why, fix=role.fix, where=where
        )

    def _adapt(self, reason: str) -> bool:
        """Leave out what the endpoint says it does not understand; returns whether there was such a field."""
        newer = "max_completion_tokens"
        if self._limit_name == "max_tokens" and "max_tokens" in reason and newer in reason:
            self._limit_name = newer
            return True
        for name in ("stream_options", "seed", "temperature", "top_p"):
            if name in reason and name not in self._left_out:
                self._left_out |= {name}
                return True
        return False

    def _key(self) -> str | None:
        """Read when a request is sent: an evaluation without requests needs no key."""
        variable = self._endpoint.api_key_env
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key:
            raise EnvironmentFailure(
                f"the environment variable {variable} is empty or not set",
                why=f"the key of {self._endpoint.url} is read from it",
                fix=f"export {variable}=… and run the same command again",
            )
        if not (key.isascii() and key.isprintable()):
            raise EnvironmentFailure(
                f"the environment variable {variable} does not contain a valid key",
                why="it contains characters that are not allowed in a header",
                fix="copy the key again",
            )
        return key

    def _clean(self, text: str) -> str:
        """A server's message on one line: without the key or a login in an address, then truncated."""
        key = self._key()
        # Cut last: a key that is cut in the middle would no longer be found.
        return redact_message(text, [key] if key else [], longest=LONGEST_REASON)

    def _mask_answer(self, text: str) -> str:
        """Mask the key in the answer, unless it is so short that it may be a word of it."""
        # As UTF-8 can hold it: JSON may name halves of characters that no file takes.
        text = text.encode("utf-8", "replace").decode()
        key = self._key()
        return hide(text, [key]) if key and len(key) >= SHORTEST_IN_ANSWERS else text


def _count_tokens(usage: Any, name: str) -> int:
    """Return the tokens that a server reports, 0 if it reports none; ValueError if that is not a number."""
    count = (usage or {}).get(name) or 0
    if not isinstance(count, int | float) or not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"{name} is not a number of tokens")
    return int(count)
