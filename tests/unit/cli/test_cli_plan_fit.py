"""`graft plan fit` as a user calls it."""

import json

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.plan.fit.answer import ACCELERATE, DEEPSPEED, GRAFT
from graftwork.records.errors import UserError

CARD = ("--gpu", "RTX 5060 Ti 16GB", "--ram", "128")
LARGE = ("--model", "deepseek-coder-6.7b", *CARD)
FIGURES = (
    "peak_allocated_gib", "peak_reserved_gib", "host_gib", "tokens_per_second", "step_seconds",
    "epoch_minutes", "run_minutes", "late_oom_chance",
)  # fmt: skip


def graft(*arguments):
    return CliRunner().invoke(app, ["plan", "fit", *arguments], catch_exceptions=True)


def test_the_example_of_the_issue_answers_with_all_its_keys():
    done = graft(*LARGE, "--method", "qlora", "--gpus", "2", "--seq", "2048", "--offload", "auto", "--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["fits"] is True
    assert answer["certainty"] == "computed"
    assert answer["strategy"]["micro_tokens"] >= 2048
    for name in FIGURES:
        figure = answer[name]
        assert figure["low"] <= figure["value"] <= figure["high"], name


def test_a_plan_that_does_not_fit_exits_with_1_and_the_whole_answer():
    done = graft(*LARGE, "--method", "full", "--gpus", "2", "--offload", "none", "--json")
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert answer["fits"] is False
    assert "GiB are lacking" in answer["verdict"]
    assert {"lora instead of full", "qlora instead of full"} <= {
        remedy["name"] for remedy in answer["remedies"]
    }


def test_ppo_is_answered_with_the_algorithm_to_use_instead():
    done = graft(*LARGE, "--algorithm", "ppo")
    assert isinstance(done.exception, UserError)
    assert "use grpo" in done.exception.fix


def test_settings_are_written_where_asked(tmp_path):
    done = graft("--model", "llama-3.2-1b", *CARD, "--method", "lora", "--write", str(tmp_path / "out"))
    assert done.exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {GRAFT, DEEPSPEED, ACCELERATE}


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        (("--seq", "long"), "--seq"),
        (("--method", "magic"), "--method"),
        (("--seq", "0"), "--seq"),
        (("--nvlink",), "--nvlink"),
        (("--claim", "30000"), "--claim"),
        (("--memory", "80"), "--memory"),
        (("--offload", "moon"), "--offload"),
    ],
)
def test_a_mistake_names_the_option(tmp_path, monkeypatch, stated, named):
    monkeypatch.chdir(tmp_path)
    done = graft(*LARGE, *stated)
    assert isinstance(done.exception, UserError)
    assert done.exception.where == named
    assert done.exception.fix


@pytest.mark.parametrize(
    "option", ["--rows", "--epochs", "--batch", "--rank", "--link", "--memory", "--claim", "--prompt"]
)
def test_nothing_and_less_are_refused_instead_of_replaced_by_what_is_usual(option):
    for number in ("0", "-1"):
        done = graft(*LARGE, option, number)
        assert done.exit_code == 2
        assert option in done.output


def test_without_a_model_or_a_project_it_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = graft(*CARD)
    assert isinstance(done.exception, UserError)
    assert "--model" in done.exception.fix
