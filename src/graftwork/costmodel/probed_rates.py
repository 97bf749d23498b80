"""From what a probe measured to the rates of a step. Pure.

Input: ProbeFacts. Output: Rates of a GPU, or a Cpu. Products, copies and transfers replace what the maker
states; the real steps of two and four layers then say by how much the model of a block, and of what surrounds
the blocks, is off on this device.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from graftwork.costmodel.gpu_time import OPTIMIZER_BYTES, block_seconds, head_seconds
from graftwork.costmodel.rates import (
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    FIXED_PER_LAYER,
    FIXED_SECONDS,
    LAUNCH_SECONDS,
    StepRates,
    single_share,
)
from graftwork.records.base import GIB, Figure
from graftwork.records.plan import ModelShape, ProbedStep, ProbeFacts, ProductRate

HALF_RATE_IN_STEP, EIGHT_BIT_RATE_IN_STEP = 0.895, 0.816
"""Share of the rate of a single product that it reaches within a step: 640 of 715 TFLOPS in 16 bits and,
including the quantization of its inputs, 1150 of 1409 in 8 (H200, 2026-11). Measured steps correct it.
"""
COPY_RATE_IN_STEP = 0.825
"""3.5 of the 4.24 TB/s that a plain copy reached there."""
FULL_TOKENS = 2048
"""Products of fewer tokens do not fill a GPU."""
LEAST_FACTOR, MOST_FACTOR = 0.4, 2.5
"""Bounds of the correction: a step further off was measured while others used the machine, or is not what it
seems.
"""
PEAK_BEYOND_MEASURED = 1.6
"""The peak of a GPU that is not in the catalog is unknown; no product reached more than this share of it
on the GPUs that are."""


class Line(NamedTuple):
    """`fixed + factor * computed`."""

    factor: float
    fixed: float


def rates_of_probe(facts: ProbeFacts) -> StepRates:
    """Return the rates of this GPU."""
    if facts.device.kind != "cuda":
        raise ValueError("a CPU has no GPU's rates")
    half = _rate(facts, ("bfloat16", "float16"))
    if half is None or not facts.copy_bytes_s:
        raise ValueError("the probe measured no products")
    eight = _rate(facts, ("fp8",))
    rates = StepRates(
        name=facts.device.name,
        half=half * HALF_RATE_IN_STEP,
        eight=eight * EIGHT_BIT_RATE_IN_STEP if eight else None,
        single=half * single_share(facts.device.name, facts.capability or 0.0),
        bandwidth=facts.copy_bytes_s * COPY_RATE_IN_STEP,
        attention=half * HALF_RATE_IN_STEP * ATTENTION_SHARE,
        host=facts.to_device_bytes_s or 10e9,
        launch_seconds=facts.launch_seconds or LAUNCH_SECONDS,
        has_bf16=(facts.capability or 0) >= 8.0,
        peak_half=half * PEAK_BEYOND_MEASURED,
        peak_eight=eight * PEAK_BEYOND_MEASURED if eight else None,
        peak_bandwidth=facts.copy_bytes_s / BANDWIDTH_SHARE,
        certainty="probed",
    )
    return _correct(rates, facts)


def _rate(facts: ProbeFacts, dtypes: tuple[str, ...]) -> float | None:
    """Return the rate of all products of a block in full passes: their operations over their seconds."""
    matching = [rate for rate in facts.products if rate.dtype in dtypes]
    full = [item for item in matching if item.tokens >= FULL_TOKENS] or matching
    return _reached(full) if full else None


def _reached(products: Sequence[ProductRate]) -> float:
    """Their operations over their seconds."""
    work = [2.0 * product.tokens * product.inputs * product.outputs for product in products]
    return sum(work) / sum(flops / product.flops for flops, product in zip(work, products, strict=True))


def _correct(rates: StepRates, facts: ProbeFacts) -> StepRates:
    """Correct by the measured steps: first the blocks per form of the weights, then everything else."""
    factors: dict[str, float] = {}
    a_layer: list[float] = []
    outside: list[Line] = []
    for form in dict.fromkeys(step.tuning.form for step in facts.steps if step.tuning):
        steps = [step for step in facts.steps if step.tuning and step.tuning.form == form]
        blocks = _fit_blocks(facts.shape, steps, rates)
        if blocks is None:
            factors[form] = _whole_factor(facts.shape, steps[0], rates)
            a_layer.append(FIXED_PER_LAYER)
            outside.append(Line(factors[form], FIXED_SECONDS))
            continue
        factors[form] = blocks.factor
        a_layer.append(blocks.fixed)
        outside.append(_fit_outside(facts.shape, steps, rates, blocks))
    if not factors:
        return rates
    return rates.model_copy(
        update={
            "layer_factor": median(factors.values()),
            "form_factors": factors,
            "fixed_per_layer": median(a_layer),
            "head_factor": median(line.factor for line in outside),
            "fixed_seconds": median(line.fixed for line in outside),
        }
    )


def _fit_blocks(shape: ModelShape, steps: Sequence[ProbedStep], rates: StepRates) -> Line | None:
    """Fit the time of one additional block, at each number of tokens, against its computed time."""
    points: list[tuple[float, float]] = []
    for tokens in sorted({step.tokens for step in steps}):
        same = sorted((step for step in steps if step.tokens == tokens), key=lambda step: step.layers)
        if len(same) < 2:
            continue
        low, high = same[0], same[-1]
        computed = _blocks(shape, high, rates) - _blocks(shape, low, rates)
        extra_layers = high.layers - low.layers
        points.append((computed / extra_layers, (high.seconds - low.seconds) / extra_layers))
    return _line(points, fixed=FIXED_PER_LAYER) if points else None


def _whole_factor(shape: ModelShape, step: ProbedStep, rates: StepRates) -> float:
    """Return the correction from a single step, which applies to both blocks and head."""
    assert step.tuning is not None
    computed = _blocks(shape, step, rates) + head_seconds(shape, step.tuning, rates=rates)
    fixed = FIXED_SECONDS + FIXED_PER_LAYER * step.layers
    return min(max((step.seconds - fixed) / computed, LEAST_FACTOR), MOST_FACTOR)


def _fit_outside(shape: ModelShape, steps: Sequence[ProbedStep], rates: StepRates, blocks: Line) -> Line:
    """Fit the rest of the steps, without their blocks, against the computed time of the head."""
    points: list[tuple[float, float]] = []
    for tokens in sorted({step.tokens for step in steps}):
        same = [step for step in steps if step.tokens == tokens]
        outside = [
            step.seconds - blocks.factor * _blocks(shape, step, rates) - blocks.fixed * step.layers
            for step in same
        ]
        first = same[0]
        assert first.tuning is not None
        head = head_seconds(shape, first.tuning, rates=rates, trained_share=first.trained_share)
        points.append((head, sum(outside) / len(outside)))
    return _line(points, fixed=FIXED_SECONDS)


def _line(points: Sequence[tuple[float, float]], *, fixed: float) -> Line:
    """Fit a line through two points; through one with the given fixed part. The fixed part is never
    negative.
    """
    (x1, y1), (x2, y2) = points[0], points[-1]
    if x2 > x1 * 1.5:
        factor = (y2 - y1) / (x2 - x1)
        fixed = y1 - factor * x1
        if fixed < 0:
            factor, fixed = y2 / x2, 0.0
    else:
        fixed = min(fixed, y2 / 2)
        factor = (y2 - fixed) / x2
    clamped = min(max(factor, LEAST_FACTOR), MOST_FACTOR)
    # What a factor within reason does not explain, is there whatever the tokens.
    return Line(clamped, max(0.0, fixed if clamped == factor else y2 - clamped * x2))


def _blocks(shape: ModelShape, step: ProbedStep, rates: StepRates) -> float:
    """Seconds of the blocks of a probed step, and of their update, before correction."""
    assert step.tuning is not None
    few = shape.model_copy(update={"layers": step.layers, "parameters": None})
    blocks = block_seconds(few, step.tuning, adapted=step.layers, rates=rates, mean_length=step.length)
    return sum(blocks.values()) + step.trainable * OPTIMIZER_BYTES / rates.bandwidth


MEASURED_RANGE = 0.1
"""Variation of such a measurement from one minute to the next on an otherwise idle machine."""


def probe_figures(facts: ProbeFacts) -> dict[str, Figure]:
    """Return the measured figures only."""
    figures: dict[str, Figure] = {}
    for dtype in dict.fromkeys(rate.dtype for rate in facts.products):
        figure = _products(facts, dtype)
        figures[f"products_{dtype}_{figure.unit.lower()}"] = figure
    single = {
        "memory_gb_s": (facts.copy_bytes_s, 1e9, "GB/s"),
        "to_device_gb_s": (facts.to_device_bytes_s, 1e9, "GB/s"),
        "from_device_gb_s": (facts.from_device_bytes_s, 1e9, "GB/s"),
        "context_gib": (facts.context_bytes, GIB, "GiB"),
        "launch_microseconds": (facts.launch_seconds, 1e-6, "µs"),
        "disk_write_mb_s": (facts.disk_write_bytes_s, 1e6, "MB/s"),
        "disk_read_mb_s": (facts.disk_read_bytes_s, 1e6, "MB/s"),
    }
    for name, (value, scale, unit) in single.items():
        if value:
            figures[name] = Figure.about(
                value / scale, down=1 - MEASURED_RANGE, up=1 + MEASURED_RANGE, unit=unit
            )
    speed = whole_model_speed(facts)
    return figures if speed is None else {**figures, "tokens_per_second": speed}


def whole_model_speed(facts: ProbeFacts) -> Figure | None:
    """Tokens per second of the whole model: extrapolated from two and four layers."""
    best: Figure | None = None
    kinds: dict[tuple[int, str], list[ProbedStep]] = {}
    for step in facts.steps:
        form = step.tuning.form if step.tuning else ""
        kinds.setdefault((step.tokens, form), []).append(step)
    for same in kinds.values():
        # Steps that differ only in their layers.
        ordered = sorted(same, key=lambda step: step.layers)
        low, high = ordered[0], ordered[-1]
        if low.layers == high.layers:
            continue
        a_layer = (high.seconds - low.seconds) / (high.layers - low.layers)
        if a_layer <= 0:
            # The machine was busy with other work: a layer cannot cost nothing.
            continue
        seconds = high.seconds + a_layer * (facts.shape.layers - high.layers)
        spread = 2 * MEASURED_RANGE + max(low.spread, high.spread)
        speed = Figure.about(high.tokens / seconds, down=1 / (1 + spread), up=1 + spread, unit="tokens/s")
        best = speed if best is None or speed.value > best.value else best
    return best


def _products(facts: ProbeFacts, dtype: str) -> Figure:
    """Return the products of full passes; the range is that of the layers."""
    same = [rate for rate in facts.products if rate.dtype == dtype]
    most = max(rate.tokens for rate in same)
    full = [rate for rate in same if rate.tokens == most]
    rate = _reached(full)
    rates = [rate.flops for rate in full]
    low, high = min(*rates, rate), max(*rates, rate)
    scale, unit = (1e12, "TFLOPS") if facts.device.kind == "cuda" else (1e9, "GFLOPS")
    return Figure(value=rate / scale, low=low / scale, high=high / scale, unit=unit)
