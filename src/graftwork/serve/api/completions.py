"""OpenAI's text completions: prompts that are continued as they are, without a chat template."""

from typing import Any

import orjson

from graftwork.engines.protocol import LogprobData, PieceData
from graftwork.http.messages import ApiError, encode_error
from graftwork.serve.api.call import (
    MOST_CHOICES,
    AnswerHead,
    ApiFormat,
    ChatCall,
    GenerationOptions,
    TokenUsage,
)
from graftwork.serve.api.chat import DONE_EVENT, encode_usage, make_call, refuse_unsupported
from graftwork.serve.api.fields import load_object, take_integer, unsupported, wrong
from graftwork.serve.settings import ServeSettings

_KNOWN = frozenset(
    {
        "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs",
        "stop", "seed", "user",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
}
_MOST_LOGPROBS = 5


def parse_completion(data: bytes, limits: ServeSettings) -> ChatCall:
    raw = load_object(data)
    body = {key: value for key, value in raw.items() if value is not None}
    refuse_unsupported(body, _KNOWN, _NEUTRAL)
    prompts = [body["prompt"]] if isinstance(body.get("prompt"), str) else body.get("prompt")
    if isinstance(prompts, list) and any(isinstance(item, int | list) for item in prompts):
        raise unsupported("prompt", "must be text: token ids are not supported")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p for p in prompts):
        raise wrong("prompt", "must be a non-empty string or a list of non-empty strings")
    n = take_integer(body, "n", default=1, low=1, high=MOST_CHOICES) or 1
    if n * len(prompts) > MOST_CHOICES:
        raise wrong("n", f"times the number of prompts must be at most {MOST_CHOICES}")
    logprobs = take_integer(body, "logprobs", default=None, low=0, high=_MOST_LOGPROBS)
    options = GenerationOptions(n=n, logprobs=logprobs, prompts=tuple(prompts))
    return make_call(raw, body, messages=[], limits=limits, options=options)


def encode_completion(head: AnswerHead, call: ChatCall, choices: list[PieceData], usage: TokenUsage) -> bytes:
    listed = [
        _choice(place, piece["text"], piece.get("finish_reason"), piece.get("logprobs"))
        for place, piece in enumerate(choices)
    ]
    return orjson.dumps({**_common(head), "choices": listed, "usage": encode_usage(usage)})


def _common(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"cmpl-{head.unique}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.release,
    }


def _choice(
    place: int, text: str, reason: str | None, tokens: list[LogprobData] | None, offset: int = 0
) -> dict[str, Any]:
    logprobs = None if tokens is None else _encode_logprobs(tokens, offset)
    return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode_logprobs(tokens: list[LogprobData], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in token["top_logprobs"]} for token in tokens
        ],
        "text_offset": offsets,
    }


class CompletionStream:
    """Server-sent events of text completions."""

    def __init__(self, head: AnswerHead, call: ChatCall) -> None:
        self._common = _common(head)
        self._include_usage = call.include_usage
        self._lengths = [0] * call.choices

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: PieceData) -> bytes:
        place, text = piece.get("index", 0), piece["text"]
        offset = self._lengths[place]
        self._lengths[place] += len(text)
        choice = _choice(place, text, piece.get("finish_reason"), piece.get("logprobs"), offset)
        return self._event({**self._common, "choices": [choice]})

    def closing(self, usage: TokenUsage) -> bytes:
        if not self._include_usage:
            return DONE_EVENT
        return self._event({**self._common, "choices": [], "usage": encode_usage(usage)}) + DONE_EVENT

    def error(self, error: ApiError) -> bytes:
        return b"data: " + encode_error(error) + b"\n\n"

    def _event(self, value: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(value) + b"\n\n"


COMPLETIONS = ApiFormat(
    parse_completion, encode_completion, CompletionStream, encode_error, is_captured=False
)
