"""Rewards: parts put together, and graded in child processes that may hang or die."""

import pytest

from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.rewards import (
    RewardQuestion,
    RewardRunner,
    RewardSpec,
    combine_parts,
    grade_part,
    ordered_parts,
    rank_answers,
)
from graftwork.grading.settings import RewardSettings
from graftwork.process.sandbox import SandboxSettings, open_sandbox
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

OWN = """
import os

def reward(case, text, evidence):
    print("ready")
    if text == "hang":
        while True:
            pass
    if text == "die":
        os._exit(3)
    if text == "nan":
        return float("nan")
    if text == "text":
        return "good"
    if text == "large":
        return 7
    if text == "nothing":
        return None
    if text == "raise":
        raise KeyError("lost")
    return evidence["grades"]["answer_match"] if text == "evidence" else 0.5
"""
CASE = Case(
    id="a", origin=Origin(file="f", line=1), messages=(Message(role="user", content="q"),), reference="right"
)


def grade_texts(folder, texts, *, seconds):
    spec = RewardSpec(parts=(RewardSettings(metric="own.py:reward"),), folder=str(folder), seconds=seconds)
    questions = [RewardQuestion(str(number), CASE, text) for number, text in enumerate(texts)]
    with RewardRunner(spec, processes=1) as runner:
        return list(runner.grade_all(questions))


def test_a_reward_function_that_misbehaves_costs_its_answer_only(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    expected = {
        "good": "",
        "die": "exit code 3",
        "nan": "returned nan",
        "text": "returned str",
        "large": "returned 7",
        "nothing": "",
        "raise": "lost",
    }
    *graded, last = grade_texts(tmp_path, [*expected, "good"], seconds=120)
    assert [item.reward for item in graded] == [0.5, None, None, None, None, None, None]
    assert last.reward == 0.5
    for item, reason in zip(graded, expected.values(), strict=True):
        assert reason in item.failed.get("own.py:reward", "")
        assert bool(item.failed) == bool(reason)


def test_a_reward_function_that_hangs_is_left_at_its_limit(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    hung, after = grade_texts(tmp_path, ["hang", "good"], seconds=2)
    assert (hung.reward, "longer than 2 s" in hung.failed["own.py:reward"]) == (None, True)
    # On a busy machine a good answer may take as long; it never has the failure of another one.
    assert after.reward == 0.5 or "longer than 2 s" in after.failed["own.py:reward"]


HANGING_CASE = CASE.model_copy(
    update={
        "reference": "def add(a, b):\n    return a + b\n",
        "checks": tuple(
            {"python_calls": [{"call": "add", "args": [number, 2], "gives": number + 2}]}
            for number in range(3)
        ),
    }
)


def test_an_answer_whose_code_hangs_is_wrong_and_counts():
    """It is the answer that hangs, not the reward: left out, it would cost the model nothing."""
    try:
        open_sandbox(SandboxSettings())
    except EnvironmentFailure:
        pytest.skip("no way to shut code in works here")
    spec = RewardSpec(
        parts=(RewardSettings(metric="checks_passed"),), folder="", sandbox={"seconds": 3600}, seconds=5
    )
    texts = [
        HANGING_CASE.reference,
        "def add(a, b):\n    while True:\n        pass\n",
        HANGING_CASE.reference,
    ]
    with RewardRunner(spec, processes=1) as runner:
        graded = list(
            runner.grade_all([RewardQuestion(str(at), HANGING_CASE, text) for at, text in enumerate(texts)])
        )
    assert [(item.reward, item.failed) for item in graded] == [(1.0, {}), (0.0, {}), (1.0, {})]


def test_gates_decide_before_weights():
    parts = (RewardSettings(metric="style", weight=0.5), RewardSettings(metric="passes", gate=True))
    assert [part.metric for part in ordered_parts(parts)] == ["passes", "style"]
    assert combine_parts(parts, {"passes": 0.0, "style": 1.0}) == 0.0
    assert combine_parts(parts, {"passes": 1.0, "style": 0.0}) == pytest.approx(2 / 3)
    assert combine_parts(parts, {"passes": None, "style": 1.0}) == 1.0
    assert combine_parts(parts, {}) is None


def test_an_answer_that_passes_its_gate_is_never_worth_less_than_one_that_does_not():
    parts = (
        RewardSettings(metric="trl:own.py:penalty", weight=2.0),
        RewardSettings(metric="passes", gate=True),
    )
    assert combine_parts(parts, {"passes": 1.0, "trl:own.py:penalty": -3.0}) == 0.0
    assert combine_parts(parts[:1], {"trl:own.py:penalty": -3.0}) == -3.0


TRL_STYLE = """
def lengths(prompts, completions, reference, **kwargs):
    assert prompts[0][0]["role"] == "user"
    return [len(completion[0]["content"]) - len(right) for completion, right in zip(completions, reference)]

async def later(completions, **kwargs):
    return [None if completion[0]["content"] == "skip" else 0.25 for completion in completions]

def nonsense(completions, **kwargs):
    return 1.0

def order(case, texts):
    return [0.5] if len(texts) == 3 else [float(text == case.reference) for text in texts]
"""


def test_rewards_with_the_signature_of_trl_are_graded(tmp_path):
    (tmp_path / "own.py").write_text(TRL_STYLE)
    context = GradeContext(folder=tmp_path)

    def grade(name, text):
        return grade_part(f"trl:own.py:{name}", CASE, text, context=context, evidence={})

    assert grade("lengths", "right") == 0.0
    assert grade("lengths", "right there") == 6.0
    assert grade("later", "x") == 0.25
    assert grade("later", "skip") is None
    with pytest.raises(CannotGrade, match="no list with one number"):
        grade("nonsense", "x")


def test_a_ranking_function_grades_every_answer_of_its_group_or_fails(tmp_path):
    (tmp_path / "own.py").write_text(TRL_STYLE)
    metric = "rank:own.py:order"
    context = GradeContext(folder=tmp_path)
    assert rank_answers(metric, CASE, ["wrong", "right"], context=context) == [0.0, 1.0]
    with pytest.raises(CannotGrade, match="1 numbers for 3 answers"):
        rank_answers(metric, CASE, ["a", "b", "c"], context=context)
