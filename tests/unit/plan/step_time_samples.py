"""Steps that were timed on a card, each with what the planner says of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_step_parts
from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning
from graftwork.costmodel.plain_step import WAITING, plain_step
from graftwork.costmodel.probed_rates import rates_of_probe
from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import adapter_parameters, linear_names, shape_of, total_parameters
from graftwork.plan.catalog.hardware import default_rates
from graftwork.records.plan import (
    DeviceName,
    ModelShape,
    PlainSetup,
    ProbedStep,
    ProbeFacts,
    ProductRate,
    Tuning,
)

DATA = Path(__file__).parents[2] / "data"
RANK, LARGE = 16, 1e9


def read_lines(*names: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for name in names for line in (DATA / name).read_text().splitlines()]
    return [line for line in lines if "measured" in line]


def predict(line: dict[str, Any], rates: StepRates) -> float:
    """Seconds of the step of this line."""
    setting, shape = line["setting"], shape_of(line["config"], name=line["name"])
    if setting["engine"] != "graft":
        return plain_seconds(shape, line, rates)
    lengths: Sequence[int] = setting["lengths"]
    parts = gpu_step_parts(
        shape,
        Tuning.model_validate(line["tuning"]) if "tuning" in line else tuned(shape, setting),
        TrainedPart(shape.layers, trainable(shape), rates),
        RowStatistics.of(lengths, trained_share=setting["trained_share"]),
        tokens=sum(lengths),
    )
    return sum(parts.values())


def plain_seconds(shape: ModelShape, line: dict[str, Any], rates: StepRates) -> float:
    setting, lengths = line["setting"], line["setting"]["lengths"]
    setup = PlainSetup(
        targets=linear_names(shape), adapted_layers=shape.layers, rows=len(lengths), tokens=max(lengths)
    )
    step = plain_step(shape, setup, rates=rates, architecture=line["config"]["model_type"])
    if setting["engine"] == "hf recorded":
        return sum(seconds for name, seconds in step.parts.items() if name != WAITING)
    return sum(step.parts.values()) + sum(step.once_per_step.values())


def trainable(shape: ModelShape) -> int:
    return adapter_parameters(shape, rank=RANK, targets=linear_names(shape), layers=shape.layers)


def tuned(shape: ModelShape, setting: dict[str, Any]) -> Tuning:
    lengths = setting["lengths"]
    request = TuningRequest(
        method="lora",
        adapted=shape.layers,
        trainable=trainable(shape),
        step_tokens=max(setting["room"], sum(lengths)),
        longest=max(lengths),
        eight=total_parameters(shape) >= LARGE,
    )
    found = choose_tuning(shape, request, limit_gib=130.0, rates=default_rates())
    assert found is not None
    return found.model_copy(update={"compiled": False, "recorded": True})


def errors_after_probe(model: str) -> dict[str, float]:
    """Planned over measured, less one, of our own step, by the rates of a probe of 2 and 4 layers."""
    own = [line for line in read_lines("step_times.jsonl") if line["setting"]["engine"] == "graft"]
    same = [line for line in own if line["setting"]["model"] == model]
    whole = [line for line in same if not line["setting"]["layers"]]
    host = json.loads((DATA / "step_times.jsonl").read_text().splitlines()[0])
    shape = shape_of(whole[0]["config"], name=model)
    facts = ProbeFacts(
        device=DeviceName(kind="cuda", name=host["device"]),
        memory_gib=139.8,
        capability=9.0,
        threads=host["cores"],
        shape=shape,
        rank=RANK,
        products=tuple(
            ProductRate.model_validate(rate)
            for rate in host["products"]
            if rate["inputs"] == shape.hidden_size
        ),
        copy_bytes_s=host["copy_bytes_s"],
        launch_seconds=host["launch_seconds"],
        steps=tuple(_probed(line) for line in same if line["setting"]["layers"]),
        seconds=1.0,
        at="2026-11-16",
    )
    rates = rates_of_probe(facts)
    return {line["name"]: predict(line, rates) / line["measured"] - 1 for line in whole}


def _probed(line: dict[str, Any]) -> ProbedStep:
    setting = line["setting"]
    return ProbedStep(
        layers=setting["layers"],
        tokens=sum(setting["lengths"]),
        length=max(setting["lengths"]),
        trainable=line["trainable"],
        trained_share=setting["trained_share"],
        seconds=line["measured"],
        spread=0.02,
        peak_bytes=0.0,
        tuning=Tuning.model_validate(line["tuning"]),
    )
