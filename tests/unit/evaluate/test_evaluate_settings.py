"""What graft.yaml may say about evaluation, and that the gate can name only what is measured."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from graftwork.evaluate.settings import EvaluateSettings, known_metrics, require_evaluated
from graftwork.grading.checks import KINDS
from graftwork.grading.metrics import ALWAYS_MEASURED, GRADERS, OPTIONAL_MEASURED, WITH_CONTEXT
from graftwork.project.load import load_settings
from graftwork.records.errors import UserError

START = "project: p\ndata:\n  logs: [log.jsonl]\n"
DOCS = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
JUDGE = {"url": "http://localhost:1/v1", "model": "m", "modes": ["pairwise", "pointwise"]}


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        (tmp_path / "graft.yaml").write_text(START + text)
        return load_settings(tmp_path / "graft.yaml")

    return write_and_load


def test_checks_are_read_from_graft_yaml_in_brief_and_in_full(load):
    settings = load(
        "evaluate:\n"
        "  checks:\n"
        "    - {name: polite, contains: please, where: {role: planner}}\n"
        "    - {name: short, metric: format, max_words: 80}\n"
        "    - {name: house_rule, metric: metrics/own.py:house_rule}\n"
    ).evaluate
    assert [check.name for check in settings.checks] == ["polite", "short", "house_rule"]
    assert settings.checks[0].where.role == ("planner",)
    assert settings.checks[1].model_extra == {"max_words": 80}
    assert EvaluateSettings.from_json(settings.to_json()) == settings


def test_only_the_metrics_in_the_settings_are_measured():
    settings = EvaluateSettings.model_validate(
        {
            "metrics": ["token_f1", "task_success"],
            "checks": [{"name": "short", "metric": "format", "max_words": 9}],
            "judge": JUDGE,
            "perplexity": True,
        }
    )
    assert settings.graded == ("token_f1", "task_success", "short", "judge_score")
    known = known_metrics(settings)
    assert set(settings.graded) < set(known)
    assert {"latency_seconds", "peak_memory_gib", "truncated", "reference_perplexity"} <= set(known)
    require_evaluated("judge_preference", settings)
    assert "reference_perplexity" not in known_metrics(EvaluateSettings())


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("token_f1", "add it to evaluate.metrics"),
        ("reference_perplexity", "evaluate.perplexity"),
        ("judge_score", "evaluate.judge"),
        ("json_vald", "did you mean json_valid"),
    ],
)
def test_a_rule_about_what_nobody_measures_is_refused_with_the_fix(name, reported):
    with pytest.raises(ValueError, match=reported):
        require_evaluated(name, EvaluateSettings())


def test_the_gate_may_only_name_what_is_evaluated(load):
    with pytest.raises(UserError, match="json_valid is not evaluated") as caught:
        load("evaluate:\n  metrics: [answer_match]\ngate:\n  rules:\n    - {metric: json_valid, over: 0.9}\n")
    assert caught.value.where.endswith(":7")
    with pytest.raises(UserError, match="primary: the metric refusal_correct is not evaluated"):
        load(
            "evaluate:\n  metrics: [answer_match]\n"
            "gate:\n  rules:\n    - {metric: answer_match, over: 0.9}\n  primary: refusal_correct\n"
        )
    load("evaluate:\n  metrics: [answer_match]\n")


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"metrics": ["jason_valid"]}, "did you mean json_valid"),
        ({"metrics": ["contains"]}, "no metric contains"),
        ({"checks": [{"name": "json_valid", "contains": "x"}]}, "is a metric already"),
        ({"checks": [{"name": "a", "contains": "x"}, {"name": "a", "contains": "y"}]}, "two checks"),
        ({"repeats": 3}, "same answer"),
        ({"subjects": ["chamption"]}, "is not a subject"),
        ({"subjects": ["http://host/v1"]}, "cannot be used"),
        ({"slices": ["rle"]}, "slices"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"fields": {"json_schema": {"typ": "x"}}}, "did you mean type"),
        ({"judge": {"url": "localhost", "model": "m"}}, "http://"),
    ],
)
def test_contradictory_settings_are_refused(wrong, reported):
    with pytest.raises(ValidationError, match=reported):
        EvaluateSettings.model_validate(wrong)


def test_the_graft_yaml_in_the_docs_can_be_loaded(load):
    shown = [block for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL) if "evaluate:" in block]
    assert len(shown) >= 2
    for block in shown:
        load(block)


def test_the_docs_name_every_metric_and_rule():
    for name in (*GRADERS, *WITH_CONTEXT, *ALWAYS_MEASURED, *OPTIONAL_MEASURED, *KINDS):
        assert f"`{name}`" in DOCS, name
