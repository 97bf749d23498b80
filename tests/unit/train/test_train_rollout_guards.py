"""The guards of a run with rewards, and a judge that ranks the answers of a group."""

import pytest
from pydantic import ValidationError
from sample_rows import make_row

from graftwork.grading.interface import GradeContext
from graftwork.grading.rewards import AnswerVerdict, grade_part
from graftwork.grading.settings import RewardSettings
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train.rollouts.episodes import EpisodeJournal, EpisodeTurn, SampledAnswer
from graftwork.train.rollouts.measures import (
    advise,
    are_apart,
    describe_extremes,
    describe_signal,
    describe_too_long,
    find_extremes,
    find_too_long,
    make_decoys,
    measure_groups,
    split_checks,
)
from graftwork.train.rollouts.source import GroupRanking, RolloutSource
from graftwork.train.settings import TrainSettings, describe_idle

GRPO = {"objective": "grpo", "rewards": [{"metric": "task_success"}]}
NO_STOP = {"preflight": False}
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
                decoy=prompt.decoy,
            )
            for prompt in prompts
            for number in range(4)
        ]


class FixedGrader:
    """`reward` gives a number, None, or the reason for which it failed."""

    def __init__(self, reward):
        self.reward = reward
        self.graded = []

    def grade_all(self, questions):
        for question in questions:
            self.graded.append(question.key)
            value = self.reward(question)
            failed = {"judge": value} if isinstance(value, str) else {}
            value = None if failed else value
            yield AnswerVerdict(
                key=question.key, reward=value, parts={"m": value}, failed=failed, seconds=0.01
            )


def make_source(
    folder, reward, *, decoys=0, audit=None, supervised=(), report=lambda _message: None, **changes
):
    settings = TrainSettings.model_validate(
        {
            "objective": "grpo",
            "rewards": [{"metric": "task_success"}],
            "rollouts": {"steps": 6, "prompts": 2, "num_generations": 4, "max_completion_length": 4},
            **changes,
        }
    )
    cases = [make_case(f"case{number}") for number in range(5)]
    cases += make_decoys(cases, count=decoys, seed=1)
    return RolloutSource(
        settings=settings,
        prompts={case.id: (case, [1, 2, 3]) for case in cases},
        sampler=FixedSampler(),
        grader=FixedGrader(reward),
        journal=EpisodeJournal(folder),
        audit=audit or {},
        supervised=supervised,
        report=report,
    )


def by_number(question):
    return float(question.text == "1")


def test_a_batch_with_signal_becomes_rows_with_advantages(tmp_path):
    source = make_source(tmp_path, by_number)
    rows = source.batch(1)
    assert len(rows) == 8
    assert sum(row.advantage for row in rows) == pytest.approx(0.0)
    assert sum(row.scale * 2 for row in rows) == pytest.approx(1.0)
    assert source.measures(1)["pass@1"] == 0.25
    assert source.accept_gradient(1, None, rows)


def test_a_mix_changes_no_weight_where_neither_part_has_anything_to_learn(tmp_path):
    """An update by a gradient of zeros would go on in the direction of the steps before."""
    row = make_row("row", (1, 2, 3), 1, reply="right")
    source = make_source(
        tmp_path,
        lambda question: float(question.text == "1" and question.key.startswith("case0")),
        supervised=[row],
        rollouts={"steps": 3, "prompts": 5, "num_generations": 4, "max_completion_length": 4},
        mix={"sft": 0.3, "decay": "to_zero"},
        reward_checks=NO_STOP,
    )
    accepted = []
    for step in (1, 2, 3):
        if step > 1:
            source.grader.reward = lambda _question: 0.0
        rows = source.batch(step)
        accepted.append((source.accept_gradient(step, None, rows), any(row.scale for row in rows)))
    assert accepted == [(True, True), (True, True), (False, False)]


def test_a_journaled_batch_is_neither_sampled_nor_graded_again(tmp_path):
    first = make_source(tmp_path, by_number)
    rows = first.batch(1)
    again = make_source(tmp_path, by_number)
    assert again.batch(1) == rows
    assert again.sampler.asked == []
    assert again.grader.graded == []


def test_a_resumed_source_chooses_the_same_prompts(tmp_path):
    first = make_source(tmp_path / "a", by_number)
    for step in (1, 2):
        first.batch(step)
    state = first.state()
    first.batch(3)
    resumed = make_source(tmp_path / "b", by_number)
    resumed.restore(state)
    resumed.batch(3)
    assert resumed.sampler.asked == [first.sampler.asked[2]]


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (lambda _q: 0.0, "sft"),
        (lambda _q: 1.0, "nothing is left to learn"),
        (lambda _q: 0.4, "same reward|sft"),
    ],
)
def test_preflight_stops_where_there_is_nothing_to_learn(tmp_path, reward, advice):
    source = make_source(tmp_path, reward)
    # Two of the five prompts at a time: of fewer than all, each may be without a signal by chance.
    for step in (1, 2):
        assert not source.accept_gradient(step, None, source.batch(step))
    with pytest.raises(NegativeResult, match="nothing to learn") as stopped:
        source.batch(3)
    assert any(word in stopped.value.fix for word in advice.split("|"))


def test_preflight_stops_at_the_last_batch_at_the_latest(tmp_path):
    rollouts = {"steps": 2, "prompts": 2, "num_generations": 4, "max_completion_length": 4}
    source = make_source(tmp_path, lambda _q: 0.0, rollouts=rollouts)
    source.batch(1)
    with pytest.raises(NegativeResult, match="nothing to learn"):
        source.batch(2)


def test_a_signal_ends_the_preflight_and_a_resumed_run_goes_on_with_it(tmp_path):
    words = []
    source = make_source(
        tmp_path, lambda q: float(q.text == "1" and first_of(q) in later), report=words.append
    )
    later = set()
    source.batch(1)
    assert any("hardly any of 2 prompts" in word for word in words)
    resumed = make_source(tmp_path, lambda _q: 0.0)
    resumed.restore(source.state())
    resumed.batch(2)
    with pytest.raises(NegativeResult, match="nothing to learn"):
        resumed.batch(3)
    later = {f"case{number}" for number in range(5)}
    source.batch(4)
    for step in (5, 6):
        source.batch(step)
    assert source.state()["looked"][2]


def first_of(question):
    return question.key.rpartition("/")[0]


def test_dead_groups_are_skipped_and_an_empty_batch_changes_nothing(tmp_path):
    source = make_source(tmp_path, lambda _q: 0.0, reward_checks={"preflight": False})
    rows = source.batch(1)
    assert not source.accept_gradient(1, None, rows)
    assert all(row.scale == 0 for row in rows)
    assert source.measures(1)["dead_groups"] == 1.0


def test_a_batch_that_no_reward_could_grade_stops_the_run(tmp_path):
    source = make_source(tmp_path, lambda _q: None, reward_checks={"preflight": False})
    with pytest.raises(NegativeResult, match="no answer of batch 1 could be graded"):
        source.batch(1)


def test_rewards_that_return_nothing_are_named_with_their_prompts(tmp_path):
    source = make_source(tmp_path, lambda _q: None)
    with pytest.raises(NegativeResult) as stopped:
        source.batch(1)
    assert "task_success gave no grade to any answer to case" in stopped.value.why


def test_a_judge_that_was_down_is_asked_again_when_the_run_is_resumed(tmp_path):
    down = make_source(tmp_path, lambda _q: "connection refused")
    with pytest.raises(NegativeResult) as stopped:
        down.batch(1)
    assert "the reward judge failed on the answer case" in stopped.value.why
    assert "connection refused" in stopped.value.why
    resumed = make_source(tmp_path, by_number)
    assert len(resumed.batch(1)) == 8
    assert resumed.sampler.asked == []
    assert resumed.grader.graded == down.grader.graded


def test_answers_that_one_failing_reward_cost_are_not_asked_about_again(tmp_path):
    source = make_source(tmp_path, lambda q: "lost" if q.text == "3" else by_number(q))
    rows = source.batch(1)
    again = make_source(tmp_path, by_number)
    assert again.batch(1) == rows
    assert again.grader.graded == []


def test_a_reward_that_fails_on_many_answers_is_named_three_times_and_counted(tmp_path):
    messages = []
    source = make_source(
        tmp_path, lambda q: "nan" if q.text != "1" else 1.0, report=messages.append, reward_checks=NO_STOP
    )
    source.batch(1)
    failed = [message for message in messages if "failed on" in message]
    assert len(failed) == 4
    assert "failed on 3 more answers of batch 1: nan" in failed[-1]


def test_prompts_without_room_for_an_answer_are_found_and_named():
    lengths = {"short": 90, "long": 95, "longer": 4000}
    found = find_too_long(lengths, longest_answer=8, positions=100)
    assert found == ["long", "longer"]
    assert "long (95 tokens), longer (4,000 tokens)" in describe_too_long(found, lengths, positions=100)


def test_a_run_whose_prompts_are_all_too_long_is_refused():
    with pytest.raises(UserError, match=r"the shortest, b, has 99 tokens") as refused:
        find_too_long({"a": 200, "b": 99}, longest_answer=8, positions=100)
    assert "100 positions" in refused.value.why


@pytest.mark.parametrize(("changes", "why"), [({"method": "full", "policy": {"kl": 0.05}}, "second copy")])
def test_settings_that_would_be_ignored_or_biased_are_refused(changes, why):
    with pytest.raises(ValidationError, match=why):
        TrainSettings.model_validate(
            {"objective": "grpo", "rewards": [{"metric": "task_success"}], **changes}
        )


def test_a_rewarded_decoy_stops_the_run(tmp_path):
    source = make_source(tmp_path, by_number, decoys=2)
    with pytest.raises(NegativeResult, match="decoy"):
        source.batch(1)
    assert sum(name.startswith("decoy/") for name in source.sampler.asked[0]) == 2


def test_decoys_that_get_nothing_are_not_trained_on(tmp_path):
    source = make_source(tmp_path, lambda q: by_number(q) * (q.case.reference == "right"), decoys=2)
    rows = source.batch(1)
    assert len(rows) == 8
    assert not any("decoy" in row.id for row in rows)
    source.batch(2)


def test_reward_and_audit_that_part_ways_stop_the_run(tmp_path):
    audit = {f"case{number}": make_case("audited") for number in range(5)}
    source = make_source(
        tmp_path, lambda q: 0.0 if q.case.id == "audited" else float(q.text != "1"), audit=audit
    )
    source.batch(1)
    source.batch(2)
    assert source.measures(2)["audit"] == 0.0
    with pytest.raises(NegativeResult, match="diverged"):
        source.batch(3)


def test_answers_without_an_audit_do_not_part_from_it(tmp_path):
    """Cases with a single check have no audit half: easy ones would look like a reward that is cheated."""
    source = make_source(
        tmp_path,
        lambda q: by_number(q) if q.case.id in ("case0", "audited") else float(q.text != "0"),
        audit={"case0": make_case("audited")},
        rollouts={"steps": 6, "prompts": 5, "num_generations": 4, "max_completion_length": 4},
    )
    for step in range(1, 5):
        source.batch(step)
    assert source.measures(4)["audit"] == 0.25


def test_the_audit_sees_the_episode_that_the_reward_sees(tmp_path):
    seen = {}

    def grade(question):
        seen.setdefault(question.case.id, []).append(question.evidence)
        return float(question.text == "1")

    audit = {f"case{number}": make_case("audited") for number in range(5)}
    source = make_source(tmp_path, grade, audit=audit)
    sample = source.sampler.sample
    turns = (EpisodeTurn(by="model", text="1"),)
    source.sampler.sample = lambda *given, **named: [
        answer.model_copy(update={"turns": turns, "environment_reward": 0.5})
        for answer in sample(*given, **named)
    ]
    source.batch(1)
    audited = seen.pop("audited")
    assert audited[0]["environment"]["reward"] == 0.5
    assert audited == [evidence for given in seen.values() for evidence in given]


def test_kto_needs_two_rows_in_a_step():
    with pytest.raises(ValidationError, match="batch_size"):
        TrainSettings(objective="kto", batch_size=1)


def test_decoys_cannot_be_solved():
    case = make_case(
        checks=({"python_calls": CALLS}, {"python_tests": "assert f(1) == 2"}, {"contains": "x"})
    )
    (decoy,) = make_decoys([case], count=1, seed=3)
    assert decoy.id == "decoy/case"
    assert decoy.reference.startswith("secret-")
    assert all(call["gives"] == decoy.reference for call in decoy.checks[0]["python_calls"])
    assert "assert False" in decoy.checks[1]["python_tests"]
    assert decoy.checks[2] == {"exact": decoy.reference}


@pytest.mark.parametrize(
    ("check", "right"),
    [
        ({"numeric": 3}, "3"),
        ({"metric": "numeric", "value": 3, "tolerance": 0.1}, "3"),
        ({"set": ["a", "b"]}, "b, a"),
        ({"metric": "regex", "pattern": "a+"}, "aa"),
        ({"contains": "sorry", "need": "none"}, "a"),
        ({"exact": "a", "field": "x"}, '{"x": "a"}'),
    ],
)
def test_the_right_answer_to_a_prompt_is_no_alarm_on_its_decoy(check, right):
    case = make_case(checks=(check,))
    (decoy,) = make_decoys([case], count=1, seed=1)
    context = GradeContext()
    assert grade_part("task_success", case, right, context=context, evidence={}) == 1.0
    assert grade_part("task_success", decoy, right, context=context, evidence={}) == 0.0


def test_audit_and_reward_share_no_call():
    case = make_case(checks=({"python_calls": CALLS},))
    rewarding, audit = split_checks(case, share=0.5, seed=1)
    first, second = (found.checks[0]["python_calls"] for found in (rewarding, audit))
    assert len(first) == len(second) == 3
    assert sorted(call["args"] for call in first + second) == [[number] for number in range(6)]
    assert split_checks(case, share=0.0, seed=1) == (case, None)
    assert split_checks(make_case(checks=({"contains": "x"},)), share=0.5, seed=1)[1] is None


def test_parting_needs_three_batches_in_a_row():
    assert are_apart([(0.9, 0.1)] * 3)
    assert not are_apart([(0.9, 0.1)] * 2)
    assert not are_apart([(0.9, 0.1), (0.5, 0.4), (0.9, 0.1)])


def test_the_preflight_is_reported_once_and_expects_nothing_of_a_batch_that_was_read(tmp_path):
    """Reading a batch from the journal takes no time, and would promise millions of prompts in a night."""
    first, again = [], []
    rollouts = {"steps": 6, "prompts": 2, "num_generations": 4, "max_completion_length": 4, "updates": 2}
    source = make_source(tmp_path, by_number, report=first.append, rollouts=rollouts)
    source.batch(1)
    source.batch(2)
    (message,) = [word for word in first if word.startswith("preflight")]
    assert "prompts in 8 hours" in message
    resumed = make_source(tmp_path, by_number, report=again.append, rollouts=rollouts)
    resumed.batch(2)
    (message,) = [word for word in again if word.startswith("preflight")]
    assert "prompts in 8 hours" not in message


def test_preflight_counts_prompts_in_a_night():
    names = ("dead_groups", "pass@1", "pass@k", "length", "truncated", "reward_seconds")
    measures = dict.fromkeys(names, 0.0) | {"dead_groups": 0.5, "pass@1": 0.2}
    described = describe_signal(measures, prompts=8, seconds=16)
    assert "about 14,400 prompts in 8 hours" in described
    assert "50%" in described
    assert advise(measures) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"objective": "orpo", "preferences": {"sft": 0.2}}, "preferences.sft"),
        ({"objective": "kto", "preferences": {"sft": 0.2}}, "preferences.sft"),
        ({"objective": "dpo", "preferences": {"least_score": 0.5}}, "preferences.least_score"),
        (
            {"objective": "orpo", "preferences": {"undesirable_weight": 3, "least_score": 0.5}},
            "preferences.undesirable_weight, least_score",
        ),
        ({**GRPO, "policy": {"loss": "gspo"}}, "policy.loss: gspo"),
        ({**GRPO, "epochs": 3, "batch_size": 4}, "epochs, batch_size"),
    ],
)
def test_settings_that_change_nothing_are_named_when_the_run_starts(settings, named):
    (note,) = describe_idle(TrainSettings.model_validate(settings))
    assert named in note


def test_a_mix_uses_the_settings_of_supervised_rows():
    mixed = {**GRPO, "epochs": 3, "mix": {"sft": 0.3}}
    assert not describe_idle(TrainSettings.model_validate(mixed))


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
    verdicts = {"a/0": verdict(0, 0.5, parts={JUDGE.metric: 0.0}), "a/1": verdict(1, 1.0)}
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
