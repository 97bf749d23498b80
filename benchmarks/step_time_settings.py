"""The settings of `step_time.py`: decoders by their configs, and steps of both engines."""

from typing import Any, NamedTuple

LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 8192}


def _decoder(
    kind: str, sizes: tuple[int, int, int, int, int, int], vocabulary: int, **more: Any
) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, head_dim = sizes
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "135m": _decoder("llama", (576, 1536, 30, 9, 3, 64), 49_152, tie_word_embeddings=True),
    "360m": _decoder("llama", (960, 2560, 32, 15, 5, 64), 49_152, tie_word_embeddings=True),
    "1.4b": _decoder("llama", (2048, 5504, 24, 16, 16, 128), 49_152),
    "1.7b-qwen3": _decoder("qwen3", (2048, 6144, 28, 16, 8, 128), 151_936, tie_word_embeddings=True),
    "2b-gemma2": _decoder("gemma2", (2304, 9216, 26, 8, 4, 256), 256_000, tie_word_embeddings=True),
    "3b-llama": _decoder("llama", (3072, 8192, 28, 24, 8, 128), 128_256, tie_word_embeddings=True),
    "3b-starcoder2": _decoder("starcoder2", (3072, 12288, 30, 24, 2, 128), 49_152, tie_word_embeddings=True),
    "6.9b-qwen2": _decoder("qwen2", (3584, 18944, 28, 28, 4, 128), 49_152),
    "7b-qwen2": _decoder("qwen2", (3584, 18944, 28, 28, 4, 128), 152_064),
    "8b-llama": _decoder("llama", (4096, 14336, 32, 32, 8, 128), 128_256),
    "8b-qwen3": _decoder("qwen3", (4096, 12288, 36, 32, 8, 128), 151_936),
    "1b-gemma3": _decoder("gemma3_text", (1152, 6912, 26, 4, 1, 256), 262_144, tie_word_embeddings=True),
    "2b-granite": _decoder("granite", (2048, 8192, 40, 32, 8, 64), 49_155, tie_word_embeddings=True),
    "3.8b-phi3": _decoder("phi3", (3072, 8192, 32, 32, 32, 96), 32_064),
    "1b-olmo2": _decoder("olmo2", (2048, 8192, 16, 16, 16, 128), 100_352),
    "3b-smollm3": _decoder("smollm3", (2048, 11008, 36, 16, 4, 128), 128_256, tie_word_embeddings=True),
    "7b-cohere": _decoder("cohere", (4096, 14336, 32, 32, 8, 128), 256_000, tie_word_embeddings=True),
    "7b-mistral": _decoder("mistral", (4096, 14336, 32, 32, 8, 128), 32_768, sliding_window=None),
}
"""SmolLM2-135M and 360M, the two bases of `train_short_rows.py`, Qwen3-1.7B, Gemma 2 2B, Llama-3.2-3B,
StarCoder2-3B, Qwen2.5-7B, Llama-3.1-8B, Qwen3-8B; one decoder of every further family."""

DEMO = (96, 110, 121, 130, 138, 147, 160, 176)
"""Eight rows as the demo's log has them: 1,078 tokens."""


class Setting(NamedTuple):
    """One step. The planner tunes graft's own; transformers + PEFT runs under autocast with sdpa."""

    model: str
    engine: str
    lengths: tuple[int, ...]
    trained_share: float = 1.0
    method: str = "lora"
    limit_gib: float = 130.0
    room: int = 0
    """Tokens of the largest step of the run, which packs are filled up by; 0: of this one."""
    layers: int = 0
    """Fewer layers, as a probe takes; 0: all."""
    fp8: bool = True
    """8-bit products where the model is large enough."""

    @property
    def name(self) -> str:
        rows, longest = len(self.lengths), max(self.lengths)
        shown = (
            f"{rows} × {longest}"
            if min(self.lengths) == longest
            else f"{sum(self.lengths)} tokens in {rows} rows"
        )
        more = f", {self.layers} layers" if self.layers else ""
        more += f", {self.method}" if self.method != "lora" else ""
        more += f", {self.limit_gib:g} GiB" if self.limit_gib < 130 else ""
        more += ", 16 bits" if not self.fp8 else ""
        return f"{self.model} {self.engine}, {shown}{more}"


def _own(model: str, lengths: tuple[int, ...], **more: Any) -> Setting:
    return Setting(model, "graft", lengths, **more)


def _short(model: str, engine: str = "graft", **more: Any) -> Setting:
    lengths = DEMO if engine == "graft" else (140,) * 8
    room = 1320 if engine == "graft" else 0
    return Setting(model, engine, lengths, trained_share=0.25, room=room, **more)


SETTINGS = (
    _short("135m", "hf"),
    _short("135m"),
    Setting("135m", "hf", (2048,) * 2),
    _own("135m", (2048,) * 4),
    _short("360m", "hf"),
    _short("360m"),
    Setting("360m", "hf", (512,) * 8),
    _own("360m", (512,) * 8),
    _short("1.4b", "hf"),
    _short("1.4b"),
    Setting("1.4b", "hf", (2048,) * 2),
    _own("1.4b", (2048,) * 4),
    _own("1.4b", (2048,) * 2, fp8=False),
    _short("6.9b-qwen2", "hf"),
    _short("6.9b-qwen2"),
    Setting("3b-llama", "hf", (2048,) * 2),
    _own("3b-llama", (1024,) * 8),
    _short("3b-llama", "hf"),
    _short("3b-llama"),
    Setting("7b-qwen2", "hf", (2048,) * 2),
    _own("7b-qwen2", (2048,) * 4),
    _own("7b-qwen2", (2048,) * 4, limit_gib=16.0),
    _own("7b-qwen2", (2048,) * 4, limit_gib=9.0, method="qlora"),
    _own("7b-qwen2", (512,) * 8),
    Setting("8b-llama", "hf", (2048,) * 2),
    Setting("8b-qwen3", "hf", (2048,) * 2),
    _own("8b-qwen3", (2048,) * 2),
    _short("8b-qwen3"),
    Setting("1.7b-qwen3", "hf", (2048,) * 2),
    _own("1.7b-qwen3", (256, 400, 512, 640, 700, 900, 1200, 1800), trained_share=0.3),
    Setting("2b-gemma2", "hf", (2048,) * 2),
    Setting("3b-starcoder2", "hf", (2048,) * 2),
    Setting("1.4b", "hf", DEMO, trained_share=0.25),
    _own("8b-llama", (4096,) * 2),
)
"""In this order, so that what the budget leaves out is not all of one kind."""

PROBED = tuple(
    Setting(model, engine, lengths, trained_share=share, layers=layers)
    for model in ("135m", "1.4b", "7b-qwen2", "3b-llama", "1.7b-qwen3")
    for engine in ("graft", "hf")
    for lengths, share in (((128,) * 8, 0.25), ((2048,) * 2, 1.0))
    for layers in (4, 2)
)
"""What a probe of these shapes would time."""

FAMILIES = tuple(
    Setting(model, engine, lengths, trained_share=share, layers=8)
    for model in (
        "2b-gemma2",
        "1b-gemma3",
        "3b-starcoder2",
        "2b-granite",
        "3.8b-phi3",
        "1b-olmo2",
        "3b-smollm3",
        "7b-cohere",
        "7b-mistral",
    )
    for lengths, share in (((2048,) * 2, 1.0), ((140,) * 8, 0.25))
    for engine in ("graft", "hf")
)
"""Eight layers of real widths of every family, both engines, long and short rows."""
