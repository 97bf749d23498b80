"""The settings of `plan_time.py`: models by their sizes, and steps by how they are tuned."""

from typing import Any, NamedTuple

RANK = 16


class Sizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool


SHAPES = {
    "7b": Sizes(3584, 28, 28, 4, 128, 18944, 152_064, False),
    "1b": Sizes(2048, 16, 32, 8, 64, 8192, 128_256, True),
    "6.7b": Sizes(4096, 32, 32, 32, 128, 11008, 32_256, False),
    "8b": Sizes(4096, 36, 32, 8, 128, 12288, 151_936, False),
    "360m": Sizes(960, 32, 15, 5, 64, 2560, 49_152, True),
}
"""Qwen2.5-7B, Llama-3.2-1B, DeepSeek-Coder-6.7B, Qwen3-8B (without its norms of heads), SmolLM2-360M."""


class Setting(NamedTuple):
    """A step as it is tuned. `again` and `lean` count blocks; the others keep everything."""

    shape: str
    form: str
    tokens: int
    length: int
    again: int = 0
    lean: int = 0
    chunk: int = 0
    """Tokens of one go; 0: all."""
    turned: bool = False
    host: bool = False

    @property
    def name(self) -> str:
        bits = {"whole": "16", "eight": "8", "four": "4"}[self.form]
        levels = f", {self.again} again, {self.lean} lean" if self.again + self.lean else ""
        return f"{self.shape} {bits} bits, {self.tokens} tokens in rows of {self.length}{levels}"


SETTINGS = (
    Setting("7b", "eight", 8192, 2048),
    Setting("1b", "whole", 8192, 2048),
    Setting("7b", "whole", 8192, 8192),
    Setting("6.7b", "whole", 4096, 1024),
    Setting("7b", "eight", 8192, 512),
    Setting("360m", "whole", 8192, 512),
    Setting("7b", "four", 4096, 2048),
    Setting("7b", "whole", 8192, 2048),
    Setting("1b", "whole", 8192, 1024, again=6, lean=4, chunk=8192),
    Setting("8b", "eight", 8192, 4096, turned=True),
    Setting("7b", "eight", 4096, 2048, again=28, chunk=2048, host=True),
    Setting("6.7b", "four", 2048, 2048, again=12, lean=4, host=True),
)
"""In this order, so that what is passed over for want of time is not all of one kind."""


def shape_of(name: str) -> Any:
    from graftwork.records.plan import ModelShape

    sizes = SHAPES[name]
    return ModelShape(
        name=name,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=sizes.vocabulary,
        tied_embeddings=sizes.tied,
        max_positions=32_768,
    )


def tuning_of(setting: Setting) -> Any:
    from graftwork.records.plan import Tuning

    shape = shape_of(setting.shape)
    return Tuning.model_validate(
        {
            "form": setting.form,
            "head": "eight" if setting.form == "eight" else "whole",
            "micro_tokens": setting.tokens,
            "longest": setting.length,
            "keep": shape.layers - setting.again - setting.lean,
            "lean": setting.lean,
            "chunk_tokens": setting.chunk or setting.tokens,
            "head_tokens": min(setting.tokens, 2048),
            "turned": setting.turned,
            "host_embedding": setting.host,
            "limit_gib": 130.0,
            "peak_gib": 0.0,
            "seconds_a_token": 0.0,
        }
    )


def trainable_of(shape: Any) -> int:
    from graftwork.model.shape import adapter_parameters, linear_names

    return adapter_parameters(shape, rank=RANK, targets=linear_names(shape), layers=shape.layers)
