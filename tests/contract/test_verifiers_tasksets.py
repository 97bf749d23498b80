"""Task sets of verifiers v1 as prompts and rewards.

They run against a stand-in of the package's interface. With GRAFT_VERIFIERS_PYTHON set to the interpreter of
an environment with verifiers, they run against the package itself too.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from graftwork.grading.rewards import RewardQuestion, RewardRunner, RewardSpec
from graftwork.grading.settings import RewardSettings
from graftwork.grading.taskset import (
    TASKS_FILE,
    TasksetSpec,
    fingerprint_taskset,
    load_tasks,
    make_cases,
    taskset_folder,
)
from graftwork.records.errors import EnvironmentFailure, UserError

REAL = os.environ.get("GRAFT_VERIFIERS_PYTHON")
STANDIN = Path(__file__).parent / "verifiers_standin"
TASKSET = """
import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData]):
    @vf.reward(weight=1.0)
    async def names_it(self, trace) -> float:
        text = trace.last_reply
        if text == "crash":
            raise KeyError("lost")
        if text == "text":
            return "good"
        if text == "exit":
            raise SystemExit(0)
        while text == "hang":
            pass
        return float("nan") if text == "nan" else float(self.data.answer in text)

    @vf.reward(weight=0.5)
    async def is_whole(self, trace) -> float:
        print("printed by a reward")
        return float(not trace.is_truncated)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class CapitalsConfig(vf.TasksetConfig):
    countries: int = 3


class CapitalsTaskset(vf.Taskset[CapitalTask, CapitalsConfig]):
    def load(self):
        for country, capital in list(CAPITALS.items())[: self.config.countries]:
            prompt = f"What is the capital of {country}?"
            data = CapitalData(name=country, prompt=prompt, system_prompt="Answer briefly.", answer=capital)
            yield CapitalTask(data, self.config.task)


__all__ = ["CapitalsTaskset"]
"""


@pytest.fixture(params=["stand-in", "verifiers"] if REAL else ["stand-in"])
def project(request, tmp_path):
    """A folder with a task set, and the interpreter that runs it."""
    python = REAL
    if request.param == "stand-in":
        python = sys.executable
        shutil.copytree(STANDIN, tmp_path / "sets")
    write_taskset(tmp_path, TASKSET)
    return tmp_path, python


def write_taskset(folder, text):
    package = folder / "sets" / "capital_cities"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(text)


def spec_of(project, **changes):
    _, python = project
    return TasksetSpec(python=str(python), name="capital-cities", folder="sets", **changes)


def grade(project, *texts, truncated=False, seconds=60.0):
    folder, _ = project
    spec = spec_of(project, reference="{answer}")
    kept = taskset_folder(spec, folder)
    kept.mkdir(parents=True, exist_ok=True)
    case, data = load_tasks(spec, folder=folder)[0]
    (kept / TASKS_FILE).write_text(json.dumps({"id": "France", "data": data}) + "\n")
    rewards = RewardSpec(
        parts=(RewardSettings(metric="taskset"),),
        folder=str(folder),
        seconds=seconds,
        taskset=spec,
        fail_truncated=False,
    )
    with RewardRunner(rewards, processes=1) as runner:
        return list(
            runner.grade_all(
                [RewardQuestion(str(at), case, text, truncated) for at, text in enumerate(texts)]
            )
        )


def test_tasks_become_cases_with_prompt_and_reference(project):
    loaded = load_tasks(spec_of(project, reference="{answer}", options={"countries": 2}), folder=project[0])
    assert [case.id for case, _ in loaded] == ["France", "Italy"]
    assert [message.content for message in loaded[1][0].messages] == [
        "Answer briefly.",
        "What is the capital of Italy?",
    ]
    assert loaded[1][0].reference == "Rome"


def test_an_answer_gets_the_weighted_sum_and_a_failing_reward_costs_its_answer_only(project):
    texts = ("Paris", "Rome", "crash", "text", "nan", "exit", "Paris")
    good, cut, *bad, last = grade(project, *texts, seconds=120)
    assert (good.reward, cut.reward, last.reward) == (1.5, 0.5, 1.5)
    assert good.parts == {
        "taskset": 1.5,
        "taskset/names_it": 1.0,
        "taskset/is_whole": 1.0,
        "taskset/length": 5.0,
    }
    reasons = [item.failed["taskset"] for item in bad]
    assert [item.reward for item in bad] == [None] * 4
    expected = ["KeyError", "could not convert", "names_it returned nan", ""]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))
    hung, after = grade(project, "hang", "Paris", seconds=3)
    assert "longer than 3 s" in hung.failed["taskset"]
    # On a busy machine a good answer may take as long; it never has the failure of another one.
    assert after.reward == 1.5 or "longer than 3 s" in after.failed["taskset"]


def test_a_task_set_learns_that_an_answer_was_truncated(project):
    assert [item.reward for item in grade(project, "Paris", truncated=True)] == [1.0]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (TASKSET.replace("def names_it(self, trace)", "def names_it(self, trace, runtime)"), "names_it"),
        (TASKSET.replace("    @vf.metric", "    NEEDS_CONTAINER = True\n\n    @vf.metric"), "container"),
        (
            TASKSET.replace(
                "    @vf.metric",
                "    @classmethod\n    def toolsets(cls, config):\n        return [1]\n\n    @vf.metric",
            ),
            "has tools",
        ),
        (TASKSET.replace("@vf.reward(weight=1.0)", "").replace("@vf.reward(weight=0.5)", ""), "no rewards"),
        (TASKSET.replace("prompt=prompt, ", ""), "no prompt"),
        (TASKSET.replace("yield CapitalTask", "return CapitalTask"), "cannot be loaded"),
        ("import a_package_that_is_missing", "no task set capital-cities"),
        (TASKSET.replace("countries: int", "countries: nothing"), "cannot be opened"),
    ],
)
def test_a_task_set_that_cannot_be_graded_as_text_is_refused_by_reason(project, changed, what):
    write_taskset(project[0], changed)
    with pytest.raises(EnvironmentFailure, match=what):
        load_tasks(spec_of(project), folder=project[0])


def test_unknown_options_are_refused_with_their_name(project):
    with pytest.raises(EnvironmentFailure, match="cannot be opened") as refused:
        load_tasks(spec_of(project, options={"contries": 2}), folder=project[0])
    assert "contries" in refused.value.why


def test_a_changed_task_set_has_another_fingerprint(project):
    spec, folder = spec_of(project), project[0]
    before = fingerprint_taskset(spec, folder=folder)
    write_taskset(folder, TASKSET + "\n# changed\n")
    fingerprint_taskset.__globals__["_fingerprint"].cache_clear()
    assert len(before) == 64
    assert fingerprint_taskset(spec, folder=folder) != before


def test_an_environment_without_verifiers_is_named_with_the_command_that_installs_it(tmp_path):
    write_taskset(tmp_path, TASKSET)
    spec = TasksetSpec(python=sys.executable, name="capital-cities", folder="sets")
    with pytest.raises(EnvironmentFailure, match="verifiers is not installed") as refused:
        load_tasks(spec, folder=tmp_path)
    assert f"{sys.executable} -m pip install verifiers" in refused.value.fix


@pytest.mark.parametrize(
    ("python", "what"),
    [("envs/none/bin/python", "no Python at envs/none/bin/python"), ("/bin/true", "does not start")],
)
def test_a_wrong_interpreter_is_named(tmp_path, python, what):
    with pytest.raises(EnvironmentFailure, match=what):
        load_tasks(TasksetSpec(python=python, name="any"), folder=tmp_path)


def test_a_reference_that_names_no_field_lists_the_fields():
    tasks = [{"id": "a", "messages": [{"role": "user", "content": "q"}], "data": {"answer": "x"}}]
    with pytest.raises(UserError, match="solution") as refused:
        make_cases(tasks, name="set", reference="{solution}")
    assert "answer" in refused.value.why


def test_repeated_names_of_tasks_are_replaced_by_numbers():
    tasks = [{"id": "a", "messages": [{"role": "user", "content": "q"}], "data": {}}] * 2
    assert [case.id for case in make_cases(tasks, name="set", reference=None)] == ["set-0", "set-1"]
