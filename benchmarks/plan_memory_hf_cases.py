"""The settings that `plan_memory_hf.py` measures: shapes, methods, lengths, what is kept, optimizers."""

from typing import Any, NamedTuple

from graftwork.records.plan import ModelShape, PlainSetup

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
HELD_OUT = ("mistral", "olmo2")


def _config(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    hidden, wide, layers, heads, kv_heads, vocabulary = sizes
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


MODELS = {
    "deepseek-coder-1.3b": _config("llama", (2048, 5504, 24, 16, 16, 32256)),
    "deepseek-coder-6.7b": _config("llama", (4096, 11008, 32, 32, 32, 32256)),
    "llama-3.2-1b": _config("llama", (2048, 8192, 16, 32, 8, 128256), head_dim=64, tie_word_embeddings=True),
    "qwen2.5-0.5b": _config("qwen2", (896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True),
    "qwen2.5-7b": _config("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "qwen3-1.7b": _config("qwen3", (2048, 6144, 28, 16, 8, 151936), head_dim=128, tie_word_embeddings=True),
    "gemma-2b": _config("gemma", (2048, 16384, 18, 8, 1, 256000), head_dim=256, tie_word_embeddings=True),
    "phi-3-mini": _config("phi3", (3072, 8192, 32, 32, 32, 32064)),
    "mistral-7b": _config("mistral", (4096, 14336, 32, 32, 8, 32768), sliding_window=None, head_dim=128),
    "olmo2-1b": _config("olmo2", (2048, 8192, 16, 16, 16, 100352)),
}


class Case(NamedTuple):
    """One measurement."""

    name: str
    model: str
    config: dict[str, Any]
    setup: PlainSetup
    held_out: bool


def _case(
    model: str, method: str, tokens: int, *, layers: int | None = None, kept: str = "all", **more: Any
) -> Case:
    """`kept`: all layers keep what backward needs, some (half of them) or none do."""
    config = {**MODELS[model]}
    config["num_hidden_layers"] = count = layers or config["num_hidden_layers"]
    targets = PHI_LINEARS if config["model_type"] == "phi3" else LINEARS
    setup = PlainSetup.model_validate(
        {
            "method": method,
            "targets": targets,
            "adapted_layers": count,
            "tokens": tokens,
            "checkpointed": {"all": 0, "some": count // 2, "none": count}[kept],
            # Weights that are trained in half precision need no autocast.
            "autocast": method != "full",
            **more,
        }
    )
    words = [model, method, str(tokens), *([] if kept == "all" else [f"keeps-{kept}"])]
    words += [str(value) for key, value in more.items() if key in ("loss", "optimizer", "dtype", "rows")]
    words += [key for key, value in more.items() if key in ("autocast", "kbit_upcast") and not value]
    return Case("-".join(words), model, config, setup, config["model_type"] in HELD_OUT)


CASES = (
    _case("deepseek-coder-1.3b", "lora", 2048),
    _case("deepseek-coder-1.3b", "lora", 8192, kept="none"),
    _case("deepseek-coder-1.3b", "qlora", 4096, kept="some"),
    _case("deepseek-coder-1.3b", "full", 2048, optimizer="adamw_foreach"),
    _case("deepseek-coder-1.3b", "full", 4096, kept="none", optimizer="adamw_8bit", loss="fused"),
    _case("deepseek-coder-1.3b", "dora", 1024),
    _case("deepseek-coder-6.7b", "qlora", 2048, kept="none"),
    _case("deepseek-coder-6.7b", "lora", 4096, layers=12, loss="fused"),
    _case("deepseek-coder-6.7b", "full", 1024, layers=8, optimizer="sgd", kept="none"),
    _case("deepseek-coder-6.7b", "qlora", 512, layers=16, optimizer="adamw_8bit"),
    _case("llama-3.2-1b", "lora", 2048, rows=2),
    _case("llama-3.2-1b", "full", 2048, optimizer="adamw_fused", kept="some"),
    _case("llama-3.2-1b", "qlora", 8192, kept="none", loss="fused"),
    _case("llama-3.2-1b", "full", 1024, dtype="float32", autocast=True, optimizer="adamw_loop"),
    _case("qwen2.5-0.5b", "lora", 512, rows=4),
    _case("qwen2.5-0.5b", "lora", 4096, kept="none", loss="fused"),
    _case("qwen2.5-0.5b", "full", 1024, optimizer="adamw_8bit"),
    _case("qwen2.5-0.5b", "qlora", 2048, kbit_upcast=False),
    _case("qwen2.5-7b", "qlora", 2048, layers=8),
    _case("qwen2.5-7b", "lora", 8192, layers=6, kept="none", loss="fused"),
    _case("qwen2.5-7b", "lora", 1024, layers=8, adapter_dtype="bfloat16", autocast=False),
    _case("qwen3-1.7b", "lora", 2048),
    _case("qwen3-1.7b", "qlora", 4096, kept="none"),
    _case("qwen3-1.7b", "full", 1024, kept="some", optimizer="adamw_fused", loss="fused"),
    _case("gemma-2b", "lora", 1024, layers=12),
    _case("gemma-2b", "qlora", 4096, layers=12, kept="none", loss="fused"),
    _case("phi-3-mini", "lora", 2048, layers=16, kept="some"),
    _case("phi-3-mini", "qlora", 4096, layers=16, optimizer="sgd"),
    _case("mistral-7b", "lora", 2048, layers=8),
    _case("mistral-7b", "qlora", 4096, layers=12, kept="none"),
    _case("mistral-7b", "qlora", 8192, layers=8, kept="some", loss="fused"),
    _case("mistral-7b", "full", 1024, layers=5, optimizer="adamw_foreach"),
    _case("olmo2-1b", "lora", 4096, kept="none"),
    _case("olmo2-1b", "lora", 1024, rows=2, optimizer="sgd"),
    _case("olmo2-1b", "qlora", 2048),
    _case("olmo2-1b", "full", 2048, loss="fused", optimizer="adamw_fused"),
)


def shape_of(case: Case) -> ModelShape:
    config = case.config
    heads = config["num_attention_heads"]
    return ModelShape(
        name=case.model,
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=config["tie_word_embeddings"],
        max_positions=config["max_position_embeddings"],
    )


def case_json(case: Case) -> dict[str, Any]:
    """What a line says of its setting."""
    return {
        "name": case.name,
        "model": case.model,
        "architecture": case.config["model_type"],
        "shape": shape_of(case).model_dump(),
        "setup": case.setup.model_dump(mode="json"),
    }
