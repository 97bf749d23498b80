"""OpenAI's text completions and embeddings, which are not conversations and are not captured.

Prompts are continued as they are, without a chat template; a server behind the gateway turns texts into
vectors.
"""

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
    load_object,
    take,
    take_integer,
    take_text,
    unsupported,
    wrong,
)
from graftwork.serve.api.chat import DONE_EVENT, encode_usage, make_call, open_chunks, refuse_unsupported
from graftwork.serve.settings import ServeSettings

_COMPLETION_FIELDS = frozenset(
    {
        "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs",
        "stop", "seed", "user",
    }
)  # fmt: skip
_COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
}
_MOST_LOGPROBS = 5
MOST_INPUTS = 2048
_EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "user"})
_PASSED_ON = ("input", "encoding_format", "dimensions")


def parse_completion(data: bytes, limits: ServeSettings) -> ChatCall:
    raw = load_object(data)
    body = {key: value for key, value in raw.items() if value is not None}
    refuse_unsupported(body, _COMPLETION_FIELDS, _COMPLETION_NEUTRAL)
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
        _choice(index, piece["text"], piece.get("finish_reason"), piece.get("logprobs"))
        for index, piece in enumerate(choices)
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
    index: int, text: str, reason: str | None, tokens: list[LogprobData] | None, offset: int = 0
) -> dict[str, Any]:
    logprobs = None if tokens is None else _encode_logprobs(tokens, offset)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode_logprobs(tokens: list[LogprobData], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {alternative["token"]: alternative["logprob"] for alternative in token["top_logprobs"]}
            for token in tokens
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
        index, text = piece.get("index", 0), piece["text"]
        offset = self._lengths[index]
        self._lengths[index] += len(text)
        choice = _choice(index, text, piece.get("finish_reason"), piece.get("logprobs"), offset)
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


# -- embeddings --------------------------------------------------------------------------------


def parse_embeddings(data: bytes, limits: ServeSettings) -> ChatCall:
    raw = load_object(data)
    body = {key: value for key, value in raw.items() if value is not None}
    refuse_unsupported(body, _EMBEDDING_FIELDS, {})
    _check_input(body.get("input"))
    if take(body, "encoding_format", str, "float") not in ("float", "base64"):
        raise wrong("encoding_format", "must be float or base64")
    take_integer(body, "dimensions", default=None, low=1, high=2**20)
    embed = {key: body[key] for key in _PASSED_ON if key in body}
    return ChatCall(
        body=raw,
        model=take(body, "model", str, limits.default_model),
        messages=[],
        max_tokens=1,
        temperature=0.0,
        top_p=1.0,
        seed=None,
        stop=[],
        stream=False,
        include_usage=False,
        user=take_text(body, "user"),
        options=GenerationOptions(embed=embed),
    )


def _check_input(value: Any) -> None:
    """Texts, or tokens of the server's own tokenizer; either alone or as a list."""
    if (isinstance(value, str) and value) or _are_tokens(value):
        return
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a non-empty string or a list")
    if len(value) > MOST_INPUTS:
        raise wrong("input", f"has {len(value)} texts; the limit is {MOST_INPUTS}")
    if not all(isinstance(text, str) and text for text in value) and not all(map(_are_tokens, value)):
        raise wrong("input", "must hold non-empty strings, tokens, or lists of tokens")


def _are_tokens(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)
    )


def encode_embeddings(head: AnswerHead, call: ChatCall, choices: list[PieceData], usage: TokenUsage) -> bytes:
    return orjson.dumps(
        {
            "object": "list",
            "data": choices[0].get("embeddings", []),
            "model": head.model,
            "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt},
        }
    )


# Embeddings are not streamed: `open_chunks` is never called.
EMBEDDINGS = ApiFormat(parse_embeddings, encode_embeddings, open_chunks, encode_error, is_captured=False)
