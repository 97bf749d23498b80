"""What a log says in every row asks nothing, also where it was read behind other logs."""

import numpy as np
from columns_in_memory import ColumnsInMemory
from data_rows import make_row
from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.dedup import questions as questions_module
from graftwork.data.dedup.questions import mark_boilerplate
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import assign_splits

SETTINGS = DataSettings(validation=0.1, test=0.2)
WORDS = [
    first + second + third
    for first in ("bal", "kor", "mis", "tun", "vel", "zar", "dop")
    for second in ("en", "it", "osh", "ul", "ar")
    for third in ("dak", "fim", "gop", "wex", "yil")
]


def subjects(count, *, start=0):
    """Lines of three words that have nothing in common."""
    return [
        " ".join(WORDS[(3 * number + at) % len(WORDS)] for at in range(3))
        for number in range(start, start + count)
    ]


def columns_of(questions):
    return ColumnsInMemory(
        [make_row(question, line=n) for n, question in enumerate(questions)], settings=SETTINGS
    )


def marks_of(questions):
    columns = columns_of(questions)
    passed = columns.column("passed")
    return mark_boilerplate(columns, passed=passed, turns=columns.column("turn"))


def test_a_log_that_is_read_behind_another_is_not_taken_for_one_question():
    other = [f"Tell me of {subject}." for subject in subjects(300)]
    late = [f"Explain {subject}.\nGive your answer as one JSON object." for subject in subjects(40, start=7)]
    assignment = assign_splits(columns_of([*other, *late]), settings=SETTINGS)
    assert len(set(assignment.group[300:].tolist())) > 20


def test_a_line_is_an_instruction_from_the_seventh_row_on_that_has_it():
    marks = marks_of([f"Explain {subject}.\nAnswer in JSON." for subject in subjects(9)])
    # Two lines a row, the last one first.
    assert marks[::2].tolist() == [False] * 6 + [True] * 3
    assert not marks[1::2].any()


def test_a_question_that_is_asked_often_stays_a_question():
    assert not marks_of([f"{subject}.\nWhat does it cost?" for subject in subjects(20)]).any()


def test_the_same_turn_counts_once_however_often_it_is_logged():
    assert not marks_of(["Explain the weather.\nAnswer in JSON."] * 30).any()


LINES = st.lists(st.sampled_from(["a b", "c d", "e f", "g h", "i j?"]), min_size=1, max_size=4).map("\n".join)


@given(st.lists(LINES, min_size=1, max_size=40), st.data())
def test_rows_that_follow_change_no_mark(questions, data):
    cut = data.draw(st.integers(1, len(questions)))
    some, every = marks_of(questions[:cut]), marks_of(questions)
    assert some.tolist() == every[: len(some)].tolist()


def test_many_lines_are_processed_in_parts_with_the_same_result(monkeypatch):
    questions = [f"Explain {subject}.\nAnswer in JSON.\nBe brief." for subject in subjects(40)]
    whole = marks_of(questions)
    monkeypatch.setattr(questions_module, "LINES_AT_ONCE", 7)
    assert np.array_equal(marks_of(questions), whole)
    assert whole.any()
