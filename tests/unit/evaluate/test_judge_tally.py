"""Verdicts in both orders: what counts as won, how steady the judge is, which place it favours."""

import pytest
from gate_samples import new_case
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graftwork.evaluate.judge import LONGEST_ANSWER, UnclearReply, ask_mark, ask_pair, read_mark, read_pair
from graftwork.evaluate.judge_statistics import PairVerdict, compare_by_judge, count_pairs
from graftwork.evaluate.settings import JudgeSettings
from graftwork.records.report import JudgeTally

SETTINGS = JudgeSettings(url="http://localhost:1/v1", model="m")
choices = st.sampled_from(["first", "second", "tie", None])


def count(*pairs):
    verdicts = [PairVerdict(str(n), *pair) for n, pair in enumerate(pairs)]
    return count_pairs(verdicts, baseline="base", candidate="adapter", model="m")


def test_only_the_same_winner_in_both_orders_is_a_winner():
    tally = count(
        ("second", "first"),
        ("first", "second"),
        ("tie", "tie"),
        ("first", "first"),
        ("second", "tie"),
        (None, None),
    )
    assert (tally.pairs, tally.wins, tally.losses, tally.ties, tally.inconsistent) == (5, 1, 1, 1, 2)
    assert tally.agreement == pytest.approx(3 / 5)
    assert tally.agreement_low < 3 / 5 < tally.agreement_high
    assert list(tally.unjudged) == ["5"]
    assert tally.grades["3"] == 0.5


def test_a_judge_that_always_takes_the_first_is_found_out():
    tally = count(*[("first", "first")] * 10)
    assert tally.first_place_share == 1.0
    assert tally.agreement == 0.0
    assert tally.position_bias_p == pytest.approx(2 / 1024)
    assert (tally.wins, tally.losses) == (0, 0)


def test_a_judge_that_goes_by_the_answer_shows_no_bias():
    tally = count(*[("second", "first")] * 10)
    assert tally.first_place_share == 0.5
    assert tally.position_bias_p == 1.0
    comparison = compare_by_judge(tally)
    assert (comparison.wins, comparison.losses, comparison.n) == (10, 0, 10)
    assert comparison.difference == 1.0
    assert comparison.p_value == pytest.approx(2 / 1024)


@given(st.lists(st.tuples(choices, choices), max_size=12))
def test_swapping_the_subjects_swaps_wins_and_losses(pairs):
    forth, back = count(*pairs), count(*[(b, a) for a, b in pairs])
    assert (forth.wins, forth.losses) == (back.losses, back.wins)
    assert (forth.ties, forth.inconsistent, forth.agreement) == (back.ties, back.inconsistent, back.agreement)
    assert forth.wins + forth.losses + forth.ties + forth.inconsistent == forth.pairs
    assert forth.pairs + len(forth.unjudged) == len(pairs)
    assert JudgeTally.from_json(forth.to_json()) == forth


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ('{"reason": "x", "winner": "A"}', "first"),
        (' {"winner": "B"}\n', "second"),
        ('```json\n{"winner": "tie"}\n```', "tie"),
    ],
)
def test_a_clear_verdict_is_read(reply, choice):
    assert read_pair(reply) == choice


@pytest.mark.parametrize(
    "reply",
    [
        "A", '{"winner": "a"}', '{"winner": "C"}', '{"winner": ["A"]}', '{"winner": null}',
        'Sure! {"winner": "A"}', '{"winner": "A"} {"winner": "B"}', "", "[]",
    ],
)  # fmt: skip
def test_anything_else_is_unclear(reply):
    with pytest.raises(UnclearReply):
        read_pair(reply)


@pytest.mark.parametrize("mark", ["0", "6", "3.5", '"4"', "true", "null"])
def test_only_whole_marks_from_1_to_5_count(mark):
    with pytest.raises(UnclearReply):
        read_mark(f'{{"mark": {mark}}}')
    assert [read_mark(f'{{"mark": {n}}}') for n in range(1, 6)] == [1, 2, 3, 4, 5]


def make_case(content):
    return new_case("c", content, "six")


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=30))
def test_no_answer_can_close_the_marks_around_it(first, second, question):
    chat = ask_pair(make_case(question), first=first, second=second, settings=SETTINGS)
    body = chat[1]["content"]
    mark = body.split("\n")[1]
    assert mark not in first + second + question
    assert body.count(mark) == 2 * 4
    assert mark in chat[0]["content"]
    assert chat == ask_pair(make_case(question), first=first, second=second, settings=SETTINGS)


def test_the_reference_is_shown_only_where_it_may_be():
    hidden = SETTINGS.model_copy(update={"show_reference": False})
    assert "six" in ask_mark(make_case("q"), answer="x", settings=SETTINGS)[1]["content"]
    assert "six" not in ask_mark(make_case("q"), answer="x", settings=hidden)[1]["content"]


def test_an_endless_answer_is_cut_for_the_judge():
    body = ask_mark(make_case("q"), answer="x" * 50_000, settings=SETTINGS)[1]["content"]
    assert "x" * (LONGEST_ANSWER + 1) not in body
    assert "cut here: 50000" in body


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://host"},
        {"url": "https://user:key@host/v1"},
        {"url": "https://host/v1?api_key=x"},
        {"max_cost": 1.0},
        {"api_key_env": "not a name"},
        {"modes": ()},
        {"timeout": 3},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        JudgeSettings(**{"url": "https://host/v1", "model": "m", **wrong})
