"""Cases of a file are refused where a run is trained on their prompts."""

import json
from types import SimpleNamespace

import pytest

from graftwork.evaluate import project_subjects
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.train.settings import TrainSettings

SPLITS = {"train": ["of a row"], "rl": ["of the rl split"]}


def write_cases(path, *questions):
    rows = [
        {"id": f"c{number}", "messages": [{"role": "user", "content": question}], "reference": "yes"}
        for number, question in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a file with one case, which asks `question`."""

    def rows(_folder, split):
        return [
            SimpleNamespace(messages=(Message(role="user", content=question),)) for question in SPLITS[split]
        ]

    monkeypatch.setattr(project_subjects, "iterate_rows", rows)

    def read(question, **train):
        write_cases(tmp_path / "cases.jsonl", question)
        write_cases(tmp_path / "prompts.jsonl", "of the file")
        evaluate = SimpleNamespace(cases="cases.jsonl", checks=(), max_cases=9)
        settings = SimpleNamespace(evaluate=evaluate, train=TrainSettings.model_validate(train))
        work = SimpleNamespace(settings=settings, project=SimpleNamespace(root=tmp_path))
        return project_subjects.read_held_out(work, tmp_path)

    return read


def grpo(source):
    return {"objective": "grpo", "rewards": [{"metric": "task_success"}], "rollouts": {"source": source}}


@pytest.mark.parametrize(
    ("question", "train"),
    [
        ("of a row", {}),
        ("of a row", grpo("rl")),
        ("of the rl split", grpo("rl")),
        ("of the file", grpo("prompts.jsonl")),
    ],
)
def test_cases_that_are_trained_on_are_refused(read, question, train):
    with pytest.raises(UserError, match="c0 is a training row"):
        read(question, **train)


@pytest.mark.parametrize(
    ("question", "train"),
    [
        ("of the rl split", {}),
        ("of the rl split", grpo("train")),
        ("of the file", grpo("rl")),
        ("of nowhere", grpo("prompts.jsonl")),
    ],
)
def test_cases_that_the_run_does_not_answer_are_allowed(read, question, train):
    assert len(read(question, **train)) == 1
