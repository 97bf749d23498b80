"""GRPO on a task set of verifiers, through the command line, in a project without logs.

It runs against a stand-in of the package's interface. With GRAFT_VERIFIERS_PYTHON set to the interpreter of
an environment with verifiers, it runs against the package itself too.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.records.errors import UserError

REAL = os.environ.get("GRAFT_VERIFIERS_PYTHON")
STANDIN = Path(__file__).parents[1] / "contract" / "verifiers_standin"
TASKSET = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    letter: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def has_letters(self, trace) -> float:
        return min(trace.last_reply.count(self.data.letter) / 8, 1.0)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class WordsTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for letter in "aeio":
            data = WordData(name=letter, prompt=f"Write words with {letter}.", letter=letter)
            yield WordTask(data, self.config.task)


__all__ = ["WordsTaskset"]
"""


@pytest.fixture(params=["stand-in", "verifiers"] if REAL else ["stand-in"])
def project(request, tmp_path, tiny_base):
    folder, python = tmp_path / "project", REAL
    if request.param == "stand-in":
        python = sys.executable
        shutil.copytree(STANDIN, folder / "sets")
    package = folder / "sets" / "letter_words"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TASKSET)
    settings = {
        "project": "letters",
        "base": str(tiny_base),
        "train": {
            "objective": "grpo",
            "rank": 2,
            "threads": 1,
            "rollouts": {
                "steps": 2,
                "prompts": 2,
                "num_generations": 4,
                "max_completion_length": 12,
                # A random model never ends its answers by itself.
                "truncated": "grade",
                "taskset": {"name": "letter-words", "python": python, "folder": "sets"},
            },
            "rewards": [{"metric": "taskset"}],
            # Letters are paid for wherever they are, as the catalogue of hacks would find.
            "reward_checks": {"hacks": False, "preflight": False, "seconds": 60},
        },
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    return folder


def call(*arguments):
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_task_set_trains_an_adapter_without_any_log(project):
    assert call("data", "prepare", "-C", str(project))["dataset"]["splits"]["train"]["rows"] == 0
    outcome = call("train", "-C", str(project))
    assert Path(outcome["adapter_folder"], "adapter_model.safetensors").is_file()
    folder = next((project / ".graft" / "runs").iterdir())
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert steps[0]["measures"]["reward/taskset/has_letters"] == steps[0]["measures"]["reward"] > 0
    assert steps[0]["measures"]["reward/taskset/length"] > 0
    assert {part["name"] for part in outcome["residual_parts"]} >= {"minutes.rollouts", "minutes.compute"}


def test_a_project_that_trains_on_rows_still_needs_logs(project):
    settings = yaml.safe_load((project / "graft.yaml").read_text())
    settings["train"]["mix"] = {"sft": 0.3}
    (project / "graft.yaml").write_text(yaml.safe_dump(settings))
    refused = CliRunner().invoke(app, ["train", "-C", str(project)])
    assert isinstance(refused.exception, UserError)
    assert "no log file was specified" in str(refused.exception)
