"""Repaired rows from the log to the report: trained with and without them, and compared."""

import json
import sys
from pathlib import Path

import pytest

from graftwork.api.project import open_project
from graftwork.data.settings import RepairSettings, TeacherSettings
from graftwork.files.dataset import read_rows
from graftwork.pipeline.repair import RepairJob, repair_project
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


SPLITS = ("train", "validation", "test")
