"""What a card measured is still foretold: recomputed from the stored settings and the stored probe."""

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from graftwork.costmodel.card_time import RowStatistics, TrainedPart, card_step
from graftwork.costmodel.probed_rates import rates_of_probe
from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.model.shape import adapter_parameters, linear_names, total_parameters
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.records.plan import ModelShape, ProbeFacts, Tuning

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "plan_time.json"
BEFORE, AFTER = 0.15, 0.05
MEASURED = 4
"""Of the twelve settings, those that there was time for on the card: `docs/accuracy.md` says so."""


def read_lines():
    return json.loads(RESULTS.read_text())["figures"]["lines"]


def errors(rates: StepRates) -> list[float]:
    found = []
    for line in read_lines():
        if "measured" in line:
            shape, setting = shape_of(line["setting"]["shape"]), line["setting"]
            step = card_step(
                shape,
                Tuning.model_validate(line["tuning"]),
                TrainedPart(
                    adapted=shape.layers,
                    trainable=adapter_parameters(
                        shape, rank=16, targets=linear_names(shape), layers=shape.layers
                    ),
                    rates=rates,
                ),
                RowStatistics(mean_length=setting["length"]),
            )
            seconds = sum(step.parts.values()) + sum(step.once_a_step.values())
            found.append(abs(seconds / line["measured"] - 1))
    return found


def shape_of(name: str) -> ModelShape:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from plan_time_settings import shape_of
    finally:
        sys.path.remove(str(BENCHMARKS))
    found: ModelShape = shape_of(name)
    return found


def probe_facts() -> ProbeFacts:
    line = next(line for line in read_lines() if "steps" in line)
    return ProbeFacts.model_validate({k: v for k, v in line.items() if k in ProbeFacts.model_fields})


def test_the_shapes_of_the_benchmark_are_those_of_the_models_it_names():
    assert total_parameters(shape_of("7b")) == pytest.approx(7.6e9, rel=0.02)
    assert total_parameters(shape_of("1b")) == pytest.approx(1.24e9, rel=0.02)
    assert total_parameters(shape_of("6.7b")) == pytest.approx(6.74e9, rel=0.02)
    assert total_parameters(shape_of("8b")) == pytest.approx(8.19e9, rel=0.02)
    assert total_parameters(shape_of("360m")) == pytest.approx(0.362e9, rel=0.02)


def test_before_the_probe_the_median_error_is_small():
    off = errors(rates_of(find_gpu(probe_facts().device.name)))
    assert len(off) >= MEASURED
    assert median(off) <= BEFORE


def test_after_the_probe_it_is_within_five_percent():
    off = errors(rates_of_probe(probe_facts()))
    assert len(off) >= MEASURED
    assert median(off) <= AFTER
