"""OpenAI's embeddings: texts that a server behind the gateway turns into vectors. Not captured."""

from typing import Any

import orjson

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import encode_error
from graftwork.serve.api.call import (
    AnswerHead,
    ApiFormat,
    ChatCall,
    GenerationOptions,
    TokenUsage,
)
from graftwork.serve.api.chat import open_chunks, refuse_unsupported
from graftwork.serve.api.fields import load_object, take, take_integer, take_text, wrong
from graftwork.serve.settings import ServeSettings

MOST_INPUTS = 2048
_KNOWN = frozenset({"model", "input", "encoding_format", "dimensions", "user"})
_PASSED_ON = ("input", "encoding_format", "dimensions")


def parse_embeddings(data: bytes, limits: ServeSettings) -> ChatCall:
    raw = load_object(data)
    body = {key: value for key, value in raw.items() if value is not None}
    refuse_unsupported(body, _KNOWN, {})
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
