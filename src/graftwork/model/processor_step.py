"""What the step that is written for processors is made for, and what it holds. Pure; needs no torch.

In: a config, a shape, the machine's memory. Out: whether a run takes that step, the bytes of its packed
weights, and where the output of its frozen blocks waits. `train/cpu` decides the same from the loaded
model; a test holds the two together.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from graftwork.model.shape import linear_sizes
from graftwork.records.plan import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "llama3", "linear", "yarn")
WIDTH = 4
"""It works in float32 alone."""
MEMORY_SHARE = 1 / 8
"""Of the machine's memory, for packed weights, and as much again for hidden states."""
DISK_SHARE = 1 / 4
OPERATIONS_A_SECOND = 6e10
MEMORY_BYTES_A_SECOND = 2e9
FILE_BYTES_A_SECOND = 2e8


class TrunkTokens(NamedTuple):
    """Tokens behind the common beginning: of all rows once, and over all visits of a run."""

    distinct: int
    visited: int


def why_plain_here(
    config: Mapping[str, Any], *, method: str, dtype: str, longest: int, alone: bool
) -> str | None:
    """Why a run on a processor takes the plain step; None where it takes the one that is written for it."""
    if method != "lora":
        return f"`{method}` learns more than adapters beside frozen weights"
    if dtype != "float32":
        return f"it works in {dtype}"
    if not alone:
        return "several devices share it"
    if config.get("model_type") not in FAMILIES:
        return f"blocks of {config.get('model_type')!r} are not written out"
    window = config.get("sliding_window")
    if window is not None and window < longest and config.get("use_sliding_window", True):
        return "rows are longer than the window that tokens look back"
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    return None if kind in ROTARY else f"its positions are of the kind {kind!r}"


def packed_bytes(shape: ModelShape, *, adapted: int) -> int:
    """One copy of each frozen weight, two where the gradient comes back: the adapted blocks and the head."""
    block = sum(inputs * outputs for inputs, outputs in linear_sizes(shape).values())
    head = shape.vocab_size * shape.hidden_size
    return ((shape.layers - adapted) * block + 2 * (adapted * block + head)) * WIDTH


def states_bytes(shape: ModelShape, distinct_tokens: int) -> int:
    """The frozen blocks' output of all rows."""
    return distinct_tokens * shape.hidden_size * WIDTH


def choose_kept(
    shape: ModelShape,
    tokens: TrunkTokens,
    *,
    adapted: int,
    memory_bytes: float,
    disk_bytes: float,
    threads: int,
) -> Literal["memory", "file", "nowhere"]:
    """The nearest place that is large enough and faster than computing again."""
    block = sum(inputs * outputs for inputs, outputs in linear_sizes(shape).values())
    again = 2.0 * block * (shape.layers - adapted) / (threads * OPERATIONS_A_SECOND)
    a_token, size = states_bytes(shape, 1), states_bytes(shape, tokens.distinct)
    if adapted >= shape.layers or tokens.visited <= tokens.distinct:
        return "nowhere"
    if size <= memory_bytes * MEMORY_SHARE:
        return "memory" if a_token / MEMORY_BYTES_A_SECOND < again else "nowhere"
    if size <= disk_bytes * DISK_SHARE and 2 * a_token / FILE_BYTES_A_SECOND < again:
        return "file"
    return "nowhere"
