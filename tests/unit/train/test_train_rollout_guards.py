"""Preflight, canaries and the audit half: training stops before it learns nothing or the wrong thing."""

import pytest
from pydantic import ValidationError

from graftwork.grading.reward_runner import GradedParts
from graftwork.records.errors import AnswerIsNo
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train.rollouts.episodes import EpisodeJournal, SampledAnswer
from graftwork.train.rollouts.preflight import (
    are_apart,
    make_canaries,
    read_preflight,
    split_checks,
)
from graftwork.train.rollouts.source import RolloutParts, RolloutSource
from graftwork.train.settings import TrainSettings

CALLS = [{"call": "f", "args": [number], "gives": number + 1} for number in range(6)]


def make_case(name="case", **fields):
    return Case(
        id=name,
        origin=Origin(file="cases.jsonl", line=1),
        messages=(Message(role="user", content="q"),),
        reference="right",
        **fields,
    )


class FixedSampler:
    """Answers by their number: "0", "1", …"""

    def __init__(self):
        self.asked = []

    def sample(self, batch, prompts, *, progress=lambda: None):
        self.asked.append([prompt.id for prompt in prompts])
        return [
            SampledAnswer(
                prompt=prompt.id,
                answer=number,
                tokens=(7, 2),
                logprobs=(-1.0, -0.5),
                text=str(number),
                canary=prompt.canary,
            )
            for prompt in prompts
            for number in range(4)
        ]


class FixedGrader:
    def __init__(self, reward):
        self.reward = reward
        self.graded = []

    def grade_all(self, questions):
        for question in questions:
            self.graded.append(question.key)
            value = self.reward(question)
            yield GradedParts(question.key, value, {"m": value}, {}, 0.01)


def make_source(folder, reward, *, canaries=0, audit=None, **changes):
    settings = TrainSettings.model_validate(
        {
            "objective": "grpo",
            "rewards": [{"metric": "task_success"}],
            "rollouts": {"steps": 6, "prompts": 2, "answers": 4, "max_tokens": 4},
            **changes,
        }
    )
    cases = [make_case(f"case{number}") for number in range(5)]
    cases += make_canaries(cases, count=canaries, seed=1)
    parts = RolloutParts(
        settings=settings,
        prompts={case.id: (case, [1, 2, 3]) for case in cases},
        sampler=FixedSampler(),
        grader=FixedGrader(reward),
        journal=EpisodeJournal(folder),
        audit=audit or {},
    )
    return RolloutSource(parts), parts


def by_number(question):
    return float(question.text == "1")


def test_a_batch_with_signal_becomes_rows_with_advantages(tmp_path):
    source, _ = make_source(tmp_path, by_number)
    rows = source.batch(1)
    assert len(rows) == 8
    assert sum(row.advantage for row in rows) == pytest.approx(0.0)
    assert sum(row.scale * 2 for row in rows) == pytest.approx(1.0)
    assert source.measures(1)["pass@1"] == 0.25
    assert source.accept_gradient(1, None, rows)


def test_a_journaled_batch_is_neither_sampled_nor_graded_again(tmp_path):
    first, _ = make_source(tmp_path, by_number)
    rows = first.batch(1)
    again, parts = make_source(tmp_path, by_number)
    assert again.batch(1) == rows
    assert parts.sampler.asked == []
    assert parts.grader.graded == []


def test_a_resumed_source_chooses_the_same_prompts(tmp_path):
    first, parts = make_source(tmp_path / "a", by_number)
    for step in (1, 2):
        first.batch(step)
    state = first.state()
    first.batch(3)
    resumed, other = make_source(tmp_path / "b", by_number)
    resumed.restore(state)
    resumed.batch(3)
    assert other.sampler.asked == [parts.sampler.asked[2]]


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (lambda _q: 0.0, "sft"),
        (lambda _q: 1.0, "nothing is left to learn"),
        (lambda _q: 0.4, "same reward|sft"),
    ],
)
def test_preflight_stops_where_there_is_nothing_to_learn(tmp_path, reward, advice):
    source, _ = make_source(tmp_path, reward)
    with pytest.raises(AnswerIsNo, match="nothing to learn") as stopped:
        source.batch(1)
    assert any(word in stopped.value.fix for word in advice.split("|"))


def test_dead_groups_are_skipped_and_an_empty_batch_changes_nothing(tmp_path):
    source, _ = make_source(tmp_path, lambda _q: 0.0, reward_checks={"preflight": False})
    rows = source.batch(1)
    assert not source.accept_gradient(1, None, rows)
    assert all(row.scale == 0 for row in rows)
    assert source.measures(1)["dead_groups"] == 1.0


def test_a_batch_that_no_reward_could_grade_stops_the_run(tmp_path):
    source, _ = make_source(tmp_path, lambda _q: None, reward_checks={"preflight": False})
    with pytest.raises(AnswerIsNo, match="no answer of batch 1 could be graded"):
        source.batch(1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "full", "policy": {"kl": 0.05}}, "second copy"),
        ({"rollouts": {"temperature": 0.7}}, "temperature 1"),
    ],
)
def test_settings_that_would_be_ignored_or_biased_are_refused(changes, why):
    with pytest.raises(ValidationError, match=why):
        TrainSettings.model_validate(
            {"objective": "grpo", "rewards": [{"metric": "task_success"}], **changes}
        )


def test_a_rewarded_canary_stops_the_run(tmp_path):
    source, parts = make_source(tmp_path, by_number, canaries=2)
    with pytest.raises(AnswerIsNo, match="canary"):
        source.batch(1)
    assert sum(name.startswith("canary/") for name in parts.sampler.asked[0]) == 2


def test_canaries_that_get_nothing_are_not_trained_on(tmp_path):
    source, _ = make_source(tmp_path, lambda q: by_number(q) * (q.case.reference == "right"), canaries=2)
    rows = source.batch(1)
    assert len(rows) == 8
    assert not any("canary" in row.id for row in rows)
    source.batch(2)


def test_reward_and_audit_that_part_ways_stop_the_run(tmp_path):
    audit = {f"case{number}": make_case("audited") for number in range(5)}
    source, _ = make_source(
        tmp_path, lambda q: 0.0 if q.case.id == "audited" else float(q.text != "1"), audit=audit
    )
    source.batch(1)
    source.batch(2)
    assert source.measures(2)["audit"] == 0.0
    with pytest.raises(AnswerIsNo, match="apart"):
        source.batch(3)


def test_canaries_cannot_be_solved():
    case = make_case(
        checks=({"python_calls": CALLS}, {"python_tests": "assert f(1) == 2"}, {"contains": "x"})
    )
    (canary,) = make_canaries([case], count=1, seed=3)
    assert canary.id == "canary/case"
    assert canary.reference.startswith("secret-")
    assert all(call["gives"] == canary.reference for call in canary.checks[0]["python_calls"])
    assert "assert False" in canary.checks[1]["python_tests"]
    assert canary.checks[2]["contains"] == canary.reference


def test_audit_and_reward_share_no_call():
    case = make_case(checks=({"python_calls": CALLS},))
    rewarding, audit = split_checks(case, share=0.5, seed=1)
    first, second = (found.checks[0]["python_calls"] for found in (rewarding, audit))
    assert len(first) == len(second) == 3
    assert sorted(call["args"] for call in first + second) == [[number] for number in range(6)]
    assert split_checks(case, share=0.0, seed=1) == (case, None)
    assert split_checks(make_case(checks=({"contains": "x"},)), share=0.5, seed=1)[1] is None


def test_parting_needs_three_batches_in_a_row():
    assert are_apart([(0.9, 0.1)] * 3, limit=0.3)
    assert not are_apart([(0.9, 0.1)] * 2, limit=0.3)
    assert not are_apart([(0.9, 0.1), (0.5, 0.4), (0.9, 0.1)], limit=0.3)


def test_preflight_counts_prompts_in_a_night():
    found = read_preflight({"dead_groups": 0.5, "pass@1": 0.2}, prompts=8, seconds=16)
    assert found.prompts_a_night == 14_400
    assert found.advice() is None
    assert "50%" in found.describe()
