import pytest
from columns_in_memory import ColumnsInMemory
from data_rows import THINGS, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.dedup.repeats import CONFLICT, DUPLICATE, NEAR_DUPLICATE, find_repeats
from graftwork.data.settings import DataSettings
from graftwork.text.words import normalize

SOURCES = (
    "Sources:\n[1] The stage piano is packed with a folding stand and a dust cover.\n"
    "[2] Loans of the oak psaltery run for a weekend from Friday noon.\n\n"
)


def repeats_of(rows, *, passed=None, **more):
    chosen = DataSettings(**more)
    repeats = find_repeats(ColumnsInMemory(rows, settings=chosen, passed=passed), settings=chosen)
    return {
        place: (step, instead)
        for place, (step, instead) in enumerate(
            zip(repeats.step.tolist(), repeats.instead.tolist(), strict=True)
        )
        if step
    }


def test_rows_that_differ_in_case_and_spacing_are_duplicates():
    rows = [make_row("Where is it?", "Here."), make_row("where  is it", "here"), make_row("Who?", "There.")]
    assert repeats_of(rows) == {1: (DUPLICATE, 0)}


def test_the_same_question_under_another_system_prompt_is_no_exact_duplicate():
    rows = [make_row("a?", "b", system="Be kind."), make_row("a?", "b", system="Be brief.")]
    assert {step for step, _ in repeats_of(rows).values()} <= {NEAR_DUPLICATE}


def test_a_row_that_did_not_pass_the_filter_repeats_nothing():
    rows = [make_row("Where is it?", "Here.")] * 3
    assert repeats_of(rows, passed=[False, True, True]) == {2: (DUPLICATE, 1)}


@pytest.mark.parametrize(("rule", "stays"), [("first", 0), ("last", 2), ("longest", 1)])
def test_which_of_several_equal_rows_stays_is_a_rule(rule, stays):
    rows = [make_row("Where is it?", reply) for reply in ("Here", "... Here ...", "Here!")]
    assert repeats_of(rows, keep_duplicate=rule) == {
        place: (DUPLICATE, stays) for place in range(3) if place != stays
    }


NEAR_QUESTION = "Question: What comes with the stage piano when I take it home for the weekend?"


@pytest.mark.parametrize(("rule", "stays"), [("first", 0), ("last", 2), ("longest", 1)])
def test_nearly_the_same_row_is_found_and_the_rule_says_which_stays(rule, stays):
    rows = [
        make_row(SOURCES + NEAR_QUESTION, "A folding stand."),
        make_row(SOURCES.replace("noon", "the morning") + NEAR_QUESTION, "A folding stand."),
        make_row(SOURCES.replace("noon", "dawn") + NEAR_QUESTION, "A folding stand."),
    ]
    assert repeats_of(rows, near_duplicate=0.6, keep_duplicate=rule) == {
        place: (NEAR_DUPLICATE, stays) for place in range(3) if place != stays
    }


def test_other_questions_on_the_same_sources_are_no_near_duplicates():
    refusal = '{"answer": null, "refused": true}'
    asked = ("What does the psaltery weigh", "Who tunes the grand piano", "Are the drums insured")
    rows = [make_row(SOURCES + f"Question: {question}?", refusal) for question in asked]
    assert repeats_of(rows, near_duplicate=0.7) == {}


def test_another_reply_to_the_same_prompt_is_a_conflict_and_the_last_stays():
    rows = [
        make_row("How long?", "An hour."),
        make_row("What for?", "Fun."),
        make_row("How long?", "Two days."),
        make_row("how long", "Three weeks."),
    ]
    assert repeats_of(rows) == {0: (CONFLICT, 3), 2: (CONFLICT, 3)}
    assert repeats_of(rows, conflicts="drop_all").keys() == {0, 2, 3}
    assert repeats_of(rows, conflicts="keep_all") == {}


def test_a_reply_that_was_given_corrected_and_given_again_stays():
    rows = [make_row("How long?", reply) for reply in ("An hour.", "Two days.", "an hour")]
    assert repeats_of(rows) == {1: (CONFLICT, 0), 2: (DUPLICATE, 0)}
    assert repeats_of(rows, keep_duplicate="last") == {0: (DUPLICATE, 2), 1: (CONFLICT, 2)}


def test_near_duplicates_are_found_among_many_copies_of_each():
    story = " ".join(f"{thing} number {n}" for n, thing in enumerate(THINGS * 3))
    rows = [make_row(f"Tell me about it: {story}", story)] * 9
    rows += [make_row(f"Tell me about it: {story} indeed", story)] * 9
    found = repeats_of(rows)
    assert len(found) == 17
    assert {stays for _, stays in found.values()} == {0}


ROWS = st.lists(
    st.builds(
        make_row,
        st.lists(st.sampled_from([*THINGS[:4], "where", "is", "the"]), min_size=1, max_size=6).map(" ".join),
        st.sampled_from(["here", "There.", "there", "Over the hill and far away", "over the hill, far away"]),
    ),
    max_size=24,
)


@given(ROWS, st.sampled_from(["first", "last", "longest"]), st.sampled_from(["keep_last", "keep_all"]))
@settings(max_examples=60, deadline=None)
def test_the_row_kept_for_its_duplicates_stays_itself_and_no_exchange_is_lost(rows, rule, conflicts):
    found = repeats_of(rows, keep_duplicate=rule, conflicts=conflicts)
    assert all(stays not in found for _, stays in found.values())
    left = [row for place, row in enumerate(rows) if place not in found]
    output = [(normalize(row.question), normalize(row.reply)) for row in left]
    assert len(output) == len(set(output))
    if conflicts == "keep_last":
        assert len({question for question, _ in output}) == len(output)


@given(ROWS, st.data())
@settings(max_examples=40, deadline=None)
def test_a_dropped_row_comes_back_only_when_a_later_one_takes_the_place_of_one_that_stayed(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    before, after = repeats_of(rows[:cut]), repeats_of(rows)
    if before.keys() - after.keys():
        assert any(place < cut for place in after.keys() - before.keys())
