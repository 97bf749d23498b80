"""The benchmark of a step of reinforcement learning: bounded turns, and a side of TRL that hashes nothing."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from rl_step import Work, write_project
from rl_step_turns import Turn, run_turn, summarize

SLOW = """
import json, sys, time
for number in range(3):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"at": float(number)}) + "\\n")
time.sleep(600)
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


def test_a_capped_mix_is_in_the_project(tmp_path):
    prompts = b"".join(json.dumps({"prompt": f"Number {at}"}).encode() + b"\n" for at in range(6))
    write_project(make_work(memory_limit=16.0, supervised=0.3), tmp_path / "p", prompts=prompts)
    settings = json.loads((tmp_path / "p" / "graft.yaml").read_text())
    assert settings["plan"] == {"memory_limit_gib": 16.0}
    assert settings["train"]["mix"] == {"sft": 0.3}
    assert len((tmp_path / "p" / "log.jsonl").read_text().splitlines()) == 6
