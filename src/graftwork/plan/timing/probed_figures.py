"""What a probe found, as figures with ranges for people. Pure.

In: ProbeFacts. Out: Figures by name. The range of a rate is that of its parts; that of a step its spread.
"""

from graftwork.records.base import Figure
from graftwork.records.fit import ProbedStep, ProbeFacts
from graftwork.records.units import GIB

MEASURED_RANGE = 0.1
"""What such a measurement varies by from one minute to the next on a machine with nothing else to do."""


def probe_figures(facts: ProbeFacts) -> dict[str, Figure]:
    """Only what was measured."""
    found: dict[str, Figure] = {}
    for dtype in dict.fromkeys(one.dtype for one in facts.products):
        figure = _products(facts, dtype)
        found[f"products_{dtype}_{figure.unit.lower()}"] = figure
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
            found[name] = Figure.about(
                value / scale, down=1 - MEASURED_RANGE, up=1 + MEASURED_RANGE, unit=unit
            )
    speed = whole_model_speed(facts)
    return found if speed is None else {**found, "tokens_per_second": speed}


def whole_model_speed(facts: ProbeFacts) -> Figure | None:
    """Tokens a second of the whole model: two and four layers drawn out to all of them."""
    best: Figure | None = None
    for same in _pairs(facts):
        low, high = same
        a_layer = (high.seconds - low.seconds) / (high.layers - low.layers)
        if a_layer <= 0:
            # Somebody else had the machine meanwhile: a layer costs something.
            continue
        seconds = high.seconds + a_layer * (facts.shape.layers - high.layers)
        spread = 2 * MEASURED_RANGE + max(low.spread, high.spread)
        speed = Figure.about(high.tokens / seconds, down=1 / (1 + spread), up=1 + spread, unit="tokens/s")
        best = speed if best is None or speed.value > best.value else best
    return best


def _pairs(facts: ProbeFacts) -> list[tuple[ProbedStep, ProbedStep]]:
    """Steps that differ in their layers alone."""
    kinds: dict[tuple[int, str], list[ProbedStep]] = {}
    for step in facts.steps:
        form = step.tuning.form if step.tuning else ""
        kinds.setdefault((step.tokens, form), []).append(step)
    ordered = [sorted(same, key=lambda step: step.layers) for same in kinds.values()]
    return [(same[0], same[-1]) for same in ordered if same[0].layers < same[-1].layers]


def _products(facts: ProbeFacts, dtype: str) -> Figure:
    """Of full passes; the range is that of the layers."""
    same = [one for one in facts.products if one.dtype == dtype]
    most = max(one.tokens for one in same)
    full = [one for one in same if one.tokens == most]
    work = [2.0 * one.tokens * one.inputs * one.outputs for one in full]
    rate = sum(work) / sum(flops / one.flops for flops, one in zip(work, full, strict=True))
    rates = [one.flops for one in full]
    low, high = min(*rates, rate), max(*rates, rate)
    scale, unit = (1e12, "TFLOPS") if facts.device.kind == "cuda" else (1e9, "GFLOPS")
    return Figure(value=rate / scale, low=low / scale, high=high / scale, unit=unit)
