"""How vLLM, SGLang and OpenAI-compatible endpoints are asked. Pure: bodies and names, no network.

vLLM and SGLang take the prompt as tokens and adapters at run time: vLLM by the name alone, SGLang as
`base:adapter`. Both refuse run-time loading unless they were started for it.
"""

from typing import Any, NamedTuple

from graftwork.serve.engine_protocol import GenerateRequest
from graftwork.serve.settings import EngineKind


class Dialect(NamedTuple):
    """`load_path` is None where no adapters can be loaded."""

    path: str
    takes_tokens: bool
    load_path: str | None = None
    unload_path: str | None = None
    loads_at_root: bool = False
    """Whether adapters are loaded at the server's root instead of below /v1."""
    joins_names: bool = False

    def name_model(self, base: str, adapter: str | None) -> str:
        if adapter is None:
            return base
        return f"{base}:{adapter}" if self.joins_names else adapter

    def encode(self, request: GenerateRequest, *, model: str, prompt: list[int], end: int) -> dict[str, Any]:
        """The body of a streamed request. `end` is the token that ends a turn in our template."""
        sampled = request.temperature > 0
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"top_p": request.top_p} if sampled else {}),
            **({"seed": request.seed} if request.seed is not None else {}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        if self.takes_tokens:
            return {**body, "prompt": prompt, "stop_token_ids": [end], "skip_special_tokens": True}
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        return {**body, "messages": messages}

    def text_of(self, choice: dict[str, Any]) -> str:
        """The new text of one choice of an event."""
        text = choice.get("text") if self.takes_tokens else (choice.get("delta") or {}).get("content")
        return text or ""


DIALECTS: dict[EngineKind, Dialect] = {
    "vllm": Dialect(
        "/completions", True, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", loads_at_root=True
    ),
    "sglang": Dialect(
        "/completions",
        True,
        "/load_lora_adapter",
        "/unload_lora_adapter",
        loads_at_root=True,
        joins_names=True,
    ),
    "endpoint": Dialect("/chat/completions", False),
}
