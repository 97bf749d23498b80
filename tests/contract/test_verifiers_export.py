"""Prompts and rewards of a project as a task set of verifiers: the same rewards there."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from graftwork import open_project
from graftwork.grading.taskset import TasksetSpec, load_tasks, start_worker
from graftwork.records.errors import UserError
from graftwork.train.taskset_export import export_taskset, require_name

REAL = os.environ.get("GRAFT_VERIFIERS_PYTHON")
"""An interpreter with verifiers and graftwork."""
STANDIN = Path(__file__).parent / "verifiers_standin"
SETTINGS = """
project: word-lengths
base: smollm2-135m-instruct
data: {logs: [log.jsonl]}
train:
  objective: grpo
  rollouts: {source: prompts.jsonl}
  rewards: REWARDS
"""
OWN = """
def short(case, text, evidence):
    if text == "crash":
        raise KeyError("lost")
    return 1.0 if len(text) < 20 else 0.0


def right(case, text):
    return case.reference in text or text == "crash"
"""


@pytest.fixture
def project(tmp_path):
    def write(rewards):
        (tmp_path / "graft.yaml").write_text(SETTINGS.replace("REWARDS", rewards))
        (tmp_path / "log.jsonl").write_text("")
        (tmp_path / "rewards").mkdir()
        (tmp_path / "rewards" / "own.py").write_text(OWN)
        cases = [
            {"id": word, "prompt": f"How many letters has {word}?", "reference": str(len(word))}
            for word in ("rome", "paris")
        ]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
        return tmp_path

    return write


def export(folder, **options):
    with open_project(folder).open() as work:
        return export_taskset(work, folder / "sets" / "out", **options)


@pytest.mark.parametrize("python", ["stand-in", REAL] if REAL else ["stand-in"])
def test_an_exported_task_set_rewards_what_the_project_rewards(project, python):
    folder = project('[{metric: "rewards/own.py:right", gate: true}, {metric: "rewards/own.py:short"}]')
    made = export(folder)
    assert (made.name, made.tasks, made.files) == ("word-lengths", 2, ("rewards/own.py",))
    if python == "stand-in":
        python = sys.executable
        shutil.copytree(STANDIN / "verifiers", folder / "sets" / "out" / "verifiers")
    spec = TasksetSpec(python=python, name=made.name, folder="sets/out", reference="{case[reference]}")
    tasks = load_tasks(spec, folder=folder)
    assert [(case.id, case.reference) for case, _ in tasks] == [("rome", "4"), ("paris", "5")]
    worker = start_worker(spec, folder=folder, seconds=60)
    try:
        asked = [{"task": tasks[1][1], "text": text} for text in ("5", "4", "5" + " " * 30 + ".", "crash")]
        given = [worker.ask(question) for question in asked]
    finally:
        worker.end()
    assert [item.get("grade") for item in given] == [1.0, 0.0, 0.5, None]
    assert given[0]["scores"] == {"rewards/own.py:right": 1.0, "rewards/own.py:short": 1.0, "reward": 1.0}
    assert "rewards/own.py:short" in given[3]["failed"]


@pytest.mark.parametrize(
    ("rewards", "what"),
    [('[{metric: answer_match}, {metric: "rank:rewards/own.py:short"}]', "rank:rewards/own.py:short")],
)
def test_rewards_that_need_more_than_one_answer_are_not_exported(project, rewards, what):
    with pytest.raises(UserError, match=what):
        export(project(rewards))


def test_an_export_overwrites_nothing(project):
    folder = project("[{metric: answer_match}]")
    export(folder)
    with pytest.raises(UserError, match="already exists"):
        export(folder)


@pytest.mark.parametrize(("name", "expected"), [("Small functions", "small-functions"), ("a_b-c2", "a-b-c2")])
def test_a_name_becomes_one_of_a_package(name, expected):
    assert require_name(name) == expected


@pytest.mark.parametrize("name", ["2nd", "a--b", "ümlaut", "a/b", ""])
def test_a_name_that_no_package_can_have_is_refused(name):
    with pytest.raises(UserError, match="not a name for a package"):
        require_name(name)
