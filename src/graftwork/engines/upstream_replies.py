"""Reads the streamed answers of other servers: events in, pieces of a reply out.

Texts, tool calls, log-probabilities and counts come in two forms: those of chats and those of completions.
"""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from typing import Any

import orjson

from graftwork.engines.protocol import (
    AlternativeData,
    CallData,
    CallDelta,
    GenerateRequest,
    LogprobData,
    ReplyPiece,
    estimate_tokens,
)
from graftwork.engines.replies import ReplyText, describe_token
from graftwork.http.client import ClientReply
from graftwork.http.messages import ApiError
from graftwork.records.units import MIB
from graftwork.text.messages import hide

_TOKEN_ID = "token_id:"
_LONGEST_EVENT = 16 * MIB
_TOKEN_BYTES = 8 * 1024
"""Bytes of events that a token may take; one with twenty log-probabilities takes about two thousand."""

TokenBytes = Callable[[int], bytes]


async def read_events(
    reply: ClientReply, secrets: Collection[str] = (), *, max_tokens: int
) -> AsyncGenerator[dict[str, Any], None]:
    """The server-sent events of a reply; of a server that does not stream, its one answer. Raises ApiError
    for what is no event, an error, or more than so many tokens can take."""
    others = bytearray()
    left = _LONGEST_EVENT + _TOKEN_BYTES * max_tokens
    while (lines := await reply.next_lines()) is not None:
        left -= sum(len(line) + 1 for line in lines)
        if left < 0:
            raise ApiError(502, "the engine's server does not end its answer", code="engine_error")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                others += line + b"\n"
            elif data != b"[DONE]":
                yield _load(data, secrets)
        if len(others) + len(reply.rest) > _LONGEST_EVENT:
            raise _no_events()
    answer = bytes(others + reply.rest).strip()
    if answer.startswith(b"{"):
        yield _load(answer, secrets)


def _load(data: bytes, secrets: Collection[str]) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise _no_events()
    if event.get("error") is not None:  # some servers write null into every event
        raise explain_refusal(502, data, secrets)
    return event


def _no_events() -> ApiError:
    return ApiError(502, "the engine's server sent something else than events", code="engine_error")


def read_embeddings(body: bytes) -> ReplyPiece:
    try:
        found = orjson.loads(body)
        tokens = (found.get("usage") or {}).get("prompt_tokens") or 0
        return ReplyPiece("", "stop", prompt_tokens=int(tokens), embeddings=tuple(found["data"]))
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        message = "the engine's server sent something else than embeddings"
        raise ApiError(502, message, code="engine_error") from error


class UpstreamReply:
    """One answer as it arrives. `token_bytes` reads tokens that the server names by their ids; `secrets` are
    kept out of errors."""

    def __init__(
        self,
        request: GenerateRequest,
        text: ReplyText,
        token_bytes: TokenBytes,
        *,
        secrets: Collection[str] = (),
    ) -> None:
        self._request, self._flow, self._token_bytes = request, text, token_bytes
        self._secrets = secrets
        self._text = self._unsent = self._finish = ""
        self._stop: str | None = None
        self._usage: dict[str, Any] = {}
        self._pieces = 0
        self._calls: dict[int, CallData] = {}
        self._deltas: list[CallDelta] = []
        self._logprobs: list[LogprobData] = []

    async def read(self, reply: ClientReply, *, prompt_tokens: int) -> AsyncGenerator[ReplyPiece, None]:
        async for event in read_events(reply, self._secrets, max_tokens=self._request.max_tokens):
            self._take_event(event)
            self._unsent += self._flow.push(self._text)
            if self._flow.stopped is not None:
                self._finish = "stop"
                break
            if self._request.stream and (self._unsent or self._deltas):
                yield self._piece()
        if not self._finish:
            raise ApiError(502, "the engine's server ended its answer too early", code="engine_error")
        try:
            last = self._last_piece(prompt_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise _unreadable() from error
        yield last

    def _take_event(self, event: dict[str, Any]) -> None:
        try:
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                self._take(choice)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _unreadable() from error

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        new = choice.get("text") or delta.get("content") or ""
        self._text += new
        self._pieces += bool(new)
        for place, part in enumerate(delta.get("tool_calls") or ()):
            # The calls of a whole message have no index.
            self._take_call(part, place if "message" in choice else 0)
        if self._request.logprobs is not None and choice.get("logprobs"):
            self._logprobs += self._read_logprobs(choice["logprobs"], self._request.logprobs)
        self._finish = choice.get("finish_reason") or self._finish
        # vLLM and SGLang name the stop string or the number of the token that ended the answer.
        reason = choice.get("stop_reason", choice.get("matched_stop"))
        self._stop = reason if reason in self._request.stop else self._stop

    def _take_call(self, part: dict[str, Any], place: int) -> None:
        index, function = int(part.get("index") or place), part.get("function") or {}
        new = str(function.get("arguments") or "")
        delta: CallDelta = {"index": index, "arguments": new}
        if index not in self._calls:
            self._calls[index] = {"name": str(function.get("name") or ""), "arguments": ""}
            delta["name"] = self._calls[index]["name"]
        self._calls[index]["arguments"] += new
        self._deltas.append(delta)

    def _piece(self) -> ReplyPiece:
        piece = ReplyPiece(self._unsent, call_deltas=tuple(self._deltas), logprobs=self._take_logprobs())
        self._unsent, self._deltas = "", []
        return piece

    def _last_piece(self, prompt_tokens: int) -> ReplyPiece:
        text, calls = self._flow.finish(self._unsent)
        calls = calls or tuple(self._calls[index] for index in sorted(self._calls))
        return ReplyPiece(
            text=text,
            finish_reason="length" if self._finish == "length" else "stop",
            prompt_tokens=int(self._usage.get("prompt_tokens") or prompt_tokens),
            reply_tokens=int(self._usage.get("completion_tokens") or self._estimate_reply()),
            tool_calls=calls,
            call_deltas=tuple(self._deltas),
            logprobs=self._take_logprobs(),
            stop=self._flow.stopped or self._stop,
        )

    def _estimate_reply(self) -> int:
        """For a server that states no usage: a piece of a stream is about a token, or holds several."""
        return max(self._pieces, estimate_tokens(len(self._text)))

    def _take_logprobs(self) -> tuple[LogprobData, ...] | None:
        if self._request.logprobs is None:
            return None
        taken, self._logprobs = tuple(self._logprobs), []
        return taken

    def _read_logprobs(self, listed: dict[str, Any], most: int) -> list[LogprobData]:
        if "content" in listed:
            return [_of_chat(token, most) for token in listed["content"] or ()]
        tops = listed.get("top_logprobs") or [None] * len(listed["tokens"])
        found = zip(listed["tokens"], listed["token_logprobs"], tops, strict=True)
        return [self._of_completion(token, value, top or {}, most) for token, value, top in found]

    def _of_completion(
        self, token: str, value: float | None, top: dict[str, float], most: int
    ) -> LogprobData:
        best = sorted(top.items(), key=lambda item: -item[1])[:most]
        alternatives = [self._describe(other, logprob) for other, logprob in best]
        return {**self._describe(token, value), "top_logprobs": alternatives}

    def _describe(self, token: str, value: float | None) -> AlternativeData:
        number = token.removeprefix(_TOKEN_ID)
        data = self._token_bytes(int(number)) if number != token and number.isdigit() else token.encode()
        return describe_token(data, 0.0 if value is None else value)


def _unreadable() -> ApiError:
    return ApiError(502, "the engine's server sent an answer that cannot be read", code="engine_error")


def _of_chat(token: dict[str, Any], most: int) -> LogprobData:
    top = [_alternative(other) for other in token.get("top_logprobs") or ()]
    return {**_alternative(token), "top_logprobs": top[:most]}


def _alternative(token: dict[str, Any]) -> AlternativeData:
    text = str(token["token"])
    data = token.get("bytes")
    listed = list(text.encode()) if data is None else [int(byte) for byte in data]
    return {"token": text, "logprob": float(token["logprob"]), "bytes": listed}


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
