"""The allocations of graft's own step on a GPU: loading, blocks, loss, gradients, update. Pure.

Input: something that gives memory, a decoder's shape, a tuning. Output: the same allocations, in the same
order, that `train/gpu` makes. The caller counts them or replays them through the allocator. A block mirrors
`train/gpu/block.py` and the order in which `train/gpu/decoder.py` calls it: a tensor lives as long as a name
holds it. Where it is compiled, only what one kernel hands to the next is allocated, and freed after its last
use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graftwork.costmodel import gpu_tensors as pieces
from graftwork.costmodel.gpu_tensors import (
    HALF,
    WORD,
    ByteTally,
    LinearGroup,
    StepSizes,
    TensorMemory,
    follow,
    free_all,
    sizes_of,
)
from graftwork.costmodel.run import round_places
from graftwork.records.base import MIB
from graftwork.records.plan import ModelShape, Tuning


@dataclass
class SavedActivationBytes:
    """Tensors that the second half of a block saves for its backward pass."""

    middle: Any
    gate_up: Any
    lows: list[Any]
    normed_after: list[Any] = field(default_factory=list)

    def blocks(self) -> list[Any]:
        """In the order in which a tuple releases them: last first."""
        return [*self.normed_after[::-1], *self.lows[::-1], self.gate_up, self.middle]


def _weight(memory: TensorMemory, s: StepSizes, group: LinearGroup) -> list[Any]:
    """Dequantize the frozen weight if it is in 4 bits."""
    return [memory.alloc(HALF * group.weights)] if s.form == "four" else []


def _grafted(memory: TensorMemory, s: StepSizes, group: LinearGroup, tokens: int) -> tuple[Any, Any]:
    extra = _weight(memory, s, group)
    if s.form == "eight":
        extra = [memory.alloc(tokens * group.inputs), memory.alloc(WORD * tokens)]
    y = memory.alloc(HALF * tokens * group.out)
    free_all(memory, extra)
    if not group.rank:
        return y, None
    a = memory.alloc(HALF * group.ranks * group.inputs)
    low = memory.alloc(HALF * tokens * group.ranks)
    memory.free(a)
    memory.free(memory.alloc(HALF * group.ranks * group.out))
    return y, low


def _turned(
    memory: TensorMemory, s: StepSizes, group: LinearGroup, tokens: int, base: Any = None
) -> tuple[Any, Any]:
    dx = base
    if dx is None:
        extra = _weight(memory, s, group)
        if s.form == "eight":
            extra = [memory.alloc(tokens * group.out), memory.alloc(WORD * tokens)]
            extra += [] if s.turned else [memory.alloc(group.weights)]
        dx = memory.alloc(HALF * tokens * group.inputs)
        free_all(memory, extra)
    return dx, _thin(memory, group, tokens)


def _thin(memory: TensorMemory, group: LinearGroup, tokens: int) -> Any:
    if not group.rank:
        return None
    b = memory.alloc(HALF * group.ranks * group.out)
    dlow = memory.alloc(HALF * tokens * group.ranks)
    memory.free(b)
    memory.free(memory.alloc(HALF * group.ranks * group.inputs))
    return dlow


def _gradient(memory: TensorMemory, group: LinearGroup) -> list[Any]:
    if not group.rank:
        return []
    products = [memory.alloc(HALF * group.ranks * width) for width in (group.inputs, group.out)]
    gradients = [memory.alloc(size) for size in group.gradient_bytes]
    free_all(memory, products)
    return gradients


def compiled_before_attention(memory: TensorMemory, s: StepSizes, tokens: int) -> tuple[list[Any], list[Any]]:
    normed = memory.alloc(HALF * tokens * s.hidden) if s.norms_before else None
    qkv, low = _grafted(memory, s, s.qkv, tokens)
    free_all(memory, [normed])
    extra = [] if low is None else [low]
    if s.head_norms != "none":
        extra.append(memory.alloc(HALF * tokens * (s.q + s.kv)))
    heads = [memory.alloc(HALF * tokens * width) for width in (s.q, s.kv, s.kv)]
    memory.free(qkv)
    return heads, extra


def compiled_before_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, wants_input: bool
) -> tuple[Any, list[Any]]:
    dqkv = memory.alloc(HALF * tokens * s.qkv.out)
    temporaries = [dqkv]
    if wants_input:
        dn, dlow = _turned(memory, s, s.qkv, tokens)
        temporaries.append(dn)
    else:
        dlow = _thin(memory, s.qkv, tokens)
    if s.norms_before:
        temporaries.append(memory.alloc(HALF * tokens * s.hidden))
    dx = memory.alloc(HALF * tokens * s.hidden) if wants_input else None
    gradient = _gradient(memory, s.qkv)
    free_all(memory, [*temporaries, dlow])
    return dx, gradient


def compiled_middle(memory: TensorMemory, s: StepSizes, tokens: int) -> SavedActivationBytes:
    attended, low_out = _grafted(memory, s, s.out, tokens)
    mid = memory.alloc(HALF * tokens * s.hidden)
    if not s.norms_after:
        memory.free(attended)
    normed = memory.alloc(HALF * tokens * s.hidden) if s.norms_before else None
    gate_up, low = _grafted(memory, s, s.gate_up, tokens)
    free_all(memory, [normed])
    lows = [low_out, low]
    return SavedActivationBytes(mid, gate_up, lows, [attended] if s.norms_after else [])


def compiled_after_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, has_gate_up: bool
) -> tuple[list[Any], list[Any]]:
    wide, inner = HALF * tokens * s.hidden, HALF * tokens * s.inner
    normed = memory.alloc(wide) if s.norms_before else None
    gate_up = None
    if not has_gate_up:
        gate_up, low = _grafted(memory, s, s.gate_up, tokens)
        free_all(memory, [low])
    d_added = memory.alloc(wide) if s.changes_output else None
    d_lifted, d_low_down = _turned(memory, s, s.down, tokens)
    lifted, d_gate_up = memory.alloc(inner), memory.alloc(HALF * tokens * s.gate_up.out)
    dn = None
    if s.form == "eight":
        codes = [memory.alloc(tokens * s.gate_up.out // 2), memory.alloc(WORD * tokens)]
        free_all(memory, [d_lifted, gate_up])
        codes += [] if s.turned else [memory.alloc(s.gate_up.weights)]
        dn = memory.alloc(wide)
        free_all(memory, codes)
    else:
        free_all(memory, [d_lifted, gate_up])
    gradient = _gradient(memory, s.down)
    free_all(memory, [lifted, d_low_down, d_added])
    dn, d_low = _turned(memory, s, s.gate_up, tokens, dn)
    gradient += _gradient(memory, s.gate_up)
    free_all(memory, [d_gate_up, d_low, normed])
    d_middle = memory.alloc(wide)
    memory.free(dn)
    d_attended = memory.alloc(wide) if s.changes_output else None
    d_mixed, d_low_out = _turned(memory, s, s.out, tokens)
    gradient += _gradient(memory, s.out)
    free_all(memory, [d_attended, d_low_out])
    return [d_mixed, d_middle], gradient


Level = Literal["keep", "lean", "again"]

SHOWN = 3
"""Chunks that are replayed tensor by tensor; the others allocate the same."""


@dataclass
class SavedBlock:
    """Tensors that one block saves between the passes."""

    x: Any
    """The block's input; None if another tensor keeps it alive longer."""
    island: list[Any] = field(default_factory=list)
    """Queries, keys, values, attention output, row sums."""
    extra: list[Any] = field(default_factory=list)
    """The thin product, and heads before their norm."""
    kept: SavedActivationBytes | None = None


def _norm_if(memory: TensorMemory, s: StepSizes, tokens: int, present: bool) -> Any:
    """Norm of the hidden state, if the block has one."""
    if present and s.layout.norm == "layer":
        return pieces.layer_norm(memory, tokens * s.hidden, tokens)
    return pieces.norm(memory, tokens * s.hidden) if present else None


def _norm_backward(memory: TensorMemory, s: StepSizes, tokens: int) -> Any:
    if s.layout.norm == "layer":
        return pieces.layer_norm(memory, tokens * s.hidden, tokens, keeps=True)
    return pieces.norm(memory, tokens * s.hidden)


def before_attention(memory: TensorMemory, s: StepSizes, tokens: int) -> tuple[list[Any], list[Any]]:
    """Queries, keys, values; and what else is saved."""
    if s.compiled:
        return compiled_before_attention(memory, s, tokens)
    normed = _norm_if(memory, s, tokens, s.norms_before)
    qkv, low = pieces.grafted_product(memory, s, s.qkv, tokens)
    free_all(memory, [normed])
    extra = [] if low is None else [low]
    heads = []
    if s.head_norms != "none":
        extra.append(memory.alloc(HALF * tokens * (s.q + s.kv)))
        heads = [pieces.norm(memory, tokens * width) for width in (s.q, s.kv)]
    if s.layout.interleaved:
        heads += [memory.alloc(HALF * tokens * width) for width in (s.q, s.kv)]
    qkv_heads = [memory.alloc(HALF * tokens * width) for width in (s.q, s.kv, s.kv)]
    free_all(memory, [*heads, qkv])
    return qkv_heads, extra


def before_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, wants_input: bool
) -> tuple[Any, list[Any]]:
    """The gradient of the block's input, and of its adapters."""
    if s.compiled:
        return compiled_before_attention_backward(memory, s, tokens, wants_input=wants_input)
    temporaries = [memory.alloc(HALF * tokens * s.qkv.out)]
    if s.head_norms != "none":
        temporaries += [pieces.norm(memory, tokens * width) for width in (s.q, s.kv)]
        rotated, together = temporaries[0], memory.alloc(HALF * tokens * s.qkv.out)
        memory.free(rotated)
        temporaries = [*temporaries[1:], together]
    if s.layout.interleaved:
        parts = [memory.alloc(HALF * tokens * width) for width in (s.q, s.kv)]
        together = memory.alloc(HALF * tokens * s.qkv.out)
        free_all(memory, [*parts, temporaries.pop()])
        temporaries.append(together)
    normed = _norm_if(memory, s, tokens, s.norms_before)
    temporaries += [] if normed is None else [normed]
    dx = None
    if wants_input:
        dn, dlow = pieces.input_gradient(memory, s, s.qkv, tokens)
        dx = _norm_backward(memory, s, tokens)
        temporaries.append(dn)
    else:
        dlow = memory.alloc(HALF * tokens * s.qkv.ranks) if s.qkv.rank else None
    free_all(memory, [*temporaries, dlow])
    return dx, []


def middle(memory: TensorMemory, s: StepSizes, tokens: int) -> tuple[SavedActivationBytes, Any]:
    """The output product and the first half of the MLP, and the sum that the MLP is added to."""
    if s.compiled:
        return compiled_middle(memory, s, tokens), None
    attended, low_out = pieces.grafted_product(memory, s, s.out, tokens)
    normed_out = _norm_if(memory, s, tokens, s.norms_after)
    mid = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [normed_out])
    normed = _norm_if(memory, s, tokens, s.norms_before)
    gate_up, low = pieces.grafted_product(memory, s, s.gate_up, tokens)
    free_all(memory, [normed])
    lows = [low_out, low]
    # Where attention and MLP read one input, that is the middle, and nothing more is kept.
    saved = SavedActivationBytes(None if s.layout.parallel else mid, gate_up, lows)
    if s.norms_after:
        saved.normed_after.append(attended)
    else:
        memory.free(attended)
    return saved, mid if s.layout.parallel else None


def mlp_output(memory: TensorMemory, s: StepSizes, tokens: int) -> Any:
    lifted = memory.alloc(HALF * tokens * s.inner)
    product = _grafted if s.compiled else pieces.grafted_product
    down, low = product(memory, s, s.down, tokens)
    free_all(memory, [lifted, low])
    return down


def after_attention(memory: TensorMemory, s: StepSizes, tokens: int) -> tuple[Any, SavedActivationBytes]:
    saved, start = middle(memory, s, tokens)
    last = mlp_output(memory, s, tokens)
    normed = _norm_if(memory, s, tokens, s.norms_after and not s.compiled)
    y = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [normed, start])
    if s.norms_after:
        saved.normed_after.append(last)
    else:
        memory.free(last)
    return y, saved


def recompute_saved(memory: TensorMemory, s: StepSizes, tokens: int) -> SavedActivationBytes:
    saved, start = middle(memory, s, tokens)
    free_all(memory, [start])
    if s.norms_after:
        saved.normed_after.append(mlp_output(memory, s, tokens))
    return saved


def after_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, has_gate_up: bool
) -> tuple[list[Any], list[Any]]:
    """Gradients of the attention output and of the middle, and those of the adapters."""
    if s.compiled:
        return compiled_after_attention_backward(memory, s, tokens, has_gate_up=has_gate_up)
    temporaries: list[Any] = []
    if s.norms_before:
        temporaries.append(_norm_if(memory, s, tokens, True))
    if not has_gate_up:
        temporaries += pieces.grafted_product(memory, s, s.gate_up, tokens)
    if s.changes_output:
        temporaries.append(memory.alloc(HALF * tokens * s.hidden))
    temporaries += pieces.input_gradient(memory, s, s.down, tokens)
    dn = None
    if not s.has_gate_kernel:
        recipe = pieces.OTHER_GATE_BACKWARD if s.layout.gated else pieces.UNGATED_BACKWARD
        temporaries += follow(memory, recipe, tokens * s.inner).values()
    elif s.form == "eight":
        temporaries += [memory.alloc(HALF * tokens * s.inner), memory.alloc(2 * HALF * tokens * s.inner)]
        codes = memory.alloc(2 * tokens * s.inner)
        dn = pieces.codes_turned(memory, tokens, 2 * s.inner, s.hidden, codes, turned=s.turned)
    else:
        temporaries += follow(memory, pieces.GATE_BACKWARD, tokens * s.inner).values()
    if s.down.rank:
        temporaries.append(memory.alloc(HALF * tokens * s.down.ranks))
    temporaries += pieces.input_gradient(memory, s, s.gate_up, tokens, dn)
    d_middle = _norm_backward(memory, s, tokens)
    if s.changes_output:
        temporaries.append(memory.alloc(HALF * tokens * s.hidden))
    d_mixed, dlow = pieces.input_gradient(memory, s, s.out, tokens)
    free_all(memory, [*temporaries, dlow])
    return [d_mixed, d_middle], []


def pass_through(memory: TensorMemory, s: StepSizes, tokens: int, chunk: int) -> Any:
    """Forward through a block that saves nothing."""
    qkv, extra = before_attention(memory, s, tokens)
    if s.qkv.rank and extra:
        memory.free(extra.pop(0))
    mixed = pieces.attend(memory, s, tokens)
    free_all(memory, [*qkv, *mixed[1:]])
    parts = []
    for index, chunk_tokens in enumerate(sizes_of_chunks := chunks(tokens, chunk)):
        if is_like_others(index, len(sizes_of_chunks)):
            parts.append(memory.alloc(HALF * chunk_tokens * s.hidden))
            continue
        y, saved = after_attention(memory, s, chunk_tokens)
        free_all(memory, saved.blocks())
        parts.append(y)
    if len(parts) == 1:
        free_all(memory, [*extra, mixed[0]])
        return parts[0]
    whole = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [*extra, mixed[0], *parts])
    return whole


def forward(
    memory: TensorMemory, s: StepSizes, tokens: int, chunk: int, level: Level, x: Any
) -> tuple[Any, SavedBlock]:
    if level == "again":
        return pass_through(memory, s, tokens, chunk), SavedBlock(x)
    qkv, extra = before_attention(memory, s, tokens)
    island = [*qkv, *pieces.attend(memory, s, tokens)]
    y, saved = after_attention(memory, s, tokens)
    if level == "lean":
        memory.free(saved.gate_up)
        saved.gate_up = None
    return y, SavedBlock(x, island, extra, saved)


def backward(
    memory: TensorMemory, s: StepSizes, tokens: int, chunk: int, block: SavedBlock, *, wants_input: bool
) -> tuple[Any, list[Any]]:
    """Return the gradient of the block's input and of its adapters; frees what the block saved."""
    saved = block.kept
    island, extra = block.island, block.extra
    if saved is None:
        island, extra = before_attention(memory, s, tokens)
        island = [*island, *pieces.attend(memory, s, tokens)]
    if saved is not None and saved.gate_up is not None:
        between, gradients_after = after_attention_backward(memory, s, tokens, has_gate_up=True)
    else:
        between, gradients_after = _in_chunks(memory, s, tokens, chunk, again=saved is None)
    gradients = pieces.attend_backward(memory, s, tokens, island.pop())
    values = [*island[2::-1], island[3]]
    if saved is None:
        # What was computed again is held by names of this pass alone, which it deletes.
        free_all(memory, values)
    memory.free(between[0])
    dx, gradients_before = before_attention_backward(memory, s, tokens, wants_input=wants_input)
    if saved is not None:
        # What was kept is held by the caller until the block is done.
        free_all(memory, [*saved.blocks(), *values])
    x = [] if block.x is None else [block.x]
    free_all(memory, [*x, *extra, between[1], *gradients[::-1]])
    return dx, [*gradients_after, *gradients_before]


def _in_chunks(
    memory: TensorMemory, s: StepSizes, tokens: int, chunk: int, *, again: bool
) -> tuple[list[Any], list[Any]]:
    """The second half in chunks, if its widest tensors were not saved."""
    parts, gradients = [], []
    last: SavedActivationBytes | None = None
    for index, chunk_tokens in enumerate(sizes_of_chunks := chunks(tokens, chunk)):
        if is_like_others(index, len(sizes_of_chunks)):
            parts.append([memory.alloc(HALF * chunk_tokens * width) for width in (s.q, s.hidden)])
            if s.compiled:
                gradients += [
                    memory.alloc(size) for g in (s.out, s.gate_up, s.down) for size in g.gradient_bytes
                ]
            continue
        if again:
            # The last chunk's is freed only when the name is rebound.
            saved = recompute_saved(memory, s, chunk_tokens)
            if last is not None:
                free_all(memory, last.blocks())
            last = saved
        pair, gradient = after_attention_backward(memory, s, chunk_tokens, has_gate_up=again)
        parts.append(pair)
        gradients += gradient
    if len(parts) > 1:
        whole = [memory.alloc(HALF * tokens * s.q), memory.alloc(HALF * tokens * s.hidden)]
        for pair in parts:
            free_all(memory, pair)
    else:
        whole = parts[0]
    if last is not None:
        free_all(memory, last.blocks())
    return whole, gradients


def chunks(tokens: int, size: int) -> list[int]:
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def is_like_others(index: int, count: int) -> bool:
    """Return whether a chunk is neither one of the first nor the last: only its results need to be
    counted.
    """
    return SHOWN <= index < count - 1


def compute_loss(memory: TensorMemory, s: StepSizes, tokens: int, places: int, head_tokens: int) -> Any:
    """Compute the loss at the positions that predict; leaves the gradient of the last block's output."""
    dx = memory.alloc(HALF * tokens * s.hidden)
    last: list[Any] = []
    for chunk_tokens in chunks(places, head_tokens)[:SHOWN]:
        # Each name holds what the last chunk left until it is rebound.
        wide = chunk_tokens * s.hidden
        hidden = memory.alloc(HALF * wide)
        free_all(memory, last[:1])
        normed = memory.alloc(HALF * wide) if s.compiled else pieces.norm(memory, wide)
        free_all(memory, last[1:2])
        dh = _chunk_loss(memory, s, chunk_tokens)
        free_all(memory, last[2:])
        scaled = memory.alloc(HALF * wide)
        d = memory.alloc(HALF * wide) if s.compiled else pieces.norm(memory, wide)
        free_all(memory, [dh, scaled])
        last = [hidden, normed, d]
    free_all(memory, last)
    return dx


def _chunk_loss(memory: TensorMemory, s: StepSizes, tokens: int) -> Any:
    """Logits become their gradient in place."""
    codes = follow(memory, pieces.CODES, tokens * s.hidden)["out"] if s.head == "eight" else None
    logits = memory.alloc(HALF * tokens * s.vocabulary)
    free_all(memory, [codes])
    losses = memory.alloc(WORD * tokens)
    if s.head == "eight":
        dh = pieces.eight_turned(memory, tokens, s.vocabulary, s.hidden, turned=s.turned)
    else:
        dh = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [losses, logits])
    return dh


NF4_BLOCK, NF4_CHUNK = 64, 256
AT_ONCE = 2**24
"""Elements that are quantized to eight or four bits at once."""


def load(
    memory: TensorMemory,
    s: StepSizes,
    *,
    layers: int,
    tied: bool,
    on_host: bool,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Load all frozen weights in order; `note` is called with each one. `tied`: the head is the embedding;
    `on_host`: the embedding is not loaded.
    """
    table = s.vocabulary * s.hidden
    # A tally counts one of the blocks: they are alike.
    tally = memory if isinstance(memory, ByteTally) else None
    for _ in range(min(layers, 1) if tally else layers):
        before = tally.now if tally else 0
        for group in s.groups:
            load_group(memory, group, form=s.form, turned=s.turned)
    if tally is not None and layers > 1:
        other_layers = (tally.now - before) * (layers - 1)
        tally.now += other_layers
        # The temporaries of the last block, on top of all that stays.
        tally.most += other_layers
    note("weights")
    if s.head == "eight":
        load_eight(memory, (s.vocabulary,), s.hidden, turned=s.turned)
    elif tied and on_host:
        memory.alloc(HALF * table)
    note("head")
    if not on_host:
        memory.alloc(HALF * table)
    note("embedding")
    load_norms(memory, s, layers)
    note("norms")
    if s.head == "whole" and not tied:
        memory.alloc(HALF * table)
    note("head")


def load_norms(memory: TensorMemory, s: StepSizes, layers: int) -> None:
    """Load the norms of the blocks, the final norm, and the rotary frequencies."""
    for _ in range(layers):
        if s.head_norms != "none":
            for width in (s.q, s.kv) if s.head_norms == "all" else (s.head_dim, s.head_dim):
                _load_norm(memory, s, width)
        for _ in range(s.norms):
            _load_norm(memory, s, s.hidden)
    _load_norm(memory, s, s.hidden)
    for _ in range(2):
        memory.alloc(HALF * s.head_dim)


def _load_norm(memory: TensorMemory, s: StepSizes, width: int) -> None:
    memory.alloc(HALF * width)
    if s.norm_bias:
        memory.alloc(HALF * width)
    if s.layout.norm == "rms_plus_one":
        memory.alloc(WORD * width)


def load_group(memory: TensorMemory, group: LinearGroup, *, form: str, turned: bool) -> None:
    """The weights of one product."""
    if form == "four":
        for out in group.outs:
            _load_four(memory, out, group.inputs)
            if group.bias:
                memory.alloc(HALF * out)
        if group.bias:
            memory.alloc(HALF * group.out)
        memory.alloc(WORD * 16)
    elif form == "eight":
        bias = HALF * group.out if group.bias else 0
        load_eight(memory, group.outs, group.inputs, turned=turned, bias=bias)
    else:
        memory.alloc(HALF * group.weights)
        if group.bias:
            memory.alloc(HALF * group.out)


def load_eight(
    memory: TensorMemory, outs: Sequence[int], inputs: int, *, turned: bool, bias: int = 0
) -> None:
    """A weight in 8 bits, some rows at a time; the last rows stay referenced until the next are there."""
    weights = sum(outs) * inputs
    if bias:
        memory.alloc(bias)
    memory.alloc(weights)
    memory.alloc(WORD * sum(outs))
    last_chunk: list[Any] = []
    rows = max(1, AT_ONCE // inputs)
    for count in (min(rows, out - start) for out in outs for start in range(0, out, rows)):
        half, wide = memory.alloc(HALF * count * inputs), memory.alloc(WORD * count * inputs)
        memory.free(half)
        _let_go(memory, last_chunk, "wide")
        sizes = memory.alloc(WORD * count * inputs)
        row_scales = memory.alloc(WORD * count)
        memory.free(sizes)
        _let_go(memory, last_chunk, "row_scales")
        last_chunk = [("wide", wide), ("row_scales", row_scales)]
    free_all(memory, [block for _, block in last_chunk])
    if turned:
        memory.alloc(weights)


def _load_four(memory: TensorMemory, out: int, inputs: int) -> None:
    """A weight in 4 bits, some rows at a time; the last rows stay referenced until the next are there."""
    weights = out * inputs
    scales = WORD * weights // NF4_BLOCK
    weight = memory.alloc(HALF * weights)
    small = [memory.alloc(WORD * 16), memory.alloc(WORD * 15)]
    memory.alloc(weights // 2)
    every = memory.alloc(scales)
    last_chunk: list[Any] = []
    rows = max(1, AT_ONCE // inputs)
    for start in range(0, out, rows):
        elements = min(rows, out - start) * inputs
        wide = memory.alloc(WORD * elements)
        _let_go(memory, last_chunk, "wide")
        sizes = memory.alloc(WORD * elements)
        largest = memory.alloc(WORD * elements // NF4_BLOCK)
        memory.free(sizes)
        _let_go(memory, last_chunk, "largest")
        least = memory.alloc(WORD * elements // NF4_BLOCK)
        unit = memory.alloc(WORD * elements)
        memory.free(least)
        _let_go(memory, last_chunk, "unit")
        indices = memory.alloc(WORD * elements)
        nearest = memory.alloc(elements)
        memory.free(indices)
        _let_go(memory, last_chunk, "nearest")
        high = memory.alloc(elements // 2)
        pair = memory.alloc(elements // 2)
        free_all(memory, [high, pair])
        last_chunk = [("wide", wide), ("largest", largest), ("unit", unit), ("nearest", nearest)]
    free_all(memory, [block for _, block in last_chunk])
    _load_scales(memory, weights // NF4_BLOCK)
    free_all(memory, [*small, every, weight])


def _let_go(memory: TensorMemory, blocks: list[Any], name: str) -> None:
    for index, (of, block) in enumerate(blocks):
        if of == name:
            memory.free(block)
            del blocks[index]
            return


def _load_scales(memory: TensorMemory, scales: int) -> None:
    """The scales of blocks in 8 bits: their codes, a scale for each chunk, the offset."""
    chunks = -(-scales // NF4_CHUNK)
    memory.alloc(WORD)
    flat = memory.alloc(WORD * scales)
    padded = memory.alloc(WORD * chunks * NF4_CHUNK)
    sizes = memory.alloc(WORD * chunks * NF4_CHUNK)
    largest = memory.alloc(WORD * chunks)
    memory.free(sizes)
    memory.alloc(WORD * chunks)
    memory.free(largest)
    least = memory.alloc(WORD * chunks)
    divided = memory.alloc(WORD * chunks * NF4_CHUNK)
    memory.free(least)
    memory.alloc(chunks * NF4_CHUNK)
    free_all(memory, [divided, flat, padded])


WORKSPACE = 32 * MIB
"""Workspace of cuBLAS on a Hopper GPU; 8 MiB on others."""

ID_BYTES = 8
"""Bytes of a token id."""


@dataclass(frozen=True)
class StepRecipe:
    """The sizes of one step."""

    shape: ModelShape
    tuning: Tuning
    sizes: StepSizes
    adapted: int
    trainable: int
    places: int

    @property
    def levels(self) -> list[Level]:
        """Adapted blocks, bottom up."""
        recomputed = max(self.adapted - self.tuning.keep - self.tuning.lean, 0)
        levels: list[Level] = ["again"] * recomputed
        levels += ["lean"] * self.tuning.lean
        levels += ["keep"] * self.tuning.keep
        return levels[len(levels) - self.adapted :]


def step_recipe(
    shape: ModelShape,
    tuning: Tuning,
    *,
    trainable: int,
    adapted: int,
    places: int | None = None,
    even: bool = True,
) -> StepRecipe:
    """Make the recipe of a step. `places`: positions of one pass that predict; all of them by default."""
    sizes = sizes_of(shape, tuning, trainable=trainable, adapted=adapted, even=even)
    rounded = round_places(places or tuning.micro_tokens, head_tokens=tuning.head_tokens)
    return StepRecipe(shape, tuning, sizes, adapted, trainable, rounded)


def adapter_sizes(s: StepSizes, blocks: int) -> list[int]:
    """Bytes of each learned tensor, in float32."""
    return [size for group in s.groups for size in group.gradient_bytes] * blocks


def hold_stacks(memory: TensorMemory, s: StepSizes, blocks: int) -> None:
    """Allocate the stacked copies of the adapters that a step uses unless it is compiled."""
    groups = [] if s.compiled else list(s.groups) * blocks
    for group in groups:
        pieces.hold_stacks(memory, group)


def hold_states(memory: TensorMemory, s: StepSizes, blocks: int) -> None:
    """Allocate Adam's states: two for each trained tensor, and the step count."""
    for size in adapter_sizes(s, blocks):
        memory.alloc(WORD)
        memory.alloc(size)
        memory.alloc(size)


class Pass:
    """One forward and backward pass, piece by piece, so that a counter can read the peak in between."""

    def __init__(self, memory: TensorMemory, walk: StepRecipe) -> None:
        self.memory, self.walk = memory, walk
        self.gradients: list[Any] = []
        self.saved_blocks: list[SavedBlock] = []
        self.batch: list[Any] = []
        self.x: Any = None

    def begin(self) -> None:
        """The batch, its embedding and its positions."""
        tokens, s = self.walk.tuning.micro_tokens, self.walk.sizes
        alloc, free = self.memory.alloc, self.memory.free
        self.batch = [alloc(_number_bytes(self.walk)), alloc(WORD), alloc(WORD)]
        self.x = alloc(HALF * tokens * s.hidden)
        # Positions, angles, angles of both halves; then cosines and sines, each scaled.
        wide = [
            alloc(WORD * tokens),
            alloc(WORD * tokens * s.head_dim // 2),
            alloc(WORD * tokens * s.head_dim),
        ]
        for _ in range(2):
            plain = alloc(WORD * tokens * s.head_dim)
            wide.append(alloc(WORD * tokens * s.head_dim))
            free(plain)
        turns = [alloc(HALF * tokens * s.head_dim) for _ in range(2)]
        free_all(self.memory, wide)
        self.batch += [*turns, self.x]

    def forward(self, level: Level | None) -> None:
        """Run one block forward; no level means that it is below all adapters."""
        tuning, first = self.walk.tuning, self.x is self.batch[-1]
        # The first input is held by the call itself, to the end.
        x = None if first else self.x
        y, saved = forward(
            self.memory, self.walk.sizes, tuning.micro_tokens, tuning.chunk_tokens, level or "again", x
        )
        if level is not None:
            self.saved_blocks.append(saved)
        elif not first:
            self.memory.free(self.x)
        self.x = y

    def compute_loss(self) -> None:
        tuning = self.walk.tuning
        dx = compute_loss(
            self.memory, self.walk.sizes, tuning.micro_tokens, self.walk.places, tuning.head_tokens
        )
        self.memory.free(self.x)
        self.x = dx

    def backward(self) -> None:
        """Run the topmost remaining block backward."""
        tuning, saved = self.walk.tuning, self.saved_blocks.pop()
        dx, gradients = backward(
            self.memory,
            self.walk.sizes,
            tuning.micro_tokens,
            tuning.chunk_tokens,
            saved,
            wants_input=bool(self.saved_blocks),
        )
        self.memory.free(self.x)
        self.x = dx
        self.gradients += gradients

    def end(self, *, keep_gradients: bool) -> None:
        """Gradients become those of the adapters, or are added to them."""
        sizes = adapter_sizes(self.walk.sizes, self.walk.adapted)
        if keep_gradients and not self.walk.sizes.compiled:
            for size in sizes:
                self.memory.alloc(size)
        free_all(self.memory, self.batch)
        free_all(self.memory, self.gradients if not keep_gradients else self.gradients[len(sizes) :])


def hold_recording(memory: TensorMemory, walk: StepRecipe) -> None:
    """Allocate what a recorded pass reads from: a batch of its own, and the workspace of its products."""
    for size in (_number_bytes(walk), HALF * walk.tuning.micro_tokens * walk.sizes.hidden, WORD, WORKSPACE):
        memory.alloc(size)


def _number_bytes(walk: StepRecipe) -> int:
    """Bytes of tokens, positions, prediction positions and targets, in one tensor; document bounds are
    few.
    """
    return 2 * ID_BYTES * (walk.tuning.micro_tokens + walk.places)


def take_pass(memory: TensorMemory, walk: StepRecipe, *, keep_gradients: bool) -> None:
    """Run a whole pass: with `keep_gradients` the first one, whose gradients stay allocated."""
    step_pass = Pass(memory, walk)
    step_pass.begin()
    for _ in range(walk.shape.layers - walk.adapted):
        step_pass.forward(None)
    for level in walk.levels:
        step_pass.forward(level)
    step_pass.compute_loss()
    for _ in range(walk.adapted):
        step_pass.backward()
    step_pass.end(keep_gradients=keep_gradients)
