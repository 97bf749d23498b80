"""Memory of the plain step: what must hold of every count, and how near it is to what was measured."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.plain_step import plain_peak, plain_trace, replayed
from graftwork.records.base import GIB
from graftwork.records.plan import MemoryPeak, ModelShape, PlainSetup

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = ModelShape(
    name="small",
    hidden_size=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    vocab_size=1024,
    tied_embeddings=False,
    max_positions=4096,
)


def setup(**changed: object) -> PlainSetup:
    return PlainSetup.model_validate({"targets": LINEARS, "adapted_layers": 4, "tokens": 512, **changed})


def allocated(**changed: object) -> float:
    return plain_peak(SHAPE, setup(**changed)).allocated


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(64, 2048),
    method=st.sampled_from(["lora", "qlora", "full", "dora"]),
    loss=st.sampled_from(["plain", "fused"]),
)
def test_more_tokens_never_take_less(tokens: int, method: str, loss: str) -> None:
    less = allocated(tokens=tokens, method=method, loss=loss)
    assert allocated(tokens=2 * tokens, method=method, loss=loss) >= less


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_layers_that_compute_again_take_less(method: str) -> None:
    peaks = [allocated(method=method, checkpointed=count, tokens=2048) for count in (0, 2, 4)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_fused_loss_saves_most_of_the_logits() -> None:
    wide = SHAPE.model_copy(update={"vocab_size": 32000})
    plain, fused = (plain_peak(wide, setup(tokens=1024, loss=loss)).allocated for loss in ("plain", "fused"))
    assert plain - fused > 0.8 * 12 * 1024 * 32000


def test_weights_in_four_bits_take_a_quarter_of_the_linears() -> None:
    whole = plain_trace(SHAPE, setup(method="lora")).phases["setup"]
    four = plain_trace(SHAPE, setup(method="qlora", kbit_upcast=False)).phases["setup"]
    linears = 4 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 768)
    assert whole - four == pytest.approx(linears * (2 - 4.127 / 8), rel=0.02)


def test_optimizers_rank_by_what_they_keep_and_take() -> None:
    wide = SHAPE.model_copy(update={"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256})
    order = ["sgd", "adamw_8bit", "adamw_fused", "adamw_foreach"]
    peaks = [
        plain_peak(wide, setup(method="full", tokens=64, optimizer=name, autocast=False)).allocated
        for name in order
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_everything_that_is_taken_but_weights_and_states_is_given_back() -> None:
    trace = plain_trace(SHAPE, setup(checkpointed=2))
    held = sum(trace.sizes[e] if e >= 0 else -trace.sizes[~e] for e in trace.events)
    kept = trace.phases["setup"] + 2 * 4 * 4 * 16 * sum(
        (256 + 256, 256 + 128, 256 + 128, 512, 1024, 1024, 1024)
    )
    assert held == pytest.approx(kept + 64 * 2**20, rel=0.01)


def test_parts_are_those_of_the_peak_and_reserved_holds_allocated() -> None:
    peak = plain_peak(SHAPE, setup())
    assert sum(peak.parts.values()) == pytest.approx(peak.allocated, rel=1e-6)
    assert peak.reserved >= peak.allocated


def test_expandable_segments_do_not_change_what_is_allocated_by_much() -> None:
    trace = plain_trace(SHAPE, setup())
    assert replayed(trace, expandable=True).allocated == pytest.approx(replayed(trace).allocated, rel=0.05)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "mistral", "unheard-of"]
)
def test_every_family_has_an_answer(family: str) -> None:
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else LINEARS
    assert plain_peak(SHAPE, setup(targets=targets), architecture=family).allocated > 0


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
