"""What is measured for the planner's accuracy: decoders by their numbers, and settings of our own step.

In: nothing. Out: configurations as plain dicts, each of which a process of its own runs. Two whole
architectures are held out: nobody looks at their figures while the planner is built. Needs no torch.
"""

from typing import Any, NamedTuple

GIB_16 = 15.5
"""What a card of 16 GB leaves to the allocator."""


class Numbers(NamedTuple):
    """A decoder as its config.json states it."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool


DECODERS = {
    "deepseek-coder-1.3b": Numbers("llama", 2048, 24, 16, 16, 128, 5504, 32256, False),
    "deepseek-coder-6.7b": Numbers("llama", 4096, 32, 32, 32, 128, 11008, 32256, False),
    "qwen2.5-7b": Numbers("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-0.5b": Numbers("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "qwen3-1.7b": Numbers("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True),
    "qwen3-8b": Numbers("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "llama-3.2-1b": Numbers("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "mistral-7b": Numbers("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False),
    "olmo2-7b": Numbers("olmo2", 4096, 32, 32, 32, 128, 11008, 100352, False),
    "tiny": Numbers("qwen2", 64, 3, 4, 2, 16, 192, 512, False),
}
HELD_OUT = ("mistral-7b", "olmo2-7b")

LORA = {"method": "lora", "form": "whole", "head": "whole"}
EIGHT = {"method": "lora", "form": "eight", "head": "eight"}
FOUR = {"method": "qlora", "form": "four", "head": "whole"}
FULL = {"method": "full", "form": "whole", "head": "whole"}


def _one(model: str, way: dict[str, str], **other: Any) -> dict[str, Any]:
    """A configuration; what is not said is the plainest."""
    plain: dict[str, Any] = {
        "model": model,
        "layers": DECODERS[model].layers,
        "rank": 16,
        "length": 2048,
        "rows": 1,
        "keep": 0,
        "lean": 0,
        "chunk_tokens": 2048,
        "head_tokens": 1024,
        "turned": False,
        "host_embedding": False,
        "compiled": False,
        "cap_gib": None,
        "trained_share": 1.0,
        "expandable": True,
        "uneven": False,
    }
    return {**plain, **way, **other}


def own_configurations() -> list[dict[str, Any]]:
    """Our own step: forms, levels, lengths, caps. Those with few layers are quick and show the parts."""
    return [
        # The parts of a block, one level after the other.
        _one("deepseek-coder-6.7b", LORA, layers=8),
        _one("deepseek-coder-6.7b", LORA, layers=8, keep=8),
        _one("deepseek-coder-6.7b", LORA, layers=8, lean=8),
        _one("deepseek-coder-6.7b", FOUR, layers=8, keep=3, lean=3, length=4096),
        _one("deepseek-coder-6.7b", EIGHT, layers=8, keep=3, lean=2, length=4096),
        _one("deepseek-coder-6.7b", FOUR, length=2048),
        _one("deepseek-coder-6.7b", FOUR, length=8192, rank=32),
        _one("deepseek-coder-6.7b", EIGHT, turned=True, keep=16, rows=2),
        _one("deepseek-coder-6.7b", LORA, length=512, rows=4, keep=32, uneven=True, trained_share=0.3),
        _one("deepseek-coder-1.3b", LORA, keep=24, length=1024, rows=4),
        _one("deepseek-coder-1.3b", FOUR, lean=24, length=4096, chunk_tokens=1024),
        _one("deepseek-coder-1.3b", LORA, length=8192, chunk_tokens=4096),
        _one("deepseek-coder-1.3b", EIGHT, length=8192, keep=12, lean=6, rank=64),
        _one("deepseek-coder-1.3b", LORA, length=2048, keep=24, compiled=True),
        _one("qwen2.5-7b", LORA, layers=6, keep=2, lean=2),
        _one("qwen2.5-7b", EIGHT, layers=6, keep=2, lean=2, head_tokens=2048),
        _one("qwen2.5-7b", FOUR, length=1024, keep=4, lean=4, cap_gib=GIB_16),
        _one("qwen2.5-7b", FOUR, length=4096, host_embedding=True, head_tokens=512),
        _one("qwen2.5-7b", EIGHT, length=2048, lean=4, host_embedding=True, cap_gib=GIB_16),
        _one("qwen2.5-7b", LORA, length=4096, keep=8, lean=8, rank=8),
        _one("qwen2.5-7b", EIGHT, length=2048, rows=2, turned=True, keep=14, compiled=True),
        _one("qwen2.5-0.5b", LORA, keep=24, length=512, rows=8),
        _one("qwen2.5-0.5b", LORA, length=8192, keep=8, uneven=True, rows=2, trained_share=0.5),
        _one("qwen2.5-0.5b", FOUR, length=2048, lean=12),
        _one("qwen2.5-0.5b", EIGHT, length=4096, keep=24, head_tokens=512, cap_gib=9.0),
        _one("qwen3-1.7b", LORA, length=2048, keep=28),
        _one("qwen3-1.7b", LORA, length=4096, keep=9, lean=9, host_embedding=True),
        _one("qwen3-1.7b", FOUR, length=8192, cap_gib=GIB_16),
        _one("qwen3-1.7b", EIGHT, length=1024, rows=4, lean=28, turned=True),
        _one("qwen3-8b", LORA, layers=8, keep=4, lean=2, length=4096),
        _one("qwen3-8b", FOUR, length=2048, keep=6, lean=6, cap_gib=GIB_16),
        _one("qwen3-8b", EIGHT, length=1024, cap_gib=GIB_16, host_embedding=True),
        _one("qwen3-8b", FOUR, length=512, rows=4, keep=36, expandable=False),
        _one("llama-3.2-1b", LORA, length=2048, keep=16),
        _one("llama-3.2-1b", LORA, length=8192, lean=8, rank=32),
        _one("llama-3.2-1b", FOUR, length=4096, keep=8, expandable=False),
        _one("llama-3.2-1b", EIGHT, length=512, rows=8, uneven=True, keep=16),
        _one("llama-3.2-1b", LORA, length=4096, keep=4, lean=4, expandable=False, cap_gib=9.0),
        _one("llama-3.2-1b", LORA, length=2048, keep=8, lean=4, compiled=True),
        # Full training goes the plain way.
        _one("qwen2.5-0.5b", FULL, length=1024),
        _one("qwen2.5-0.5b", FULL, length=2048, rows=2),
        _one("llama-3.2-1b", FULL, length=1024),
        _one("deepseek-coder-1.3b", FULL, length=2048),
        _one("qwen3-1.7b", FULL, layers=8, length=4096),
        # Held out.
        _one("mistral-7b", LORA, length=2048, keep=8, lean=8),
        _one("mistral-7b", FOUR, length=8192, cap_gib=GIB_16),
        _one("mistral-7b", EIGHT, length=4096, lean=6, cap_gib=GIB_16),
        _one("mistral-7b", FOUR, length=1024, rows=2, keep=32, uneven=True, trained_share=0.4),
        _one("mistral-7b", FULL, layers=4, length=2048),
        _one("olmo2-7b", LORA, length=2048, keep=32),
        _one("olmo2-7b", FOUR, length=4096, keep=8, lean=8, cap_gib=GIB_16),
        _one("olmo2-7b", EIGHT, length=512, rows=4, lean=16, turned=True),
        _one("olmo2-7b", LORA, length=1024, host_embedding=True, rank=64),
        _one("olmo2-7b", FULL, layers=4, length=1024),
    ]


def pair_questions() -> list[dict[str, Any]]:
    """For each: the largest length that the planner says fits 15.5 GiB, and one that is 5 % larger."""
    return [
        _one("deepseek-coder-6.7b", FOUR, cap_gib=GIB_16, chunk_tokens=1024, head_tokens=512),
        _one("deepseek-coder-6.7b", EIGHT, cap_gib=GIB_16, chunk_tokens=1024, head_tokens=512),
        _one("qwen2.5-7b", FOUR, cap_gib=GIB_16, chunk_tokens=1024, head_tokens=256, host_embedding=True),
        _one("deepseek-coder-1.3b", LORA, cap_gib=GIB_16, keep=24),
        _one("llama-3.2-1b", LORA, cap_gib=GIB_16, keep=8, lean=8),
        _one("qwen3-1.7b", FOUR, cap_gib=GIB_16, lean=28),
        _one("mistral-7b", FOUR, cap_gib=GIB_16, chunk_tokens=1024, head_tokens=512),
        _one("olmo2-7b", FOUR, cap_gib=GIB_16, keep=16, head_tokens=512),
    ]


def name_of(configuration: dict[str, Any]) -> str:
    """Short and telling."""
    c = configuration
    way = c["method"] if c["method"] == "full" else f"{c['method']}/{c['form']}"
    return (
        f"{c['model']} ×{c['layers']} {way} {c['rows']}×{c['length']} keep {c['keep']} lean {c['lean']}"
        + (" compiled" if c["compiled"] else "")
        + (f" cap {c['cap_gib']}" if c["cap_gib"] else "")
    )


def shape_of(configuration: dict[str, Any]) -> Any:
    """The decoder as the planner reads it."""
    from graftwork.model.shape import linear_sizes
    from graftwork.records.plan import ModelShape

    numbers = DECODERS[configuration["model"]]
    shape = ModelShape(
        name=configuration["model"],
        hidden_size=numbers.hidden,
        layers=configuration["layers"],
        heads=numbers.heads,
        kv_heads=numbers.kv_heads,
        head_dim=numbers.head_dim,
        intermediate_size=numbers.inner,
        vocab_size=numbers.vocabulary,
        tied_embeddings=numbers.tied,
        max_positions=32768,
    )
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # What a family has beside Llama's linears and two norms; weights on a disk would say the same.
    beside = {"qwen2": q + 2 * kv, "qwen3": 2 * shape.head_dim, "olmo2": q + kv}.get(numbers.family, 0)
    if not beside:
        return shape
    block = sum(a * b for a, b in linear_sizes(shape).values()) + 2 * numbers.hidden + beside
    tables = shape.vocab_size * numbers.hidden * (1 if shape.tied_embeddings else 2)
    parameters = tables + shape.layers * block + numbers.hidden
    return shape.model_copy(update={"block_parameters": block, "parameters": parameters})


def tuning_of(configuration: dict[str, Any]) -> Any:
    from graftwork.records.plan import Tuning

    c = configuration
    return Tuning(
        form=c["form"],
        head=c["head"],
        micro_tokens=c["rows"] * c["length"],
        longest=max(lengths_of(c)),
        keep=c["keep"],
        lean=c["lean"],
        chunk_tokens=min(c["chunk_tokens"], c["rows"] * c["length"]),
        head_tokens=min(c["head_tokens"], c["rows"] * c["length"]),
        turned=c["turned"],
        host_embedding=c["host_embedding"],
        compiled=c["compiled"],
        limit_gib=c["cap_gib"] or 139.0,
        peak_gib=0.0,
        seconds_per_token=0.0,
    )


def lengths_of(configuration: dict[str, Any]) -> list[int]:
    """Tokens of the rows of one pass: all of one length, or of each pair one longer and one shorter."""
    length, rows = configuration["length"], configuration["rows"]
    if not configuration["uneven"]:
        return [length] * rows
    return [length + length // 4, length - length // 4] * (rows // 2)


def trained_places(configuration: dict[str, Any]) -> int:
    """Places that predict, over the rows of one pass."""
    return sum(length - trained_from(configuration, length) for length in lengths_of(configuration))


def trained_from(configuration: dict[str, Any], length: int) -> int:
    return max(1, length - int(length * configuration["trained_share"]))
