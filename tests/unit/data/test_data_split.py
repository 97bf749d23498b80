from collections import Counter

from data_rows import THINGS, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.question import find_questions
from graftwork.data.settings import DataSettings
from graftwork.data.split import deal, group_rows

SETTINGS = DataSettings(validation=0.2, test=0.3)


def groups_of(*questions):
    return group_rows([make_row(q, line=n) for n, q in enumerate(questions, 1)], threshold=0.7)


def test_small_changes_of_wording_share_a_group():
    groups = groups_of(
        "How long may I keep the oak psaltery?",
        "how long may I keep the oak psaltery",
        "Sorry to ask again: how long may I keep the oak psaltery?",
        "How long may I keep the oak psaltery? Thanks!",
        *(f"What does the {thing} cost in March {n}?" for n, thing in enumerate(THINGS)),
    )
    assert len(set(groups[:4])) == 1
    assert groups[0] not in groups[4:]


def test_a_template_filled_with_other_things_is_other_questions():
    groups = groups_of(*(f"What would I pay for the {thing}?" for thing in THINGS))
    assert len(set(groups)) == len(THINGS)


def test_the_same_question_on_other_sources_shares_a_group():
    groups = groups_of(
        "Sources:\n[1] Doors open at nine in summer.\n\nQuestion: When do you open?",
        "Sources:\n[1] The east wing has a new roof.\n[2] Tea is free.\n\nQuestion: When do you open?",
        "Sources:\n[1] The east wing has a new roof.\n[2] Cake is not.\n\nQuestion: Who built the tower?",
    )
    assert groups[0] == groups[1] != groups[2]


def test_an_instruction_that_every_row_repeats_is_no_question():
    rows = [make_row(f"Query: What is a {thing}?\n\nAnswer as JSON.") for thing in THINGS]
    assert [question.line for question in find_questions(rows)] == [f"Query: What is a {t}?" for t in THINGS]
    assert len(set(group_rows(rows, threshold=0.7))) == len(THINGS)


def test_turns_of_one_conversation_stay_together():
    opening = make_row("Tell me of harps", session="s1", line=1)
    later = opening.model_copy(
        update={"messages": (*opening.messages, *make_row("And who invented them?").messages)}
    )
    stranger = make_row("Where do tubas come from?", session="s1", line=3)
    groups = group_rows([opening, later, stranger], threshold=0.7)
    assert groups[0] == groups[1] != groups[2]


QUESTIONS = st.lists(
    st.lists(st.sampled_from([*THINGS, "where", "is", "the", "how", "old"]), min_size=1, max_size=6).map(
        " ".join
    ),
    max_size=25,
)


@given(QUESTIONS)
@settings(max_examples=60)
def test_no_group_stands_in_two_splits_and_equal_questions_share_theirs(questions):
    groups = groups_of(*questions)
    splits = {}
    for question, group in zip(questions, groups, strict=True):
        split = deal(group, SETTINGS)
        assert splits.setdefault(group, split) == split
        assert splits.setdefault(question, split) == split


@given(QUESTIONS, QUESTIONS)
@settings(max_examples=60)
def test_rows_logged_later_move_no_row_whose_group_is_unchanged(old, new):
    before = groups_of(*old)
    after = groups_of(*old, *new)

    def members(groups, place):
        return {n for n, group in enumerate(groups) if group == groups[place]}

    for place in range(len(old)):
        if members(before, place) == members(after, place):
            assert deal(before[place], SETTINGS) == deal(after[place], SETTINGS)


def test_groups_fall_on_the_splits_by_their_shares():
    counts = Counter(deal(f"group {n}", SETTINGS) for n in range(4000))
    assert abs(counts["test"] / 4000 - 0.3) < 0.03
    assert abs(counts["validation"] / 4000 - 0.2) < 0.03


def test_another_seed_deals_anew_and_the_same_seed_does_not():
    again = SETTINGS.model_copy(update={"seed": 1})
    first = [deal(f"group {n}", SETTINGS) for n in range(200)]
    assert first == [deal(f"group {n}", SETTINGS) for n in range(200)]
    assert first != [deal(f"group {n}", again) for n in range(200)]
