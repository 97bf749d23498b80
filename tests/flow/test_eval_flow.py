"""`graft eval` with subjects, cases and processes of one's own: no training, nothing asked twice."""

import json
from pathlib import Path

import pytest
from flows import opened

from graftwork.evaluate.commands import EvaluationRequest, evaluate_asked
from graftwork.records.errors import UserError


@pytest.fixture
def adapter(tiny_base, small_project) -> Path:
    """A PEFT folder in the project, made without training."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    model = load_base(tiny_base)
    shape = AdapterShape(rank=2, alpha=64, targets=("q_proj", "v_proj"), layers=(0, 1))
    for parameter in attach(model, shape, seed=1):
        parameter.data.normal_()
    save_adapter(model, small_project / "peft", shape=shape, base="tiny")
    return small_project / "peft"


def evaluate(folder, listener, **asked):
    with opened(folder, listener) as work:
        return evaluate_asked(work, EvaluationRequest(**asked))


def answers_kept(folder):
    return {path.name for path in (folder / ".graft" / "answers").rglob("*.json")}


@pytest.mark.usefixtures("adapter")
def test_subjects_are_compared_on_the_same_cases_and_kept(small_project, listener):
    subjects = ("base", "adapter:peft", "log")
    first = evaluate(small_project, listener, subjects=subjects, limit=4)
    report = first.report
    assert (report.baseline.subject, report.candidate.subject) == ("base", "adapter:peft")
    assert [other.subject for other in report.others] == ["log"]
    assert report.cases == 4
    assert {c.baseline for c in report.comparisons} == {"base", "log"}
    assert all(c.n <= 4 for c in report.comparisons)
    kept = answers_kept(small_project)
    assert len(kept) == 8
    second = evaluate(small_project, listener, subjects=subjects, limit=4)
    assert second.report.looks == 2
    assert second.report.candidate == report.candidate
    assert answers_kept(small_project) == kept
    assert "train" not in listener.done


def test_cases_of_a_file_are_asked_and_a_wrong_line_costs_nothing(small_project, listener):
    cases = small_project / "own.jsonl"
    lines = [{"prompt": f"Where is number {n}?", "reference": "there", "session": "s"} for n in range(3)]
    cases.write_text("\n".join(map(json.dumps, lines)))
    done = evaluate(small_project, listener, subjects=("base",), cases=cases)
    assert (done.report.baseline.subject, done.report.candidate.subject) == ("log", "base")
    assert done.report.cases == 3
    cases.write_text('{"prompt": "x"')
    with pytest.raises(UserError) as refused:
        evaluate(small_project, listener, subjects=("base",), cases=cases)
    assert refused.value.where == "own.jsonl:1"


def test_the_log_alone_is_refused(small_project, listener):
    with pytest.raises(UserError, match="log alone"):
        evaluate(small_project, listener, subjects=("log",))
