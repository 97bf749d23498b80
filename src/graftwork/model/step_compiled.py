"""The pieces of a training step as memory where they are compiled. Pure.

In and out as in `step_block.py`, whose pieces these stand in for. A compiler leaves only what one
kernel hands to the next: products, and one result of everything that is done element by element
between them; each is let go after its last use, not at the end of a function.
"""

from typing import Any

from graftwork.model.step_pieces import HALF, WORD, free_all
from graftwork.model.step_sizes import LinearGroup, StepSizes, TensorMemory


def _weight(memory: TensorMemory, s: StepSizes, group: LinearGroup) -> list[Any]:
    """The frozen weight as numbers, where it is in four bits."""
    return [memory.alloc(HALF * group.weights)] if s.form == "four" else []


def _grafted(memory: TensorMemory, s: StepSizes, group: LinearGroup, tokens: int) -> tuple[Any, Any]:
    beside = _weight(memory, s, group)
    if s.form == "eight":
        beside = [memory.alloc(tokens * group.inputs), memory.alloc(WORD * tokens)]
    y = memory.alloc(HALF * tokens * group.out)
    free_all(memory, beside)
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
        beside = _weight(memory, s, group)
        if s.form == "eight":
            beside = [memory.alloc(tokens * group.out), memory.alloc(WORD * tokens)]
            beside += [] if s.turned else [memory.alloc(group.weights)]
        dx = memory.alloc(HALF * tokens * group.inputs)
        free_all(memory, beside)
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
    found = [memory.alloc(size) for size in group.gradient_bytes]
    free_all(memory, products)
    return found


def compiled_before_attention(memory: TensorMemory, s: StepSizes, tokens: int) -> tuple[list[Any], list[Any]]:
    normed = None if s.norms_behind else memory.alloc(HALF * tokens * s.hidden)
    qkv, low = _grafted(memory, s, s.qkv, tokens)
    if normed is not None:
        memory.free(normed)
    beside = [] if low is None else [low]
    if s.head_norms != "none":
        beside.append(memory.alloc(HALF * tokens * (s.q + s.kv)))
    found = [memory.alloc(HALF * tokens * width) for width in (s.q, s.kv, s.kv)]
    memory.free(qkv)
    return found, beside


def compiled_before_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, wants_input: bool
) -> tuple[Any, list[Any]]:
    dqkv = memory.alloc(HALF * tokens * s.qkv.out)
    held = [dqkv]
    if wants_input:
        dn, dlow = _turned(memory, s, s.qkv, tokens)
        held.append(dn)
    else:
        dlow = _thin(memory, s.qkv, tokens)
    if not s.norms_behind:
        held.append(memory.alloc(HALF * tokens * s.hidden))
    dx = memory.alloc(HALF * tokens * s.hidden) if wants_input else None
    gradient = _gradient(memory, s.qkv)
    free_all(memory, held + ([] if dlow is None else [dlow]))
    return dx, gradient


class Middle:
    """As `step_block.Kept` holds it."""

    def __init__(self, middle: Any, gate_up: Any, lows: list[Any], attended: list[Any]) -> None:
        self.middle, self.gate_up, self.lows, self.attended = middle, gate_up, lows, attended


def compiled_middle(memory: TensorMemory, s: StepSizes, tokens: int) -> Middle:
    attended, low_out = _grafted(memory, s, s.out, tokens)
    mid = memory.alloc(HALF * tokens * s.hidden)
    if not s.norms_behind:
        memory.free(attended)
    normed = None if s.norms_behind else memory.alloc(HALF * tokens * s.hidden)
    gate_up, low = _grafted(memory, s, s.gate_up, tokens)
    if normed is not None:
        memory.free(normed)
    lows = [one for one in (low_out, low) if one is not None]
    return Middle(mid, gate_up, lows, [attended] if s.norms_behind else [])


def compiled_mlp(memory: TensorMemory, s: StepSizes, tokens: int) -> Any:
    lifted = memory.alloc(HALF * tokens * s.inner)
    down, low = _grafted(memory, s, s.down, tokens)
    free_all(memory, [lifted] + ([] if low is None else [low]))
    return down


def compiled_after_attention_backward(
    memory: TensorMemory, s: StepSizes, tokens: int, *, has_gate_up: bool
) -> tuple[list[Any], list[Any]]:
    wide, inner = HALF * tokens * s.hidden, HALF * tokens * s.inner
    normed = None if s.norms_behind else memory.alloc(wide)
    gate_up = None
    if not has_gate_up:
        gate_up, low = _grafted(memory, s, s.gate_up, tokens)
        if low is not None:
            memory.free(low)
    d_added = memory.alloc(wide) if s.norms_behind else None
    d_lifted, d_low_down = _turned(memory, s, s.down, tokens)
    lifted, d_gate_up = memory.alloc(inner), memory.alloc(2 * inner)
    dn = None
    if s.form == "eight":
        codes = [memory.alloc(inner), memory.alloc(WORD * tokens)]
        free_all(memory, [d_lifted] + ([] if gate_up is None else [gate_up]))
        codes += [] if s.turned else [memory.alloc(s.gate_up.weights)]
        dn = memory.alloc(wide)
        free_all(memory, codes)
    else:
        free_all(memory, [d_lifted] + ([] if gate_up is None else [gate_up]))
    gradient = _gradient(memory, s.down)
    free_all(memory, [one for one in (lifted, d_low_down, d_added) if one is not None])
    dn, d_low = _turned(memory, s, s.gate_up, tokens, dn)
    gradient += _gradient(memory, s.gate_up)
    free_all(memory, [one for one in (d_gate_up, d_low, normed) if one is not None])
    d_middle = memory.alloc(wide)
    memory.free(dn)
    d_attended = memory.alloc(wide) if s.norms_behind else None
    d_mixed, d_low_out = _turned(memory, s, s.out, tokens)
    gradient += _gradient(memory, s.out)
    free_all(memory, [one for one in (d_attended, d_low_out) if one is not None])
    return [d_mixed, d_middle], gradient


def chunk_loss(memory: TensorMemory, s: StepSizes, places: int) -> Any:
    logits = memory.alloc(HALF * places * s.vocabulary)
    if s.head == "eight":
        # The gradient times the rows' scales is written out once: its largest must be known first.
        wide = memory.alloc(WORD * places * s.vocabulary)
        codes = [memory.alloc(places * s.vocabulary), memory.alloc(WORD * places)]
        free_all(memory, [wide, logits])
        codes += [] if s.turned else [memory.alloc(s.vocabulary * s.hidden)]
    else:
        codes = [memory.alloc(HALF * places * s.vocabulary)]
        memory.free(logits)
    dh = memory.alloc(HALF * places * s.hidden)
    free_all(memory, codes)
    return dh
