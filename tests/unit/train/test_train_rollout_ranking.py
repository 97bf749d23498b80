"""Judges that rank a group, the measures of a batch, and its best and worst answers."""

import pytest

from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train.rollouts.episodes import AnswerVerdict, SampledAnswer
from graftwork.train.rollouts.measures import describe_extremes, find_extremes, measure_groups
from graftwork.train.rollouts.source import GroupRanking
from graftwork.train.settings import RewardSettings

JUDGE = RewardSettings(metric="rank:rewards/own.py:order")
OTHER = RewardSettings(metric="task_success")
CASE = Case(
    id="a",
    origin=Origin(file="cases.jsonl", line=1),
    messages=(Message(role="user", content="q"),),
    reference="r",
)


def answer(number, text="text", **fields):
    return SampledAnswer(prompt="a", answer=number, tokens=(1, 2), logprobs=(-1.0, -2.0), text=text, **fields)


def verdict(number, reward, **fields):
    return AnswerVerdict(key=f"a/{number}", reward=reward, **fields)


class Judge:
    def __init__(self, grades=(0.0, 1.0), failed=""):
        self.asked = []
        self._given = (None if failed else list(grades)), failed

    def rank(self, metric, case, texts):
        self.asked.append((metric, case.id, list(texts)))
        return self._given


def break_ties(rewards, *, parts=(OTHER, JUDGE), judge=None, report=lambda _message: None, **fields):
    judge = judge or Judge()
    answers = [answer(number, f"text {number}") for number in range(len(rewards))]
    verdicts = {f"a/{number}": verdict(number, reward, **fields) for number, reward in enumerate(rewards)}
    ranking = GroupRanking(parts, judge)
    found = list(ranking.break_ties(answers, verdicts, {"a": (CASE, [1])}, report=report))
    return [item.reward for item in found], judge


def test_a_judge_decides_where_the_other_rewards_tie():
    rewards, judge = break_ties([1.0, 1.0])
    assert rewards == [0.5, 1.0]
    assert judge.asked == [(JUDGE.metric, "a", ["text 0", "text 1"])]


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.0, 0.0], [None, None]])
def test_a_judge_is_not_asked_where_rewards_differ_a_gate_failed_or_nothing_was_graded(rewards):
    found, judge = break_ties(rewards)
    assert not found
    assert not judge.asked


def test_a_judge_alone_is_the_reward():
    assert break_ties([None, None], parts=(JUDGE,))[0] == [0.0, 1.0]


def test_a_group_is_not_ranked_twice():
    judge = Judge()
    again = GroupRanking((OTHER, JUDGE), judge)
    ranked = {f"a/{n}": verdict(n, 1.0, parts={JUDGE.metric: 0.5}) for n in range(2)}
    assert not list(again.break_ties([answer(0), answer(1)], ranked, {"a": (CASE, [1])}, report=print))
    assert not judge.asked


def test_a_judge_that_is_down_is_named_and_changes_nothing():
    messages = []
    found, _ = break_ties([1.0, 1.0], judge=Judge(failed="connection refused"), report=messages.append)
    assert not found
    assert JUDGE.metric in messages[0]
    assert "connection refused" in messages[0]


def test_the_best_and_the_worst_answer_of_a_batch_are_shown_without_decoys():
    groups = [
        [(answer(0, "good"), verdict(0, 1.0)), (answer(1, "bad"), verdict(1, 0.0))],
        [(answer(2, "caught", decoy=True), verdict(2, 5.0))],
    ]
    best, worst = find_extremes(groups)
    assert (best[0].text, worst[0].text) == ("good", "bad")
    assert describe_extremes(groups) == "best 1.00 a 'good'; worst 0.00 a 'bad'"
    assert describe_extremes([]) == "no answer was graded"


def test_the_cost_of_each_part_of_the_reward_is_measured():
    costs = {"cheap": 0.1, "dear": 2.0}
    group = [
        (answer(0), verdict(0, 1.0, part_seconds=costs)),
        (answer(1), verdict(1, 0.0, part_seconds={"cheap": 0.3})),
    ]
    found = measure_groups([group])
    assert found["seconds/cheap"] == pytest.approx(0.2)
    assert found["seconds/dear"] == pytest.approx(2.0)


def test_a_group_that_was_half_ranked_when_the_run_was_killed_is_ranked_to_its_end():
    answers = [answer(number, f"text {number}") for number in range(2)]
    verdicts = {
        "a/0": verdict(0, 0.5, parts={JUDGE.metric: 0.0}),
        "a/1": verdict(1, 1.0),
    }
    ranking = GroupRanking((OTHER, JUDGE), Judge(grades=(0.0, 0.6)))
    found = list(ranking.break_ties(answers, verdicts, {"a": (CASE, [1])}, report=lambda _message: None))
    assert [(item.key, item.reward) for item in found] == [("a/1", 0.8)]


def test_two_judges_without_other_rewards_both_count():
    second = RewardSettings(metric="rank:rewards/own.py:other")
    rewards, _ = break_ties([None, None], parts=(JUDGE, second), judge=Judge(grades=(1.0, 0.5)))
    assert rewards == [1.0, 0.5]


def test_an_answer_that_was_cut_off_is_not_rewarded_by_a_judge():
    rewards, _ = break_ties([None, 0.0], parts=(JUDGE,), judge=Judge(grades=(0.2, 1.0)))
    assert rewards == [0.2]
