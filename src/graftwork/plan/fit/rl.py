"""GRPO with adapters: what generation holds and how long it takes. Pure.

In: a question. Out: memory and seconds of generating the answers that are learned from. As TRL does it with
transformers' own generation: rows of a step are answers, `generations` to a prompt; the reference is the
base with its adapters off, so that there is no second copy. Rewards are the user's and are not counted.
"""

from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.plan.timing.rates import Rates
from graftwork.records.fit import FitQuestion, MemoryPeak
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB

KV_BYTES = 2
LASTING = ("weights", "adapters", "optimizer", "reference")
LAUNCH_KERNELS_A_BLOCK = 60
"""Kernels of a block for one token, called from Python one by one (derived from the plain step's)."""
REFERENCE_SHARE = 1 / 3
"""Of a pass forward and backward, what the forward pass of the reference takes."""


def cache_bytes(shape: ModelShape, *, tokens: int, sequences: int) -> float:
    """Keys and values of `sequences` answers that grow to `tokens`."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * KV_BYTES * tokens * sequences


def rows_at_once(question: FitQuestion, lasting: float, *, room: float, cards: int) -> int:
    """Answers that a card generates side by side: all of its own, or even rounds that there is room for."""
    most = max(-(-question.batch_rows // cards), 1)
    a_row = sum(_generating(question, rows=1).values())
    rounds = -(-most // max(min(most, int((room - lasting) // a_row)), 1))
    return -(-most // rounds)


def lasting_bytes(peak: MemoryPeak, *, whole_weights: float) -> float:
    """What is there while answers are generated. Where weights are cut up, TRL gathers them for it."""
    held = sum(peak.parts.get(name, 0.0) for name in LASTING)
    return max(held, whole_weights)


def with_reference(peak: MemoryPeak, question: FitQuestion) -> MemoryPeak:
    """Without adapters to turn off, the reference is a second copy in 16 bits."""
    if question.method != "full":
        return peak
    copy = total_parameters(question.shape) * 2.0
    return peak.model_copy(
        update={
            "allocated": peak.allocated + copy,
            "reserved": peak.reserved + copy,
            "parts": {**peak.parts, "reference": copy},
        }
    )


def with_generation(
    peak: MemoryPeak, question: FitQuestion, *, rows: int, whole_weights: float
) -> MemoryPeak:
    """The peak of training or of generating, whichever is higher."""
    lasting = {name: peak.parts.get(name, 0.0) for name in LASTING}
    lasting["weights"] = max(lasting["weights"], whole_weights)
    passing = _generating(question, rows=rows)
    generating = sum(lasting.values()) + sum(passing.values())
    if generating <= peak.allocated:
        return peak
    beyond = max(peak.reserved - peak.allocated, 0.02 * sum(passing.values()))
    return MemoryPeak(
        allocated=generating,
        reserved=generating + beyond,
        parts={**{name: size for name, size in lasting.items() if size}, **passing},
        phase="generation",
    )


def _generating(question: FitQuestion, *, rows: int) -> dict[str, float]:
    """What passes while `rows` answers are generated side by side."""
    shape = question.shape
    tokens = question.prompt_tokens + question.completion_tokens
    return {
        "key-value cache": cache_bytes(shape, tokens=tokens, sequences=rows),
        # Hidden states of all prompts at once.
        "activations": 8.0 * (shape.hidden_size + shape.intermediate_size) * question.prompt_tokens * rows,
        # Of one token, in float32, sorted for sampling.
        "logits": 12.0 * shape.vocab_size * rows,
    }


def generation_seconds(
    question: FitQuestion, *, rows: int, cards: int, rates: Rates, training: float
) -> dict[str, float]:
    """Seconds of a step that are spent before anything is learned: each card generates its own rows."""
    own = max(-(-question.batch_rows // cards), 1)
    read = own * question.prompt_tokens * 2.0 * _weights(question.shape)
    return {
        "generation": -(-own // rows) * decode_seconds(question, rows=min(rows, own), rates=rates),
        "reading prompts": read / rates.half,
        "reference": REFERENCE_SHARE * training,
    }


def decode_seconds(question: FitQuestion, *, rows: int, rates: Rates) -> float:
    """One answer of `completion_tokens` in each of `rows` rows: all weights are read for every token."""
    shape = question.shape
    weights = _weights(shape)
    table = shape.vocab_size * shape.hidden_size * 2.0
    reading = (weights * 2.0 + table) / rates.bandwidth
    if question.method == "qlora":
        # Half a byte read, two written, two read again for the product.
        reading = (weights * 0.52 + table) / rates.bandwidth
        reading += weights * 4.0 / (rates.bandwidth * rates.dequantising) * 0.5
    middle = question.prompt_tokens + question.completion_tokens / 2
    cache = cache_bytes(shape, tokens=round(middle), sequences=rows) / rates.bandwidth
    launching = LAUNCH_KERNELS_A_BLOCK * shape.layers * rates.launch_seconds
    return question.completion_tokens * max(reading + cache, launching)


def _weights(shape: ModelShape) -> float:
    return float(shape.layers * layer_parameters(shape))


def say_why(question: FitQuestion) -> tuple[str, ...]:
    """GRPO beside PPO, in figures."""
    copy = total_parameters(question.shape) * 2.0 / GIB
    tokens = question.prompt_tokens + question.completion_tokens
    cache = cache_bytes(question.shape, tokens=tokens, sequences=question.generations) / GIB
    first = (
        f"GRPO needs no reference copy: it is the base with its adapters off; PPO would add a value model of "
        f"{copy:.1f} GiB in 16 bits, with its own gradients and states"
        if question.method != "full"
        else f"with full weights GRPO keeps a reference copy of {copy:.1f} GiB; PPO would add a value model "
        "of that size, with its own gradients and states"
    )
    return (first, f"keys and values of {question.generations} answers to a prompt take {cache:.2f} GiB")
