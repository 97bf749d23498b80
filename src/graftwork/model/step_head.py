"""The loss of a training step as memory: logits of some places at a time, then forgotten. Pure.

In: something that gives memory, sizes, places. Out: the gradient of the last block's output. Mirrors
`train/gpu/decoder.py` and how the decoder calls it.
"""

from typing import Any

from graftwork.model import step_compiled
from graftwork.model import step_pieces as pieces
from graftwork.model.step_block import SHOWN, chunks
from graftwork.model.step_pieces import HALF, WORD, follow, free_all
from graftwork.model.step_sizes import Memory, Sizes

LOSS = "away+4 power+4 away- same+1 hot+4 same- all+4 power- hot- d+4 all- out+2"
"""Of each logit, beside the logit itself in float32."""

LONG = 8


def lose(memory: Memory, s: Sizes, tokens: int, places: int, head_tokens: int) -> Any:
    """The loss at the places that predict: the gradient of the last block's output is left."""
    dx = memory.alloc(HALF * tokens * s.hidden)
    last: list[Any] = []
    for some in chunks(places, head_tokens)[:SHOWN]:
        # Each name holds what the last chunk left until it is bound anew.
        wide = some * s.hidden
        hidden = memory.alloc(HALF * wide)
        free_all(memory, last[:1])
        normed = memory.alloc(HALF * wide) if s.compiled else pieces.norm(memory, wide)
        free_all(memory, last[1:2])
        dh = step_compiled.chunk_loss(memory, s, some) if s.compiled else _chunk_loss(memory, s, some)
        free_all(memory, last[2:])
        scaled = memory.alloc(HALF * wide)
        d = memory.alloc(HALF * wide) if s.compiled else pieces.norm_backward(memory, wide)
        free_all(memory, [dh, scaled])
        last = [hidden, normed, d]
    free_all(memory, last)
    return dx


def _chunk_loss(memory: Memory, s: Sizes, tokens: int) -> Any:
    logits = tokens * s.vocabulary
    if s.head == "eight":
        codes = follow(memory, pieces.CODES, tokens * s.hidden)["out"]
        half = memory.alloc(HALF * logits)
        memory.free(codes)
    else:
        half = memory.alloc(HALF * logits)
    wide = memory.alloc(WORD * logits)
    memory.free(half)
    follow(memory, "less+4 less-", logits)
    columns = memory.alloc(LONG * s.vocabulary)
    d = follow(memory, LOSS, logits)
    half = d.pop("out")
    if s.head == "eight":
        dh = pieces.eight_turned(memory, tokens, s.vocabulary, s.hidden, turned=s.turned)
    else:
        dh = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [half, wide, columns, *d.values()])
    return dh
