"""Steps that were timed on a card, each with what the planner says of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftwork.costmodel.card_time import RowStatistics, TrainedPart, card_step_parts
from graftwork.costmodel.card_tuning import TuningRequest, choose_tuning
from graftwork.costmodel.plain_time import WAITING, plain_step
from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import adapter_parameters, linear_names, shape_of, total_parameters
from graftwork.plan.catalog.hardware import default_rates
from graftwork.records.fit import PlainSetup
from graftwork.records.plan import ModelShape, Tuning

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
    parts = card_step_parts(
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
    return sum(step.parts.values()) + sum(step.once_a_step.values())


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
