"""The coordinator's state in the database: one at a time, and no claim outlives its successor."""

import pytest

from graftwork.cycle.state import FORMAT, CoordinatorState, Holder, Superseded, begin, claim, finish
from graftwork.records.errors import EnvironmentFailure
from graftwork.store.cycles import CycleTable
from graftwork.store.database import open_database


@pytest.fixture
def table(tmp_path):
    return CycleTable(open_database(tmp_path / "state.db"), project="one")


def open_cycle(state):
    return begin(state, model="main", cause="", now=1.0, steps=("train",), version="1")


def claim_train(state, *, holder="a", now=1.0):
    return claim(state, "train", Holder(holder, holder), now=now, lease=60)[0]


def test_the_state_is_read_back_and_ended_cycles_are_the_history(table):
    assert table.read() == CoordinatorState()
    state = table.change(open_cycle)
    assert table.read() == state
    assert table.history() == ()
    for number in (1, 2):
        ended = table.change(lambda state: finish(open_cycle(state), "promoted", reason="", now=2.0))
        assert table.history()[0] == ended.cycle
        assert [cycle.number for cycle in table.history()] == [*range(number, 0, -1)]


def test_what_a_step_made_is_kept_by_who_holds_it(table):
    table.change(open_cycle)
    held = table.change(claim_train)
    table.keep_output(held.cycle, "train", "train", held.cycle)
    name = "cycle/000001/train"
    assert table.get(name).output == held.cycle.model_dump(mode="json")
    later = table.change(lambda state: claim_train(state, holder="b", now=100.0))
    with pytest.raises(Superseded):
        table.keep_output(held.cycle, "train", "train", later.cycle)
    assert table.get(name).output == held.cycle.model_dump(mode="json")


def test_the_state_of_a_newer_version_is_refused(table):
    table.change(lambda state: state.model_copy(update={"format": FORMAT + 1}))
    with pytest.raises(EnvironmentFailure, match="newer graftwork"):
        table.read()
