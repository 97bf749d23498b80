"""What cannot be looked at during training is refused when graft.yaml is read."""

import pytest

from graftwork.project.load import load_settings
from graftwork.records.errors import UserError

START = "project: x\ndata:\n  logs: [a.jsonl]\n"


@pytest.mark.parametrize(
    ("more", "output", "line"),
    [
        ("train:\n  eval: {metric: json_vald}\n", "did you mean json_valid?", 5),
        ("train:\n  eval: {metric: latency_seconds}\n", "there is no metric latency_seconds", 5),
        (
            "train:\n  eval: {early_stopping: 2}\n",
            "early_stopping counts evaluations; set `every` as well",
            5,
        ),
        (
            "train:\n  eval: {every: 5, metric: json_valid}\n  strategy: fsdp\n",
            "needs the whole model on one device",
            5,
        ),
        (
            "models:\n  a: {}\n  b:\n    train:\n      eval: {metric: answer_mach}\n",
            "models.b.train.eval.metric: there is no metric answer_mach; did you mean answer_match?",
            4,
        ),
    ],
)
def test_a_look_that_is_not_possible_is_refused_at_its_line(tmp_path, more, output, line):
    path = tmp_path / "graft.yaml"
    path.write_text(START + more)
    with pytest.raises(UserError) as caught:
        load_settings(path)
    assert output in caught.value.what
    assert caught.value.where == f"{path}:{line}"


@pytest.mark.parametrize("metric", ["loss", "json_valid", "truncated"])
def test_metrics_of_evaluation_are_available_during_training(tmp_path, metric):
    path = tmp_path / "graft.yaml"
    path.write_text(f"{START}train:\n  eval: {{every: 5, metric: {metric}, early_stopping: 2}}\n")
    assert load_settings(path).train.eval.metric == metric
