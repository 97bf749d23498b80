"""How vLLM, SGLang and OpenAI-compatible endpoints are asked. Pure: bodies and names, no network.

vLLM and SGLang take the prompt as tokens and adapters at run time: vLLM by the name alone, SGLang as
`base:adapter`. Both refuse run-time loading unless they were started for it. An endpoint gets what the client
sent.
"""

from typing import Any, NamedTuple

from graftwork.engines.constrained import CallForm, choose_functions, write_call_schema
from graftwork.engines.protocol import GenerateRequest
from graftwork.engines.settings import EngineKind
from graftwork.http.messages import ApiError

_ANY_OBJECT = {"type": "object"}


class TokenPrompt(NamedTuple):
    """A prompt of our own template, with what the answer must follow."""

    tokens: list[int]
    end: int
    """The token that ends a turn."""
    format: dict[str, Any] | None = None
    """`response_format` for the server."""


class Dialect(NamedTuple):
    """`load_path` is None where no adapters can be loaded."""

    takes_tokens: bool
    load_path: str | None = None
    unload_path: str | None = None
    loads_at_root: bool = False
    """Whether adapters are loaded at the server's root instead of below /v1."""
    joins_names: bool = False
    names_tokens: bool = False
    """Whether log-probabilities can name tokens by their ids."""

    def path(self, request: GenerateRequest) -> str:
        chats = not self.takes_tokens and request.prompt is None
        return "/chat/completions" if chats else "/completions"

    def name_model(self, base: str, adapter: str | None) -> str:
        if adapter is None:
            return base
        return f"{base}:{adapter}" if self.joins_names else adapter

    def encode(self, request: GenerateRequest, *, model: str, prompt: TokenPrompt | None) -> dict[str, Any]:
        """The body of a streamed request. `prompt` is None for servers that take messages."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"top_p": request.top_p} if request.temperature > 0 else {}),
            **({"seed": request.seed} if request.seed is not None else {}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        if prompt is None and request.prompt is None:
            return body | _as_sent(request)
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if prompt is None:
            return body | {"prompt": request.prompt}
        if request.logprobs is not None and self.names_tokens:
            body["return_tokens_as_token_ids"] = True
        if prompt.format is not None:
            body["response_format"] = prompt.format
        return body | {
            "prompt": prompt.tokens, "stop_token_ids": [prompt.end], "skip_special_tokens": True
        }  # fmt: skip


class RequestForm:
    """How one endpoint takes the fields that every request gets from us. Newer models of OpenAI, for example,
    refuse `max_tokens` and a temperature of 0. Other values, which a client chose, are never left out."""

    def __init__(self) -> None:
        self._limit = _LIMIT
        self._left_out: frozenset[str] = frozenset()

    def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            self._limit if key == _LIMIT else key: value
            for key, value in body.items()
            if key not in self._left_out or not _is_ours(key, value)
        }

    def adapt(self, sent: dict[str, Any], refusal: ApiError) -> None:
        """Learn from the refusal of this body."""
        if _LIMIT in sent and _names(refusal, _LIMIT) and _NEWER_LIMIT in refusal.message:
            self._limit = _NEWER_LIMIT
            return
        for key in _OWN_VALUES:
            if key in sent and _is_ours(key, sent[key]) and _names(refusal, key):
                self._left_out |= {key}


_LIMIT, _NEWER_LIMIT = "max_tokens", "max_completion_tokens"
_OWN_VALUES: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "stream_options": {"include_usage": True}}
"""Fields that an endpoint gets with these values although no client asked for them."""


def _is_ours(key: str, value: Any) -> bool:
    return bool(_OWN_VALUES[key] == value)


def _names(refusal: ApiError, key: str) -> bool:
    """Whether the refusal is about this field. Without a field, its message says so."""
    return refusal.param == key if refusal.param is not None else key in refusal.message


def _as_sent(request: GenerateRequest) -> dict[str, Any]:
    """Messages, tools and formats for a server that takes chats."""
    if request.chat is None:
        return {"messages": [{"role": turn.role, "content": turn.content} for turn in request.messages]}
    messages = [
        {
            **{key: value for key, value in turn.items() if value is not None and value != []},
            "role": "system" if turn["role"] == "developer" else turn["role"],
        }
        for turn in request.chat["messages"]
    ]
    asked: dict[str, Any] = {}
    if request.logprobs is not None:  # not only where the client asked: a check of the answer may need them
        asked = {"logprobs": True, **({"top_logprobs": request.logprobs} if request.logprobs else {})}
    return {**request.chat, "messages": messages, **asked}


def write_format(request: GenerateRequest, form: CallForm | None) -> tuple[dict[str, Any] | None, str]:
    """`response_format` of a request to vLLM or SGLang, and the text that its prompt must end with.

    A forced call begins in the prompt, so that the rest is JSON of a schema, which both servers enforce.
    """
    if request.json_schema is not None and request.tools and request.tool_choice == "auto":
        message = "response_format is not supported together with tools by this engine"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    if request.json_schema is not None and not request.tools:
        return _json_format(request.json_schema), ""
    if not request.tools or form is None:
        return None, ""
    if request.tool_choice != "auto":
        schema = write_call_schema(choose_functions(request.tools, request.tool_choice), form.key)
        return _json_format(schema), form.before
    return (_tagged_format(request, form) if request.strict_tools else None), ""


def _json_format(schema: dict[str, Any]) -> dict[str, Any]:
    if schema == _ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _tagged_format(request: GenerateRequest, form: CallForm) -> dict[str, Any]:
    """Text is free; what begins as a call must go on as one of the functions."""
    structures = [
        {
            "begin": f'{form.before}{{"name": "{function["name"]}", "{form.key}": ',
            "schema": function["parameters"],
            "end": f"}}{form.behind}",
        }
        for function in choose_functions(request.tools, "auto")
    ]
    trigger = form.before.rstrip() or '{"name": "'
    return {"type": "structural_tag", "structures": structures, "triggers": [trigger]}


DIALECTS: dict[EngineKind, Dialect] = {
    "vllm": Dialect(
        True, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", loads_at_root=True, names_tokens=True
    ),
    "sglang": Dialect(
        True, "/load_lora_adapter", "/unload_lora_adapter", loads_at_root=True, joins_names=True
    ),
    "endpoint": Dialect(False),
}
