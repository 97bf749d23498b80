"""The last checkpoint is done in time, and no time is given away."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graftwork.records.errors import GracefulStop
from graftwork.train.callbacks import SAVE_ALLOWANCE, STEP_ALLOWANCE, UNKNOWN_SAVE_SECONDS, DeadlineCallback

STEPS = 100_000


class Place:
    """A machine with a clock of its own: steps and checkpoints take what they are asked to."""

    def __init__(self, at, *, margin, step_times, save_times):
        self.now = 0.0
        self.saved_in = None
        self.deadline = DeadlineCallback(
            at, save_seconds=lambda: self.saved_in, margin=margin, now=lambda: self.now
        )
        self._step_times, self._save_times = step_times, save_times

    def save(self):
        took = self._save_times()
        self.now += took
        self.saved_in = max(took, self.saved_in or 0.0)

    def run(self):
        """The steps done, the time of the decision to stop and of the last checkpoint's end."""
        safe = 0
        for number in range(1, STEPS):
            try:
                self.deadline.on_step_begin(number, STEPS)
            except GracefulStop as stopped:
                decided = self.now
                if safe < number - 1:
                    # As the loop does: what is safe is not written again.
                    self.save()
                return number - 1, decided, self.now, stopped
            self.now += self._step_times()
            if self.deadline.wants_checkpoint(None):
                self.save()
                safe = number
        raise AssertionError("it never stopped")


@example(1, 1.0, 6.0, 0.0, 1.0)
@given(st.integers(0, 2**32), st.floats(0.3, 5), st.floats(0.01, 6), st.floats(0, 20), st.floats(1, 400))
def test_the_deadline_is_never_missed_and_never_left_too_early(seed, step, save, margin, more):
    chance = random.Random(seed)
    step_times = lambda: chance.uniform(step, step * STEP_ALLOWANCE)  # noqa: E731
    save_times = lambda: chance.uniform(save, save * SAVE_ALLOWANCE)  # noqa: E731
    at = margin + step * STEP_ALLOWANCE + UNKNOWN_SAVE_SECONDS * SAVE_ALLOWANCE + more
    place = Place(at, margin=margin, step_times=step_times, save_times=save_times)
    done, decided, ended, stopped = place.run()
    assert ended <= at
    # The first interval holds a checkpoint too: as long as it is the longest, it is the measure.
    longest = STEP_ALLOWANCE * (step * STEP_ALLOWANCE + (save * SAVE_ALLOWANCE if done < 5 else 0))
    assert decided + longest + SAVE_ALLOWANCE * max(save * SAVE_ALLOWANCE, place.saved_in) + margin >= at
    assert f"after step {done} of {STEPS}" in stopped.what


def test_with_no_time_at_all_it_does_not_begin():
    place = Place(5.0, margin=10.0, step_times=lambda: 1.0, save_times=lambda: 1.0)
    assert place.run()[0] == 0


def test_a_first_step_that_compiles_is_forgotten():
    times = iter([60.0])
    place = Place(200.0, margin=1.0, step_times=lambda: next(times, 1.0), save_times=lambda: 1.0)
    done, decided, ended, _ = place.run()
    assert ended <= 200.0
    assert decided > 190.0
    assert done > 120


def test_a_look_is_allowed_for_before_the_first_one_was_taken():
    now = [0.0]
    deadline = DeadlineCallback(
        30.0,
        save_seconds=lambda: 1.0,
        evaluation_seconds=lambda number: 50.0 if number == 3 else 0.0,
        margin=1.0,
        now=lambda: now[0],
    )
    for number in (1, 2):
        deadline.on_step_begin(number, 10)
        now[0] += 1
    with pytest.raises(GracefulStop):
        deadline.on_step_begin(3, 10)


def test_the_longest_of_many_steps_is_the_measure_and_not_the_last():
    times = iter([1.0, 1.0, 1.0, 9.0])
    place = Place(60.0, margin=1.0, step_times=lambda: next(times, 1.0), save_times=lambda: 1.0)
    _, decided, _, _ = place.run()
    assert 60 - 9 * STEP_ALLOWANCE - SAVE_ALLOWANCE - 2 <= decided <= 60 - 9 * STEP_ALLOWANCE


def test_measured_times_survive_a_restart():
    first = Place(1000.0, margin=1.0, step_times=lambda: 7.0, save_times=lambda: 3.0)
    first.run()
    second = DeadlineCallback(20.0, save_seconds=lambda: None, margin=1.0, now=lambda: 0.0)
    second.restore(first.deadline.state())
    assert second.seconds_needed(1) == pytest.approx(7.0 * STEP_ALLOWANCE + 3.0 * SAVE_ALLOWANCE + 1.0)
    assert not second.wants_checkpoint(None)
