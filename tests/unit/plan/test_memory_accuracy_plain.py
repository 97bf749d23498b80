"""What the planner says of plain transformers + PEFT, next to what was measured on a card."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from graftwork.costmodel.plain_step import plain_peak
from graftwork.records.base import GIB
from graftwork.records.plan import MemoryPeak, ModelShape, PlainSetup

MEASURED = Path(__file__).parents[2] / "data" / "plan_memory.jsonl"


def measured_lines() -> list[dict[str, Any]]:
    if not MEASURED.exists():
        return []
    lines = [json.loads(row) for row in MEASURED.read_text().splitlines() if row.strip()]
    return [line for line in lines if line["engine"] == "hf" and "measured" in line]


LINES = measured_lines()
needs_lines = pytest.mark.skipif(not LINES, reason="no measurements of plain transformers are there")


def predict(line: dict[str, Any]) -> MemoryPeak:
    config = line["config"]
    shape, setup = ModelShape.model_validate(config["shape"]), PlainSetup.model_validate(config["setup"])
    return plain_peak(shape, setup, architecture=config["architecture"])


def errors(what: str, lines: list[dict[str, Any]]) -> list[float]:
    return sorted(
        abs(getattr(predict(line), what) / GIB / line["measured"][f"{what}_gib"] - 1) for line in lines
    )


def percentile(values: list[float], share: float) -> float:
    return values[math.ceil(share * len(values)) - 1]


@needs_lines
def test_allocated_memory_is_right_within_one_percent_in_the_median() -> None:
    found = errors("allocated", LINES)
    assert statistics.median(found) <= 0.01
    assert percentile(found, 0.95) <= 0.05


@needs_lines
def test_reserved_memory_is_right_within_two_percent_in_the_median_and_five_at_the_95th() -> None:
    found = errors("reserved", LINES)
    assert statistics.median(found) <= 0.02
    assert percentile(found, 0.95) <= 0.05


@needs_lines
def test_models_that_were_never_looked_at_are_as_right_as_the_others() -> None:
    held = [line for line in LINES if line["held_out"]]
    assert len({line["config"]["architecture"] for line in held}) >= 2
    assert statistics.median(errors("allocated", held)) <= 0.01
    assert statistics.median(errors("reserved", held)) <= 0.02


@needs_lines
def test_a_third_of_the_configurations_and_six_architectures_are_there() -> None:
    assert len(LINES) >= 20
    assert len({line["config"]["architecture"] for line in LINES}) >= 6
