"""Rewards: parts put together, and graded in child processes that may hang or die."""

import pytest

from graftwork.grading.reward_runner import RewardQuestion, RewardRunner
from graftwork.grading.rewards import RewardPart, RewardSpec, combine_parts, ordered_parts
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


def test_a_reward_function_that_misbehaves_costs_its_answer_only(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    spec = RewardSpec(parts=(RewardPart(metric="own.py:reward"),), folder=str(tmp_path), seconds=1.5)
    texts = ["good", "hang", "die", "nan", "text", "large", "nothing", "raise", "good"]
    with RewardRunner(spec, processes=1) as runner:
        graded = list(
            runner.grade_all([RewardQuestion(str(at), CASE, text) for at, text in enumerate(texts)])
        )
    assert [item.reward for item in graded] == [0.5, None, None, None, None, None, None, None, 0.5]
    reasons = [item.failed.get("own.py:reward", "") for item in graded]
    for reason, expected in zip(
        reasons,
        [
            "",
            "longer than 1.5 s",
            "exit code 3",
            "returned nan",
            "returned str",
            "returned 7",
            "",
            "lost",
            "",
        ],
        strict=True,
    ):
        assert expected in reason
        assert bool(reason) == bool(expected)


def test_gates_decide_before_weights():
    parts = (RewardPart(metric="style", weight=0.5), RewardPart(metric="passes", gate=True))
    assert [part.metric for part in ordered_parts(parts)] == ["passes", "style"]
    assert combine_parts(parts, {"passes": 0.0, "style": 1.0}) == 0.0
    assert combine_parts(parts, {"passes": 1.0, "style": 0.0}) == pytest.approx(2 / 3)
    assert combine_parts(parts, {"passes": None, "style": 1.0}) == 1.0
    assert combine_parts(parts, {}) is None
