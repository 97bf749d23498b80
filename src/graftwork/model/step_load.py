"""The way of frozen weights onto a card as memory: what stays, and what was there beside it on the way. Pure.

In: something that gives memory, sizes. Out: nothing; what stays is never given back. Mirrors
`train/gpu/load.py`: what passes leaves holes between what stays, and no pass fills them all.
"""

from collections.abc import Callable
from typing import Any

from graftwork.model.step_pieces import HALF, WORD, follow, free_all
from graftwork.model.step_sizes import Group, Memory, Sizes, Tally

TO_EIGHT = "wide+4 scaled+4 wide- cut+4 scaled- codes+1 cut-"
NF4_BLOCK, NF4_CHUNK = 64, 256
AT_ONCE = 2**24
"""Elements that are put into four bits in one go."""


def load(
    memory: Memory,
    s: Sizes,
    *,
    layers: int,
    tied: bool,
    on_host: bool,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """All that is frozen, in the order in which it comes; `note` is told what has just come.

    `tied`: the head is the embedding; `on_host`: the embedding does not come at all.
    """
    table = s.vocabulary * s.hidden
    _load_blocks(memory, s, layers)
    note("weights")
    if s.head == "eight":
        load_eight(memory, s.vocabulary, s.hidden, turned=s.turned)
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


def _load_blocks(memory: Memory, s: Sizes, layers: int) -> None:
    """The products of all blocks. A tally is told once what each of them adds: they are alike."""
    walked = min(layers, 1) if isinstance(memory, Tally) else layers
    for _ in range(walked):
        before = memory.now if isinstance(memory, Tally) else 0
        for group in s.groups:
            load_group(memory, group, form=s.form, turned=s.turned)
    if isinstance(memory, Tally) and layers > 1:
        more = (memory.now - before) * (layers - 1)
        memory.now += more
        # What passes beside the last block, on top of all that stays.
        memory.most += more


def load_norms(memory: Memory, s: Sizes, layers: int) -> None:
    """Of the blocks, the last one, and the frequencies of rotary positions."""
    for _ in range(layers):
        if s.head_norms != "none":
            for width in (s.q, s.kv) if s.head_norms == "all" else (s.head_dim, s.head_dim):
                memory.alloc(HALF * width)
        for _ in range(2):
            memory.alloc(HALF * s.hidden)
    memory.alloc(HALF * s.hidden)
    for _ in range(2):
        memory.alloc(HALF * s.head_dim)


def load_group(memory: Memory, group: Group, *, form: str, turned: bool) -> None:
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
        load_eight(memory, group.out, group.inputs, turned=turned, bias=bias)
    else:
        memory.alloc(HALF * group.weights)
        if group.bias:
            memory.alloc(HALF * group.out)


def load_eight(memory: Memory, out: int, inputs: int, *, turned: bool, bias: int = 0) -> None:
    """A weight in 8 bits; it comes in 16 and passes through 32."""
    weights = out * inputs
    weight = memory.alloc(HALF * weights)
    if bias:
        memory.alloc(bias)
    sizes = memory.alloc(HALF * weights)
    rows = memory.alloc(HALF * out)
    memory.free(sizes)
    wide = memory.alloc(WORD * out)
    memory.free(rows)
    divided = memory.alloc(WORD * out)
    memory.free(wide)
    memory.alloc(WORD * out)
    memory.free(divided)
    follow(memory, TO_EIGHT, weights)
    if turned:
        memory.alloc(weights)
    memory.free(weight)


def _load_four(memory: Memory, out: int, inputs: int) -> None:
    """A weight in 4 bits, some rows at a time; a name holds the last rows until the next are there."""
    weights = out * inputs
    scales = WORD * weights // NF4_BLOCK
    weight = memory.alloc(HALF * weights)
    small = [memory.alloc(WORD * 16), memory.alloc(WORD * 15)]
    memory.alloc(weights // 2)
    every = memory.alloc(scales)
    held: list[Any] = []
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, out, rows):
        some = min(rows, out - begin) * inputs
        wide = memory.alloc(WORD * some)
        _let_go(memory, held, "wide")
        sizes = memory.alloc(WORD * some)
        largest = memory.alloc(WORD * some // NF4_BLOCK)
        memory.free(sizes)
        _let_go(memory, held, "largest")
        least = memory.alloc(WORD * some // NF4_BLOCK)
        unit = memory.alloc(WORD * some)
        memory.free(least)
        _let_go(memory, held, "unit")
        places = memory.alloc(WORD * some)
        nearest = memory.alloc(some)
        memory.free(places)
        _let_go(memory, held, "nearest")
        high = memory.alloc(some // 2)
        pair = memory.alloc(some // 2)
        free_all(memory, [high, pair])
        held = [("wide", wide), ("largest", largest), ("unit", unit), ("nearest", nearest)]
    free_all(memory, [block for _, block in held])
    _load_scales(memory, weights // NF4_BLOCK)
    free_all(memory, [*small, every, weight])


def _let_go(memory: Memory, held: list[Any], name: str) -> None:
    for at, (of, block) in enumerate(held):
        if of == name:
            memory.free(block)
            del held[at]
            return


def _load_scales(memory: Memory, scales: int) -> None:
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
