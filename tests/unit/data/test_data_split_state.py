import random

import numpy as np
import pytest
from columns_in_memory import ColumnsInMemory
from data_rows import THINGS, make_row
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_split import CHOSEN, PASSAGES, WORDS, logs

from graftwork.data.dedup import fingerprints, questions
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import (
    UNASSIGNED,
    assign_splits,
    read_assignment,
    read_previous_splits,
    write_assignment,
    write_previous_splits,
)
from graftwork.data.split.leakage import find_leaks
from graftwork.records.dataset import SPLITS

SETTINGS = DataSettings(validation=0.2, test=0.3)
TRAIN, TEST = SPLITS.index("train"), SPLITS.index("test")


def assign_group(rows, *, chosen, passed=None, known=None, block=7, embedder=None):
    columns = ColumnsInMemory(rows, settings=chosen, passed=passed, block=block)
    return columns, assign_splits(columns, settings=chosen, earlier=known, embedder=embedder)


def decide(rows, *, chosen, passed=None, kept=None):
    _, assignment = assign_group(rows, chosen=chosen, passed=passed)
    return assignment._replace(
        kept=np.ones(len(rows), dtype=bool) if kept is None else np.array(kept, dtype=bool)
    )


def assert_same(one, other):
    assert one.split.tolist() == other.split.tolist()
    assert one.group.tolist() == other.group.tolist()
    assert one.founders.tolist() == other.founders.tolist()
    assert one.excluded == other.excluded


def make_long_log(chance, *, least=80, most=150):
    """Long enough for several grounds, with repeats, bridges between groups and rows of all roles."""
    rows = []
    for _ in range(chance.randint(least, most)):
        lines = chance.sample(PASSAGES, chance.choice([0, 0, 0, 1, 2]))
        lines.append(
            " ".join(chance.choices([*WORDS, *THINGS], k=chance.randint(2, 7))) + chance.choice("?.")
        )
        lines += chance.choice([[], ["Answer as JSON."], ["Be brief.", "Answer as JSON."]])
        rows.append(make_row("\n".join(lines), group=chance.choice(["coder", "writer", None])))
        if chance.random() < 0.2:
            rows.append(chance.choice(rows))
    return rows


def test_every_row_keeps_its_previous_split_also_while_it_is_away(tmp_path):
    def store(splits):
        keys, split = np.array([*splits], np.uint64), np.array([*splits.values()], np.uint8)
        write_previous_splits(tmp_path / "splits", keys=keys, split=split, settings=SETTINGS)

    def read(keys, chosen=SETTINGS):
        keys = np.array(keys, np.uint64)
        return read_previous_splits(tmp_path / "splits", keys=keys, settings=chosen).tolist()

    assert read([7, 3]) == [UNASSIGNED, UNASSIGNED]
    store({7: TRAIN, 3: TEST, 9: TRAIN})
    assert read([9, 7, 4, 3]) == [TRAIN, TRAIN, UNASSIGNED, TEST]
    store({3: UNASSIGNED, 4: TEST})
    assert read([7, 3, 9, 4]) == [TRAIN, TEST, TRAIN, TEST]
    assert read([7], DataSettings(validation=0.1)) == [UNASSIGNED]


@given(logs(), CHOSEN, st.data())
@settings(max_examples=25, deadline=None)
def test_going_on_from_what_was_decided_gives_what_deciding_from_scratch_gives(rows, chosen, data):
    cut = data.draw(st.integers(0, len(rows)))
    passed = data.draw(st.lists(st.integers(0, 5).map(bool), min_size=len(rows), max_size=len(rows)))
    known = decide(rows[:cut], chosen=chosen, passed=passed[:cut])
    _, went_on = assign_group(rows, chosen=chosen, passed=passed, known=known, block=5)
    assert_same(went_on, assign_group(rows, chosen=chosen, passed=passed)[1])


@pytest.mark.parametrize(("looked_up", "at_once"), [(25_000, 1_000_000), (3, 20)])
@given(st.integers(0, 2**32), CHOSEN)
@settings(max_examples=4, deadline=None)
def test_long_logs_go_on_in_several_steps(looked_up, at_once, seed, chosen):
    chance = random.Random(seed)
    rows = make_long_log(chance)
    known = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "MOST_LOOKED_UP", looked_up)
        patch.setattr(questions, "_ENTRIES_AT_ONCE", at_once)
        for cut in sorted(chance.sample(range(len(rows)), 3)):
            _, assignment = assign_group(rows[:cut], chosen=chosen, known=known, block=40)
            known = assignment._replace(kept=np.ones(cut, dtype=bool))
        _, went_on = assign_group(rows, chosen=chosen, known=known, block=40)
    assert_same(went_on, assign_group(rows, chosen=chosen, block=40)[1])


@given(st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_a_wrong_assignment_of_a_new_or_changed_row_is_found_as_by_the_whole_check(seed):
    chance = random.Random(seed)
    rows = make_long_log(chance, least=40, most=90)
    cut = chance.randint(0, len(rows) - 1)
    columns, assignment = assign_group(rows, chosen=SETTINGS, block=40)
    kept = np.array([chance.random() < 0.8 for _ in rows])
    known = decide(rows[:cut], chosen=SETTINGS, kept=kept[:cut])
    assert find_leaks(columns, assignment, kept, settings=SETTINGS, earlier=known) == []
    for place in chance.sample(range(len(rows)), 3):
        if assignment.split[place] != UNASSIGNED:
            assignment.split[place] = TEST if assignment.split[place] == TRAIN else TRAIN
    kept |= np.array([chance.random() < 0.1 for _ in rows])
    whole = find_leaks(columns, assignment, kept, settings=SETTINGS, most=10_000)
    assert find_leaks(columns, assignment, kept, settings=SETTINGS, earlier=known, most=10_000) == whole


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9)))
def test_a_few_numbers_are_found_among_many(few, many):
    numbers = np.unique(np.array(few, dtype=np.uint64))
    values = np.array([*many, *few[::2]], dtype=np.uint64)
    there, which = fingerprints.ValueLookup(numbers).find(values)
    assert there.tolist() == np.flatnonzero(np.isin(values, numbers)).tolist()
    assert numbers[which].tolist() == values[there].tolist()


class Unread(ColumnsInMemory):
    def ragged(self, name):
        raise AssertionError(f"no row needs to be looked at, but {name} is read")


def test_rows_that_were_decided_and_checked_are_not_checked_again():
    rows = [make_row(f"{thing} {thing}ing {thing}ed the {n}th?") for n, thing in enumerate(THINGS * 2)]
    known = decide(rows, chosen=SETTINGS)
    columns = Unread(rows, settings=SETTINGS)
    assignment = assign_splits(columns, settings=SETTINGS, earlier=known)
    assert_same(assignment, known)
    assert find_leaks(columns, assignment, known.kept, settings=SETTINGS, earlier=known) == []


ROWS = [make_row(f"{thing} {thing}ing {thing}ed?") for thing in THINGS]
COUNT = len(ROWS)


def keep(path, decided, *, chosen=SETTINGS, identify=str, embedded=False):
    write_assignment(path, decided, settings=chosen, identify=identify, embedded=embedded)


def read(path, *, rows=COUNT, chosen=SETTINGS, identify=str, embedded=False):
    return read_assignment(path, rows=rows, settings=chosen, identify=identify, embedded=embedded)


@given(logs(), CHOSEN, st.data())
@settings(max_examples=15, deadline=None)
def test_a_written_split_state_reads_back_equal(tmp_path_factory, rows, chosen, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    decided = decide(rows, chosen=chosen, kept=kept)
    path = tmp_path_factory.getbasetemp() / "decided.npz"
    keep(path, decided, chosen=chosen)
    again = read(path, rows=len(rows) + 3, chosen=chosen)
    assert_same(again, decided)
    assert again.kept.tolist() == kept
    assert [part.dtype for part in (again.split, again.group)] == [np.uint8, np.int64]


@pytest.mark.parametrize(
    "other",
    [
        {"chosen": SETTINGS.model_copy(update={"seed": 1})},
        {"chosen": SETTINGS.model_copy(update={"question_similarity": 0.8})},
        {"identify": lambda rows: f"other {rows}"},
        {"embedded": True},
        {"rows": len(ROWS) - 1},
    ],
)
def test_assignments_of_other_data_are_not_used(tmp_path, other):
    path = tmp_path / "decided.npz"
    keep(path, decide(ROWS, chosen=SETTINGS))
    assert read(path) is not None
    assert read(path, **other) is None


def test_another_list_of_logs_with_the_same_rows_is_taken(tmp_path):
    path = tmp_path / "decided.npz"
    keep(path, decide(ROWS, chosen=SETTINGS))
    assert read(path, chosen=SETTINGS.model_copy(update={"logs": ("new.jsonl",)})) is not None


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_damaged_file_counts_as_none(tmp_path, at):
    path = tmp_path / "decided.npz"
    assert read(path) is None
    keep(path, decide(ROWS, chosen=SETTINGS))
    data = path.read_bytes()
    path.write_bytes(data[: int(at * len(data))])
    assert read(path) is None


def test_another_form_counts_as_none(tmp_path, monkeypatch):
    path = tmp_path / "decided.npz"
    keep(path, decide(ROWS, chosen=SETTINGS))
    monkeypatch.setattr("graftwork.data.split.assignment.ASSIGNMENT_FORM", 0)
    assert read(path) is None
