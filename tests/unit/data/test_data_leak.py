import itertools

import numpy as np
import pytest
from columns_in_memory import ColumnsInMemory
from data_rows import THINGS, make_row

from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import assign_splits
from graftwork.data.split.leakage import find_leaks, require_no_leak
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import NegativeResult
from graftwork.records.interaction import Message

SETTINGS = DataSettings(validation=0.2, test=0.3, split_by="task")
TRAIN, TEST, RL = SPLITS.index("train"), SPLITS.index("test"), len(SPLITS)
OTHERS = [
    make_row(f"{thing} {thing}ing {thing}ed the {n}th?", line=n)
    for n, thing in enumerate(THINGS * 2, start=1)
]
PASSAGE = " ".join(f"{thing} and {other}" for thing, other in itertools.pairwise(THINGS))
OPENING = make_row("Tell me of harps", session="s1", line=101)

PLANTED = {
    "same_turn": (
        make_row("How old is the organ of Trondheim?", line=101),
        make_row("how old is the organ of Trondheim", line=102),
    ),
    "same_line": (
        make_row("[1] Doors open at nine.\nWhen do you open on Mondays", line=101),
        make_row("[1] Tea is free.\nWhen do you open on Mondays", line=102),
    ),
    "same_question": (
        make_row("Who built the tower of Pisa?", line=101),
        make_row("Who built the tower of Pisa?\nI read that nobody knows.", line=102),
    ),
    "alike_line": (
        make_row("How old is the great organ of Trondheim?", line=101),
        make_row("Sorry, how old is the great organ of Trondheim?", line=102),
    ),
    "alike_turn": (
        make_row(f"{PASSAGE}\nSum it up.", line=101),
        make_row(f"{PASSAGE}\nMake it short for me.", line=102),
    ),
    "rare_words": (
        make_row(f"{PASSAGE}\nSum it up.", line=101),
        make_row(f"{PASSAGE} {' '.join(f'more{n} of{n}' for n in range(40))}\nWell?", line=102),
    ),
    "same_conversation": (
        OPENING,
        OPENING.model_copy(
            update={"messages": (*OPENING.messages, Message(role="user", content="Who invented them?"))}
        ),
    ),
    "same_key": (
        make_row("Where is Bremen?", line=101, extra={"task": 1}),
        make_row("Name a fish.", line=102, extra={"task": 1}),
    ),
}


def plant(kind):
    columns = ColumnsInMemory([*OTHERS, *PLANTED[kind]], settings=SETTINGS)
    return columns, assign_splits(columns, settings=SETTINGS)


def leaks_of(columns, assignment, kept=None):
    kept = np.ones(columns.rows, dtype=bool) if kept is None else kept
    return find_leaks(columns, assignment, kept, settings=SETTINGS)


@pytest.mark.parametrize("trained", [TRAIN, RL])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_wrong_assignment_of_every_kind_is_found(kind, trained):
    columns, assignment = plant(kind)
    one, other = columns.rows - 2, columns.rows - 1
    assert leaks_of(columns, assignment) == []
    for held_out, sides in ((other, (trained, TEST)), (one, (TEST, trained))):
        assignment.split[[one, other]] = sides
        found = leaks_of(columns, assignment)
        assert kind in {leak[2] for leak in found}
        assert {leak[:2] for leak in found} == {(one + other - held_out, held_out)}


@pytest.mark.parametrize("sides", [(TRAIN, TEST), (TEST, TRAIN)])
@pytest.mark.parametrize("kind", PLANTED)
def test_the_first_row_of_all_can_leak(kind, sides):
    columns = ColumnsInMemory([*PLANTED[kind], *OTHERS], settings=SETTINGS)
    assignment = assign_splits(columns, settings=SETTINGS)
    assignment.split[:2] = sides
    assert {leak[:2] for leak in leaks_of(columns, assignment)} == {(sides.index(TRAIN), sides.index(TEST))}


def test_a_row_that_is_not_kept_leaks_nothing():
    columns, assignment = plant("same_turn")
    assignment.split[-2:] = (TRAIN, TEST)
    kept = np.ones(columns.rows, dtype=bool)
    kept[-1] = False
    assert leaks_of(columns, assignment, kept) == []


def test_the_copy_of_a_row_that_is_not_kept_leaks_in_its_place():
    first, alike = PLANTED["alike_line"]
    copy = first.model_copy(update={"reply": "another answer"})
    columns = ColumnsInMemory([*OTHERS, first, alike, copy], settings=SETTINGS)
    assignment = assign_splits(columns, settings=SETTINGS)
    assignment.split[-3:] = (TRAIN, TEST, TRAIN)
    kept = np.ones(columns.rows, dtype=bool)
    kept[-3] = False
    assert leaks_of(columns, assignment, kept)


def test_validation_and_test_may_ask_the_same():
    columns, assignment = plant("same_turn")
    assignment.split[-2:] = (SPLITS.index("validation"), TEST)
    assert leaks_of(columns, assignment) == []


def test_a_leak_blocks_and_names_both_rows():
    columns, assignment = plant("same_turn")
    assignment.split[-2:] = (TEST, TRAIN)
    with pytest.raises(NegativeResult) as refused:
        require_no_leak(columns, assignment, np.ones(columns.rows, dtype=bool), settings=SETTINGS)
    assert "train and in test" in refused.value.what
    assert "log.jsonl:102 and log.jsonl:101 ask the same" in refused.value.why
    assert refused.value.where == "log.jsonl:101"
