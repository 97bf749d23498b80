"""A run's minutes are divided without a rest that nobody has spent."""

import pytest
import sample_plans
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.fleet import DeviceVitals, Vitals
from graftwork.records.run import TrainingEvaluation, TrainOutcome, TrainStep
from graftwork.train.runs import between_steps, divide


def make_outcome(**changes) -> TrainOutcome:
    figures = {"steps": 3, "seconds": 30.0, "load_seconds": 8.0, "peak_memory_gib": 3.0}
    return sample_plans.make_outcome(**{**figures, **changes})


def step(number: int, *, at: float, seconds: float = 10.0) -> TrainStep:
    return sample_plans.make_step(number, tokens=1000, seconds=seconds, at=at, steady=at)


STEPS = [step(1, at=118), step(2, at=130), step(3, at=140)]
VITALS = [
    Vitals(at=101, memory_gib=0.3),
    Vitals(at=107, memory_gib=1.2),
    Vitals(at=125, memory_gib=2.8, data_share=0.1),
    Vitals(at=135, memory_gib=2.9, data_share=0.3),
]


def test_the_parts_of_a_run_are_all_of_it():
    look = TrainingEvaluation(step=2, metric="loss", value=1.0, cases=4, seconds=0.5)
    parts = divide(make_outcome(looks=(look,)), STEPS, VITALS, minutes=45 / 60).seconds
    assert sum(parts.values()) == pytest.approx(45)
    assert parts["load"] == 8
    assert parts["waiting for data"] == pytest.approx(6)
    assert parts["compute"] == pytest.approx(24)
    assert parts["looks"] == 0.5
    assert parts["checkpoints"] == pytest.approx(1.5)
    assert parts["validation"] == pytest.approx(5)


def test_after_a_restart_the_rest_is_what_it_cost():
    steps = [*STEPS, step(2, at=190), step(3, at=200)]
    parts = divide(make_outcome(restarts=1), steps, VITALS, minutes=100 / 60).seconds
    assert "validation" not in parts
    assert parts["restarts"] > 50
    assert between_steps(steps) == pytest.approx(2)


def test_memory_before_the_first_step_is_what_is_loaded():
    memory = divide(make_outcome(), STEPS, VITALS, minutes=1).memory_gib
    assert memory == {"what is loaded": 1.2, "what a step needs": pytest.approx(1.8)}


def test_a_cards_memory_is_shared_with_others_and_is_not_divided():
    device = DeviceVitals(index=0, memory_gib=20)
    vitals = [vital.model_copy(update={"devices": (device,)}) for vital in VITALS]
    assert divide(make_outcome(), STEPS, vitals, minutes=1).memory_gib == {}


def test_a_run_that_left_no_journal_has_parts_too():
    parts = divide(make_outcome(), [], [], minutes=1)
    assert parts.memory_gib == {}
    assert parts.seconds["validation"] == pytest.approx(22)


@given(st.floats(0, 100), st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100)), max_size=8))
def test_no_part_is_ever_negative(minutes, times):
    steps = [step(at + 1, at=when, seconds=took) for at, (when, took) in enumerate(times)]
    found = divide(make_outcome(), steps, VITALS, minutes=minutes)
    assert all(value >= 0 for value in (*found.seconds.values(), *found.memory_gib.values()))
