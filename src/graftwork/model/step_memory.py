"""What a training step on a card holds, in bytes, by what its blocks keep. Pure.

In: a decoder's shape and how a step is tuned. Out: bytes. Counted tensor by tensor from the step that
`train/gpu` does, in a type of two bytes; measured on one card it came within 5 %.
"""

from graftwork.model.shape import layer_parameters, linear_sizes
from graftwork.records.plan import ModelShape, Tuning

WIDTH = 2
"""Bytes of an activation."""

BYTES_A_WEIGHT = {"whole": 2.0, "eight": 1.0, "four": 0.516}
"""Four bits, and 8.25 bits for every 64 weights."""

LEARNED_BYTES = 16
"""A learned parameter, its gradient and two Adam states, in float32."""

LOGIT_BYTES = 6.5
"""Logits, their gradient and its 8-bit codes."""

GIB = 2**30

SLACK = 1.04
"""What the allocator rounds up."""


def kept_bytes(shape: ModelShape, level: str) -> float:
    """What one token leaves in one block between the passes."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if level == "again":
        return WIDTH * h
    # Input, queries, keys, values, what attention gave, the middle of the residual stream.
    lean = WIDTH * (2 * h + 2 * q + 2 * kv) + 4 * shape.heads
    return lean if level == "lean" else lean + WIDTH * 2 * i


def static_bytes(shape: ModelShape, tuning: Tuning, *, trainable: int) -> float:
    """Weights and everything about what is learned."""
    weights = (
        shape.layers * layer_parameters(shape) * BYTES_A_WEIGHT[tuning.form] * (2 if tuning.turned else 1)
    )
    table = shape.vocab_size * shape.hidden_size
    head = table * BYTES_A_WEIGHT[tuning.head] * (2 if tuning.turned and tuning.head == "eight" else 1)
    embedding = 0 if tuning.host_embedding else table * WIDTH
    if shape.tied_embeddings and tuning.head == "whole":
        head = 0 if embedding else head
    return weights + head + embedding + trainable * LEARNED_BYTES


def passing_bytes(shape: ModelShape, tuning: Tuning) -> float:
    """The most that is there for a moment: at the head, or within the backward pass of one block."""
    h, i = shape.hidden_size, shape.intermediate_size
    turning = 0 if tuning.turned or tuning.form == "whole" else 1
    head = tuning.head_tokens * shape.vocab_size * LOGIT_BYTES + 3 * tuning.micro_tokens * h * WIDTH
    if tuning.head == "eight" and not tuning.turned:
        head += shape.vocab_size * h
    width = {"eight": 1, "four": WIDTH, "whole": 0}[tuning.form]
    wide = 10 * i * tuning.micro_tokens if tuning.keep else 14 * i * tuning.chunk_tokens
    block = wide + 12 * h * tuning.micro_tokens + turning * width * largest_linear(shape)
    return max(head, block)


def largest_linear(shape: ModelShape) -> int:
    """Weights of the largest product: gate and up side by side."""
    sizes = linear_sizes(shape)
    pair = sum(sizes[name][0] * sizes[name][1] for name in ("gate_proj", "up_proj") if name in sizes)
    return max(pair, *(a * b for a, b in sizes.values()))


def peak_bytes(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> float:
    """All of it. Blocks below the first adapted one keep nothing."""
    again = adapted - tuning.keep - tuning.lean
    kept = tuning.micro_tokens * (
        tuning.keep * kept_bytes(shape, "keep")
        + tuning.lean * kept_bytes(shape, "lean")
        + again * kept_bytes(shape, "again")
    )
    return static_bytes(shape, tuning, trainable=trainable) + SLACK * (kept + passing_bytes(shape, tuning))


def best_levels(shape: ModelShape, room: float, *, tokens: int, adapted: int) -> tuple[int, int]:
    """(keep, lean) that fit into `room` bytes and leave the least to be computed again."""
    best = (0, 0)
    for keep in range(adapted + 1):
        left = room - keep * extra_bytes(shape, "keep") * tokens
        if left < 0:
            break
        lean = min(adapted - keep, int(left // (extra_bytes(shape, "lean") * tokens)))
        if weights_again(shape, (keep, lean), adapted) < weights_again(shape, best, adapted):
            best = (keep, lean)
    return best


def extra_bytes(shape: ModelShape, level: str) -> float:
    """What a token costs in a block of this level beyond the block's input."""
    return kept_bytes(shape, level) - kept_bytes(shape, "again")


def weights_again(shape: ModelShape, levels: tuple[int, int], adapted: int) -> float:
    """Weights that are multiplied once more because something was not kept."""
    keep, lean = levels
    sizes = linear_sizes(shape)
    gate_up = sum(sizes[name][0] * sizes[name][1] for name in ("gate_proj", "up_proj") if name in sizes)
    down = sizes["down_proj"][0] * sizes["down_proj"][1] if "down_proj" in sizes else 0
    return lean * gate_up + (adapted - keep - lean) * (layer_parameters(shape) - down)


def keep_measured(tuning: Tuning, shape: ModelShape, *, measured_gib: float, adapted: int) -> Tuning:
    """The levels once more, from a step that was measured with every block starting from its input.

    What stands between the limit and the measured peak is what blocks may keep.
    """
    room = (tuning.limit_gib - measured_gib) * GIB / SLACK
    keep, lean = best_levels(shape, room, tokens=tuning.micro_tokens, adapted=adapted)
    return tuning.model_copy(update={"keep": keep, "lean": lean})


def describe_tuning(tuning: Tuning) -> str:
    """In a sentence, for plans and for the word at the start of a run."""
    form = {"whole": "16 bits", "eight": "8 bits, multiplied in 8 bits", "four": "4 bits (NF4)"}[tuning.form]
    where = ", the embedding on the host" if tuning.host_embedding else ""
    return (
        f"frozen weights in {form}{where}; {tuning.micro_tokens:,} tokens at a time; "
        f"{tuning.keep} blocks keep everything, {tuning.lean} all but the widest tensor; "
        f"{tuning.peak_gib:.1f} of {tuning.limit_gib:.1f} GiB"
    )
