"""Repaired rows from the log to the report: trained with and without them, and compared."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from graftwork.api.project import open_project
from graftwork.data.repair.project import RepairJob, repair_project, revise_repair, with_prices
from graftwork.data.settings import RepairSettings, TeacherSettings
from graftwork.files.dataset import read_rows
from graftwork.records.errors import UserError, WorkerFailed
from graftwork.records.interaction import Capture

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))

from stand_in_teacher import StandInTeacher, answer_to

CUT = "The plant was moved from the gate to the pond and after that it was"


def add_broken_rows(folder, count=30):
    lines = []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"What grows under stone {number} of {answer_to([], number)[:50]}?"},
            {"role": "assistant", "content": CUT},
        ]
        lines.append(json.dumps({"messages": messages, "finish_reason": "length"}))
    (folder / "logs" / "broken.jsonl").write_text("\n".join(lines) + "\n")


def capture(number, text):
    return Capture(
        id=f"{number:032x}",
        at="2026-11-01T00:00:00+00:00",
        session=None,
        model="champion",
        release="base",
        request={"messages": [{"role": "user", "content": text}]},
        reply="By the pond.",
        finish_reason="stop",
        prompt_tokens=1,
        reply_tokens=1,
        first_token_ms=1.0,
        total_ms=1.0,
    )


@pytest.mark.slow
def test_repaired_rows_are_trained_on_compared_and_never_tested(small_project, change_settings):
    add_broken_rows(small_project)
    change_settings(
        small_project, models={"main": {}, "without_repaired": {"repaired": False}}, train={"epochs": 1}
    )
    project = open_project(small_project)
    teacher = TeacherSettings(url="http://teacher.test/v1", model="stand-in")
    with project.open() as work:
        out = small_project / "logs" / "repaired.jsonl"
        job = RepairJob(RepairSettings(teacher=teacher), out, client=StandInTeacher())
        outcome = repair_project(work, job)
    assert outcome.states == {"accepted": 30}
    assert outcome.in_logs
    assert outcome.usable_after == outcome.usable_before + 30

    folders = {name: Path(folder) for name, folder in project.prepare().folders.items()}
    taught = {
        name: {split: sum(row.answered is not None for row in read_rows(folder, split)) for split in SPLITS}
        for name, folder in folders.items()
    }
    assert taught == {
        "main": {"train": 30, "validation": 0, "test": 0},
        "without_repaired": {"train": 0, "validation": 0, "test": 0},
    }
    held_out = [[row.id for row in read_rows(folder, "test")] for folder in folders.values()]
    assert held_out[0] == held_out[1]

    project.with_model("without_repaired").train()
    with project.open() as work:
        work.captures.add(
            [
                capture(n, f"Kubernetes: why does pod web{n} restart with exit code {n}, on node worker{n}?")
                for n in range(25)
            ]
        )
    project.run_to("report")
    report = project.evaluate().report
    pairs = {(pair.baseline, pair.candidate) for pair in report.comparisons}
    assert ("model:without_repaired", "adapter") in pairs
    page = (small_project / "report.html").read_text()
    assert "What the repaired rows changed" in page
    assert "Live prompts" in page
    drift = project.status().drift
    assert drift.all.unlike == drift.all.prompts == 25
    assert drift.due
    assert "Kubernetes" in drift.examples[0]


def test_a_base_on_this_machine_can_be_the_teacher_and_costs_nothing(small_project, tiny_base, listener):
    add_broken_rows(small_project, 3)
    project = open_project(small_project, reporter=listener)
    teacher = TeacherSettings(engine="embedded", model=str(tiny_base), max_tokens=16, max_cost=1)
    settings = RepairSettings(teacher=teacher)
    plan = project.plan_repair(settings)
    assert (plan.requests, plan.cost, plan.price) == (3, 0.0, "$0: the engine runs on this machine")
    outcome = project.repair(settings)
    # The tiny model talks nonsense until it is cut off: each answer was asked for, and none is accepted.
    assert outcome.states == {"refused": 3}
    assert outcome.spent.tokens_out == 3 * 16
    assert outcome.teacher == f"engine:embedded#{tiny_base}"
    with project.open() as work:
        again = repair_project(work, RepairJob(settings, small_project / "logs" / "repaired.jsonl"))
    assert again.spent.requests == 3, "answers are kept"


def test_an_engine_that_cannot_load_its_base_is_a_clear_error(small_project, tiny_base, listener):
    add_broken_rows(small_project, 1)
    broken = small_project / "broken_base"
    shutil.copytree(tiny_base, broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"nothing")
    project = open_project(small_project, reporter=listener)
    teacher = TeacherSettings(engine="embedded", model=str(broken))
    with pytest.raises(WorkerFailed, match="the graftwork engine exited") as caught:
        project.repair(RepairSettings(teacher=teacher))
    assert caught.value.where.endswith("engine.log")


@pytest.mark.parametrize("model", ["gpt-4o-mini-2024-07-18", "openai/gpt-4o-mini"])
def test_the_price_of_a_model_in_the_catalog_is_known_with_its_source(model):
    teacher = TeacherSettings(url="https://host/v1", model=model, max_cost=1)
    settings, basis = with_prices(RepairSettings(teacher=teacher))
    assert (settings.teacher.price_in, settings.teacher.price_out) == (0.15, 0.6)
    assert basis.startswith("$0.15 a million tokens in and $0.6 out (")
    assert "202" in basis, "dated"


def test_stated_prices_come_before_those_of_the_catalog():
    teacher = TeacherSettings(url="https://host/v1", model="gpt-4o-mini", price_in=1, price_out=2)
    settings, basis = with_prices(RepairSettings(teacher=teacher))
    assert (settings.teacher.price_in, basis) == (1, "$1 a million tokens in and $2 out, as stated")


def test_a_budget_in_dollars_needs_a_price():
    teacher = TeacherSettings(url="https://host/v1", model="somebody-elses", max_cost=1)
    with pytest.raises(UserError, match="needs prices"):
        with_prices(RepairSettings(teacher=teacher))
    assert with_prices(RepairSettings(teacher=teacher.model_copy(update={"max_cost": None})))[1] == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine:llamacpp/q4_1#Qwen/Qwen3-8B", (None, "llamacpp/q4_1", "Qwen/Qwen3-8B")),
        ("engine:embedded#models/big", (None, "embedded", "models/big")),
        ("https://host/v1#large", ("https://host/v1", None, "large")),
    ],
)
def test_a_teacher_is_named_by_endpoint_or_engine(text, expected):
    found = revise_repair(RepairSettings(), text, [], None, {}).teacher
    assert (found.url, found.engine, found.model) == expected


@pytest.mark.parametrize("text", ["engine:other#x", "engine:embedded", "champion"])
def test_what_is_no_teacher_is_refused(text):
    with pytest.raises(UserError):
        revise_repair(RepairSettings(), text, [], None, {})


SPLITS = ("train", "validation", "test")
