"""Scores of a log as weights of rows and as preference pairs, in rows of any format."""

from collections import Counter

import pytest
from data_rows import THINGS, chat
from pydantic import ValidationError
from test_data_prepare import ASKS, all_rows, run

from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.files.dataset import iterate_drops, read_rows
from graftwork.records.errors import UserError
from graftwork.train.objectives.epochs import plan_steps
from graftwork.train.objectives.pairs import make_pairs
from graftwork.train.settings import TrainSettings

QUESTIONS = [ask.format(thing) for ask in ASKS for thing in THINGS]
MAPPED = {"mapping": {"reward": "stars"}}
NO_TESTS = {"validation": 0, "test": 0}


def alpaca(asked, reply, **fields):
    return {"instruction": asked, "output": reply, **fields}


def sharegpt(asked, reply, **fields):
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": reply}]
    return {"conversations": turns, **fields}


def starred(make=chat, stars=(1, 2, 3, 4, 5, None)):
    rows = [(asked, f"Reply {n} on that.", stars[n % len(stars)]) for n, asked in enumerate(QUESTIONS)]
    return [
        make(asked, reply) if given is None else make(asked, reply, stars=given)
        for asked, reply, given in rows
    ]


@pytest.mark.parametrize("make", [chat, alpaca, sharegpt])
def test_a_row_is_trained_on_as_often_as_its_score_says(tmp_path, make):
    weights = {1: 0.5, 3: 1, 5: 3}
    _, folder = run(tmp_path, starred(make), score_weights=weights, **MAPPED, **NO_TESTS)
    rows = list(read_rows(folder, "train"))
    expected = {1.0: 0.5, 2.0: 0.75, 3.0: 1.0, 4.0: 2.0, 5.0: 3.0, None: 1.0}
    assert {row.reward for row in rows} == set(expected)
    assert all(row.weight == expected[row.reward] for row in rows)
    steps = plan_steps(rows, settings=TrainSettings(epochs=4, batch_size=8))
    visits = Counter(place for step in steps for place in step)
    assert all(visits[place] == 4 * row.weight for place, row in enumerate(rows))


def test_weights_by_score_and_by_role_are_multiplied_and_weigh_no_test(tmp_path):
    rows = [dict(row, role="desk") for row in starred()]
    models = {"main": ModelSettings(weights={"desk": 2.0})}
    _, folder = run(tmp_path, rows, score_weights={1: 0, 5: 1}, models=models, **MAPPED)
    assert {row.weight for row in read_rows(folder, "train")} == {0.0, 0.5, 1.0, 1.5, 2.0}
    assert {row.weight for row in read_rows(folder, "test")} == {1.0}


def test_low_scores_are_trained_on_and_are_no_reference(tmp_path):
    _, folder = run(tmp_path, starred(), score_weights={1: 0.2, 5: 1}, **MAPPED)
    assert {1.0, 2.0} <= {row.reward for row in read_rows(folder, "train")}
    held_out = [row.reward for split in ("validation", "test") for row in read_rows(folder, split)]
    assert held_out
    assert all(reward is None or reward >= 3 for reward in held_out)


def test_labels_of_kto_weigh_rows_without_a_mapping(tmp_path):
    rows = [chat(asked, f"Reply {n}.", label=bool(n % 2)) for n, asked in enumerate(QUESTIONS)]
    _, folder = run(tmp_path, rows, score_weights={0: 0.25, 1: 1}, drop_rated_bad=False, **NO_TESTS)
    assert {(row.reward, row.weight) for row in all_rows(folder)} == {(0.0, 0.25), (1.0, 1.0)}


def asked_often():
    """Three replies to each question; the best is logged first, and the worst in the middle."""
    replies = (("Good", 5), ("Bad", 1), ("Middling", 3))
    return [
        chat(asked, f"{word} reply {n}.", stars=stars)
        for word, stars in replies
        for n, asked in enumerate(QUESTIONS)
    ]


def render(row, reply):
    return tuple(range(len(row.tokens))), row.trained_from


@pytest.mark.parametrize("conflicts", ["keep_last", "drop_all", "keep_all"])
def test_the_best_and_the_worst_reply_to_a_prompt_become_a_pair(tmp_path, conflicts):
    _, folder = run(tmp_path, asked_often(), score_pairs=2, conflicts=conflicts, near_duplicate=1, **MAPPED)
    paired = [row for row in all_rows(folder) if row.rejected]
    assert {(row.reply, row.rejected) for row in paired} == {
        (f"Good reply {n}.", f"Bad reply {n}.") for n in range(len(QUESTIONS))
    }
    assert all(row.reply.startswith("Middling") for row in all_rows(folder) if not row.rejected)
    assert (len(all_rows(folder)) > len(paired)) == (conflicts == "keep_all")
    pairs, left_out = make_pairs(list(read_rows(folder, "train")), render)
    assert pairs
    assert not left_out["reversed"]
    assert not left_out["same"]


def test_a_reply_that_is_dropped_as_bad_is_still_the_worse_one_of_a_pair(tmp_path):
    rows = [
        chat(asked, f"{'Right' if good else 'Wrong'} reply {n}.", label=good)
        for good in (True, False)
        for n, asked in enumerate(QUESTIONS)
    ]
    _, folder = run(tmp_path, rows, score_pairs=1)
    assert {(row.reply, row.rejected) for row in all_rows(folder)} == {
        (f"Right reply {n}.", f"Wrong reply {n}.") for n in range(len(QUESTIONS))
    }
    assert sum("rated_bad" in drop.reason for drop in iterate_drops(folder)) == len(QUESTIONS)


def test_scores_that_are_too_near_and_repeated_exchanges_make_no_other_pairs(tmp_path):
    rows = [chat(QUESTIONS[0], "One reply.", stars=4), chat(QUESTIONS[0], "Another reply.", stars=3)]
    rows += [
        chat(QUESTIONS[1], reply, stars=stars)
        for reply, stars in (("Fine.", 5), ("Poor.", 1), ("Fine.", 4), ("Fine.", 5))
    ]
    _, folder = run(tmp_path, rows, score_pairs=2, **MAPPED, **NO_TESTS)
    assert {(row.reply, row.rejected) for row in all_rows(folder)} == {
        ("Another reply.", None),
        ("Fine.", "Poor."),
    }


def test_a_worse_reply_that_was_logged_twice_is_no_row_of_its_own(tmp_path):
    rows = [
        chat(QUESTIONS[0], reply, stars=stars) for reply, stars in (("Poor.", 1), ("Fine.", 5), ("Poor.", 2))
    ]
    _, folder = run(tmp_path, rows, score_pairs=2, conflicts="keep_all", **MAPPED, **NO_TESTS)
    assert [(row.reply, row.rejected) for row in all_rows(folder)] == [("Fine.", "Poor.")]


def test_no_pair_is_made_where_all_scored_rows_are_dropped(tmp_path):
    rows = [chat(QUESTIONS[0], "", stars=3), chat(QUESTIONS[1], "Fine.")]
    _, folder = run(tmp_path, rows, score_pairs=2, **MAPPED, **NO_TESTS)
    assert [(row.reply, row.rejected) for row in all_rows(folder)] == [("Fine.", None)]


@pytest.mark.parametrize("setting", [{"score_weights": {1: 0, 5: 1}}, {"score_pairs": 1}])
def test_scores_that_are_missing_or_no_number_are_an_error_with_the_row(tmp_path, setting):
    with pytest.raises(UserError) as missing:
        run(tmp_path, [chat(asked, "Yes.", lang="de") for asked in QUESTIONS], **MAPPED, **setting)
    assert missing.value.what == "no row has a score"
    assert missing.value.why == "log.jsonl:1 and all others lack `stars`"
    assert "rows have lang" in missing.value.fix
    assert missing.value.where == f"data.{next(iter(setting))}"
    for fields, mapping in (({"stars": "good"}, MAPPED), ({"score": "good"}, {})):
        rows = [*starred(), chat("What now?", "This.", **fields)]
        with pytest.raises(UserError, match="a score is not a number") as text:
            run(tmp_path, rows, **mapping, **setting)
        assert text.value.why.startswith(f"log.jsonl:{len(rows)}: ")


def test_a_scale_has_two_scores_at_least():
    with pytest.raises(ValidationError, match="at least two scores"):
        DataSettings(score_weights={3: 1})
