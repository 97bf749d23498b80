"""What a card measured is still foretold: recomputed from the stored settings and the stored probe."""

import json
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_step_time
from graftwork.costmodel.probed_rates import rates_of_probe
from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.model.shape import adapter_parameters, linear_names, total_parameters
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.records.plan import ModelShape, ProbeFacts, Tuning

RESULTS = Path(__file__).parents[2] / "data" / "plan_time.json"
BEFORE, AFTER = 0.15, 0.05
MEASURED = 4
"""Of the twelve settings, those that there was time for on the card: `docs/accuracy.md` says so."""


class Sizes(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool


SHAPES = {
    "7b": Sizes(3584, 28, 28, 4, 128, 18944, 152_064, False),
    "1b": Sizes(2048, 16, 32, 8, 64, 8192, 128_256, True),
    "6.7b": Sizes(4096, 32, 32, 32, 128, 11008, 32_256, False),
    "8b": Sizes(4096, 36, 32, 8, 128, 12288, 151_936, False),
    "360m": Sizes(960, 32, 15, 5, 64, 2560, 49_152, True),
}
"""Qwen2.5-7B, Llama-3.2-1B, DeepSeek-Coder-6.7B, Qwen3-8B (without its norms of heads), SmolLM2-360M."""


def read_lines():
    return json.loads(RESULTS.read_text())["figures"]["lines"]


def errors(rates: StepRates) -> list[float]:
    found = []
    for line in read_lines():
        if "measured" in line:
            shape, setting = shape_of(line["setting"]["shape"]), line["setting"]
            step = gpu_step_time(
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
            seconds = sum(step.parts.values()) + sum(step.once_per_step.values())
            found.append(abs(seconds / line["measured"] - 1))
    return found


def shape_of(name: str) -> ModelShape:
    sizes = SHAPES[name]
    return ModelShape(
        name=name,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=sizes.vocabulary,
        tied_embeddings=sizes.tied,
        max_positions=32_768,
    )


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
