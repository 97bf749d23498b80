"""The benchmark of a step of reinforcement learning: bounded turns, and a side of TRL that hashes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import rl_step
from rl_step import Work, graft_command, planned_seconds, read_setting, write_project
from rl_step_turns import Turn, compare_sides, run_turn, summarize

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SLOW = """
import json, sys, time
for number in range(3):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"at": float(number)}) + "\\n")
time.sleep(600)
"""
IMPORTS = """
import sys
sys.path.insert(0, {benchmarks!r})
from rl_step_trl import Rows, replace_datasets
replace_datasets()
import datasets
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers.utils import is_datasets_available
rows = Dataset([{{"prompt": "a"}}])
print(len(rows), rows[0]["prompt"], rows.column_names, is_datasets_available())
"""


def make_work(**changes: object) -> Work:
    return Work("tiny", "cpu", 2, 4, 64, 8, 3, 8, **changes)  # type: ignore[arg-type]


def make_turn(ends: list[float], **changes: object) -> Turn:
    return Turn(ends, [100.0] * len(ends), ends, 2.0, 2.0, **changes)  # type: ignore[arg-type]


def test_a_turn_beyond_its_limit_reports_the_steps_that_it_did(tmp_path):
    found = run_turn(
        "slow", [sys.executable, "-c", SLOW, str(tmp_path / "steps")], steps=tmp_path / "steps",
        threads=1, limit=3.0,
    )  # fmt: skip
    assert found.stopped
    assert not found.failed
    assert [json.loads(line)["at"] for line in found.lines] == [0.0, 1.0, 2.0]


def test_a_command_that_fails_is_reported_and_not_raised(tmp_path):
    found = run_turn(
        "broken", [sys.executable, "-c", "raise SystemExit('no rows')"], steps=tmp_path / "steps",
        threads=1, limit=60.0,
    )  # fmt: skip
    assert "no rows" in found.failed
    assert summarize([make_turn([], failed=found.failed)])["failed"] == "no rows"


def test_medians_need_two_steps_besides_the_first():
    assert summarize([make_turn([0.0, 4.0])])["too_few_steps"]
    assert summarize([make_turn([0.0, 4.0, 10.0])])["seconds_per_step"] == 5.0


def test_a_plan_is_compared_with_what_the_run_took():
    extra = {"planned_seconds_per_step": 6.0, "planned_gib": 3.3, "used_gib": 3.0}
    found = summarize([make_turn([0.0, 4.0, 10.0], extra=extra)])
    assert found["error_of_planned_seconds"] == pytest.approx(0.2)
    assert found["error_of_planned_gib"] == pytest.approx(0.1)


def test_sides_are_compared_only_where_both_have_figures():
    ours, theirs = {"tokens_per_second": 30.0, "peak_gib": 1.0}, {"tokens_per_second": 10.0, "peak_gib": 2.0}
    compared = compare_sides({"graftwork": ours, "trl": theirs})
    assert compared == {"tokens_per_second_ratio": 3.0, "share_of_memory": 0.5}
    assert compare_sides({"graftwork": ours, "trl": {"too_few_steps": True}}) == {}


def test_graft_is_called_as_a_module_where_there_is_no_script(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_step.sys, "executable", str(tmp_path / "python"))
    assert graft_command() == [str(tmp_path / "python"), "-m", "graftwork.cli.main"]
    (tmp_path / "graft").touch()
    assert graft_command() == [str(tmp_path / "graft")]


def test_a_capped_mix_is_in_the_project(tmp_path):
    prompts = b"".join(json.dumps({"prompt": f"Number {at}"}).encode() + b"\n" for at in range(6))
    write_project(make_work(memory_limit=16.0, supervised=0.3), tmp_path / "p", prompts=prompts)
    settings = json.loads((tmp_path / "p" / "graft.yaml").read_text())
    assert settings["plan"] == {"memory_limit_gib": 16.0}
    assert settings["train"]["mix"] == {"rl": 0.7, "sft": 0.3}
    assert len((tmp_path / "p" / "log.jsonl").read_text().splitlines()) == 6


def test_planned_seconds_are_those_of_answers_and_training():
    parts = {"minutes.compute": {"value": 1.0}, "minutes.rollouts": {"value": 2.0}}
    assert planned_seconds({"parts": parts, "steps": {"value": 4}}) == 45.0


def test_settings_of_trl_are_values_or_texts():
    assert read_setting("cache_implementation=static") == ("cache_implementation", "static")
    assert read_setting("use_liger_kernel=true") == ("use_liger_kernel", True)


def test_rows_of_trl_need_no_datasets(tmp_path):
    (tmp_path / "datasets.py").write_text("raise RuntimeError('cannot be hashed')")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(benchmarks=str(BENCHMARKS))],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2] == "1 a ['prompt'] True"
