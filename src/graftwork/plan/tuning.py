"""How a card's memory is best spent: as much as there is, no more, on what saves the most time. Pure.

In: a decoder's shape, what is trained, the memory limit, what the card can. Out: a Tuning, or None
where nothing fits. All settings that fit are reckoned and the fastest is taken: how many tokens at a
time, which blocks keep what, weights in which form, the embedding here or on the host.
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple

from graftwork.model.shape import layer_parameters
from graftwork.model.step_memory import SLACK, best_levels, extra_bytes, peak_bytes, weights_again
from graftwork.plan.memory_card import card_peak
from graftwork.records.plan import ModelShape, Tuning

GIB = 2**30
FIRST_WITH_EIGHT = 8.9
"""Compute capability of Ada; Hopper is 9.0."""

RATES = {"whole": 640e12, "four": 640e12, "eight": 1150e12}
"""Products a second in a whole step on an H200. Other cards differ, the ranking hardly."""
BANDWIDTH = 3.5e12
ELEMENTWISE_BYTES = 46
"""Traffic a token, block and unit of width beside the products: norms, gates, sums, thin products."""
FIXED_SECONDS = 0.007
"""A pass's beginning and end."""
ATTENTION_RATE = 420e12
TURNING, DEQUANTISING = 0.65, 0.35
"""Of the bandwidth, what the two changes of form reach within a step."""
HOST_BYTES_A_SECOND = 20e9

TOKENS = (1024, 2048, 4096, 8192, 16384)
HEAD_TOKENS = (2048, 1024, 512, 256)
CHUNK_TOKENS = (4096, 2048, 1024)

REPLAYED = 3
"""Settings that are replayed through the allocator, the fastest first."""
FEWER = 2
"""Blocks that keep less where the replay shows that there is no room for all."""


def choose_tuning(
    shape: ModelShape,
    *,
    method: str,
    adapted: int,
    trainable: int,
    limit_gib: float,
    step_tokens: int,
    longest: int,
    eight: bool,
) -> Tuning | None:
    """The fastest setting within the limit. `eight` says whether 8-bit products may be used."""
    form: Literal["whole", "eight", "four"] = "four" if method == "qlora" else "eight" if eight else "whole"
    # Products in 8 bits want sizes that 16 divides.
    head: Literal["whole", "eight"] = "eight" if eight and shape.vocab_size % 16 == 0 else "whole"
    ways = list(_settings(form, head, step_tokens=step_tokens, longest=longest, limit_gib=limit_gib))
    trained = Trained(adapted, trainable)
    filled = [found for tuning in ways if (found := _fill(shape, tuning, trained)) is not None]
    # By a margin for what the allocator rounds up; without one, the smallest may still fit.
    filled.sort(key=lambda tuning: tuning.seconds_a_token)
    candidates = filled[:REPLAYED] or sorted(ways, key=lambda tuning: _peak(shape, tuning, trained))[:1]
    for tuning in candidates:
        fitting = _replayed(shape, tuning, trained)
        if fitting is not None:
            seconds = _seconds_a_token(shape, fitting, adapted=adapted, trainable=trainable)
            return fitting.model_copy(update={"seconds_a_token": seconds})
    return None


class Trained(NamedTuple):
    """How many blocks have adapters, and how many parameters those have."""

    adapted: int
    trainable: int


def _peak(shape: ModelShape, tuning: Tuning, trained: Trained) -> float:
    return peak_bytes(shape, tuning, trainable=trained.trainable, adapted=trained.adapted)


def _replayed(shape: ModelShape, tuning: Tuning, trained: Trained) -> Tuning | None:
    """The tuning with what the allocator would really hold; with fewer blocks that keep, where it must."""
    for _ in range(REPLAYED):
        peak = card_peak(shape, tuning, trainable=trained.trainable, adapted=trained.adapted)
        if peak.reserved <= tuning.limit_gib * GIB:
            return tuning.model_copy(update={"peak_gib": peak.reserved / GIB})
        if not tuning.keep + tuning.lean:
            return None
        tuning = tuning.model_copy(
            update={
                "keep": max(tuning.keep - FEWER, 0),
                "lean": max(tuning.lean + min(tuning.keep, FEWER) - FEWER, 0),
            }
        )
    return None


def _settings(
    form: Literal["whole", "eight", "four"],
    head: Literal["whole", "eight"],
    *,
    step_tokens: int,
    longest: int,
    limit_gib: float,
) -> Iterator[Tuning]:
    """Everything that is tried. A pass must hold the longest row, and no more than a step has."""
    most = max(step_tokens, longest)
    tokens = sorted({min(max(size, longest), most) for size in TOKENS})
    ways = product(tokens, HEAD_TOKENS, CHUNK_TOKENS, (False, True), (False, True))
    for micro, head_tokens, chunk, turned, host in ways:
        if turned and form != "eight":
            continue
        yield Tuning(
            form=form,
            head=head,
            micro_tokens=micro,
            longest=longest,
            keep=0,
            lean=0,
            chunk_tokens=min(chunk, micro),
            head_tokens=min(head_tokens, micro),
            turned=turned,
            host_embedding=host,
            limit_gib=limit_gib,
            peak_gib=0.0,
            seconds_a_token=0.0,
        )


def _fill(shape: ModelShape, tuning: Tuning, trained: Trained) -> Tuning | None:
    """The best use of what is left of the limit; None where there is nothing left to begin with."""
    limit, adapted = tuning.limit_gib * GIB, trained.adapted

    def peak(keep: int, lean: int) -> float:
        return _peak(shape, tuning.model_copy(update={"keep": keep, "lean": lean}), trained)

    if (nothing := peak(0, 0)) > limit:
        return None
    one_keeps = peak(1, 0) - SLACK * tuning.micro_tokens * extra_bytes(shape, "keep")
    room = (limit - max(nothing, one_keeps)) / SLACK
    keep, lean = best_levels(shape, room, tokens=tuning.micro_tokens, adapted=adapted)
    if not keep:
        # Nobody keeps, so that the widest tensors are never there for all tokens: there is more room.
        _, lean = best_levels(shape, (limit - nothing) / SLACK, tokens=tuning.micro_tokens, adapted=adapted)
    while (most := peak(keep, lean)) > limit:
        keep, lean = (keep - 1, lean + 1) if keep else (0, lean - 1)
    filled = tuning.model_copy(update={"keep": keep, "lean": lean, "peak_gib": most / GIB})
    seconds = _seconds_a_token(shape, filled, adapted=adapted, trainable=trained.trainable)
    return filled.model_copy(update={"seconds_a_token": seconds})


def _seconds_a_token(shape: ModelShape, tuning: Tuning, *, adapted: int, trainable: int) -> float:
    """Products, traffic beside them, and what comes once a pass, spread over its tokens."""
    weights = layer_parameters(shape)
    rate = RATES[tuning.form]
    again = weights_again(shape, (tuning.keep, tuning.lean), adapted)
    flops = 2.0 * weights * (shape.layers + adapted) + 2.0 * again
    head = 4.0 * shape.vocab_size * shape.hidden_size / RATES["eight" if tuning.head == "eight" else "whole"]
    beside = ELEMENTWISE_BYTES * (shape.hidden_size + shape.intermediate_size) * adapted / BANDWIDTH
    mixing = 3.5 * 2 * tuning.longest * shape.heads * shape.head_dim * adapted / ATTENTION_RATE
    once = FIXED_SECONDS + trainable * 28 / BANDWIDTH
    # A block that computes again does so chunk by chunk, and changes its weights' form in each.
    again_blocks = (adapted - tuning.keep) * -(-tuning.micro_tokens // tuning.chunk_tokens)
    if tuning.form == "eight" and not tuning.turned:
        changed = weights * (tuning.keep + again_blocks) + shape.vocab_size * shape.hidden_size
        once += 2 * changed / (BANDWIDTH * TURNING)
    if tuning.form == "four":
        once += 2.5 * weights * (shape.layers + tuning.keep + 2 * again_blocks) / (BANDWIDTH * DEQUANTISING)
    # More, smaller goes: the head's and the blocks' products run less full.
    once += 2e-5 * tuning.micro_tokens / tuning.head_tokens
    once += 3e-5 * (adapted - tuning.keep) * tuning.micro_tokens / tuning.chunk_tokens
    host = shape.hidden_size * 2 / HOST_BYTES_A_SECOND if tuning.host_embedding else 0.0
    return flops / rate + head + beside + mixing + host + once / tuning.micro_tokens
