"""Asks a running endpoint cases over HTTP: what users would get, with what the response headers say.

Input: the URL of an endpoint on this machine and cases. Output: one `ServedAnswer` for each. A request that
fails is an answer too, with its status.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from graftwork.http.client import Client
from graftwork.records.report import Case

_JSON = (("content-type", "application/json"),)


class ServedAnswer(NamedTuple):
    case: str
    status: int
    text: str
    seconds: float
    headers: Mapping[str, str]
    prompt_tokens: int = 0
    reply_tokens: int = 0
    tokens: tuple[tuple[bytes, float], ...] = ()
    """The answer token by token, with log-probabilities if they were requested."""
    problem: str = ""
    """The endpoint's message about a request that failed."""

    @property
    def mean_logprob(self) -> float | None:
        return self.mean_logprob_of(None)

    def mean_logprob_of(self, first: int | None) -> float | None:
        """Mean log-probability of the first tokens, or of all; None if not requested."""
        logprobs = [logprob for _, logprob in self.tokens[:first]]
        return math.fsum(logprobs) / len(logprobs) if logprobs else None

    def beginning(self, first: int) -> str:
        """The text of the first tokens."""
        return b"".join(text for text, _ in self.tokens[:first]).decode(errors="ignore")

    @property
    def answered(self) -> bool:
        return self.status == 200


class EndpointQuestions(NamedTuple):
    """How to ask the cases."""

    model: str
    max_tokens: int
    at_once: int = 4
    logprobs: bool = False
    timeout_seconds: float = 300.0


def ask_served(
    url: str,
    cases: Sequence[Case],
    questions: EndpointQuestions,
    *,
    headers: Callable[[Case], tuple[tuple[str, str], ...]] = lambda _case: (),
    on_answer: Callable[[int], None] = lambda _answered: None,
) -> list[ServedAnswer]:
    """The answers in the order of the cases. `on_answer` gets the number of answers so far."""
    answered = 0

    async def ask_all() -> list[ServedAnswer]:
        client, room = Client(port=_port(url)), asyncio.Semaphore(questions.at_once)

        async def ask(case: Case) -> ServedAnswer:
            nonlocal answered
            async with room:
                answer = await _ask_one(client, case, questions, headers(case))
            answered += 1
            on_answer(answered)
            return answer

        try:
            return list(await asyncio.gather(*map(ask, cases)))
        finally:
            client.close()

    return asyncio.run(ask_all())


def read_health(url: str) -> dict[str, Any]:
    async def fetch() -> dict[str, Any]:
        client = Client(port=_port(url))
        try:
            _, body = await client.fetch("GET", "/health")
            health: dict[str, Any] = json.loads(body)
            return health
        finally:
            client.close()

    return asyncio.run(fetch())


async def _ask_one(
    client: Client, case: Case, questions: EndpointQuestions, headers: tuple[tuple[str, str], ...]
) -> ServedAnswer:
    body: dict[str, Any] = {
        "model": questions.model,
        "messages": [message.model_dump() for message in case.messages],
        "max_tokens": questions.max_tokens,
    }
    if questions.logprobs:
        body["logprobs"] = True
    session = () if case.session is None else (("x-session-id", case.session),)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(questions.timeout_seconds):
            reply = await client.send(
                "POST",
                "/v1/chat/completions",
                body=json.dumps(body).encode(),
                headers=(*_JSON, *session, *headers),
            )
            data = await reply.read()
    except OSError:
        problem = "the endpoint is not responding"
        return ServedAnswer(case.id, 0, "", time.perf_counter() - started, {}, problem=problem)
    seconds, answer = time.perf_counter() - started, json.loads(data)
    reply_headers = dict(reply.headers)
    if reply.status != 200:
        problem = str(answer["error"]["message"])
        return ServedAnswer(case.id, reply.status, "", seconds, reply_headers, problem=problem)
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    tokens = (choice.get("logprobs") or {}).get("content") or []
    return ServedAnswer(
        case.id,
        200,
        choice["message"]["content"] or "",
        seconds,
        reply_headers,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        tuple((bytes(token.get("bytes") or token["token"].encode()), token["logprob"]) for token in tokens),
    )


def _port(url: str) -> int:
    return urlsplit(url).port or 80
