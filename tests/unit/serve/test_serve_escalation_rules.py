"""When a request escalates: checks that fail, hang or break, and budgets that hold in every window."""

import asyncio
import gc
import threading
import time
import weakref
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from graftwork.serve import escalation
from graftwork.serve.budgets import DAY_SECONDS, MINUTE_SECONDS, RequestBudget
from graftwork.serve.escalation import DaemonThreads, Escalator
from graftwork.serve.keys import KeyRing, UsageFile
from graftwork.serve.settings import EscalateSettings

SETTINGS = EscalateSettings(to="large", checks=("json_valid",))


class Checks:
    def __init__(self, found):
        self.found = found

    def find_failing(self, messages, text):
        if isinstance(self.found, Exception):
            raise self.found
        if callable(self.found):
            return self.found()
        return self.found


def judge(run, found, settings=SETTINGS):
    escalator = Escalator(settings, checks=Checks(found), clock=time.monotonic)

    async def main():
        return await escalator.judge([{"role": "user", "content": "q"}], "a")

    return run(main)


def test_an_answer_that_passes_is_not_escalated(run):
    assert judge(run, None) is None


def test_the_failing_check_is_named(run):
    assert judge(run, "json_valid") == ("json_valid", True)


def test_a_check_that_raises_counts_as_failed_and_its_message_is_not_logged(run, caplog):
    assert judge(run, ValueError("quotes the answer")) == ("a check failed to run", True)
    assert "ValueError" in caplog.text
    assert "quotes the answer" not in caplog.text


def test_a_check_that_hangs_counts_as_failed_and_does_not_block(run, monkeypatch):
    monkeypatch.setattr(escalation, "CHECK_SECONDS", 0.05)
    released = threading.Event()

    async def main():
        try:
            escalator = Escalator(SETTINGS, checks=Checks(released.wait), clock=time.monotonic)
            return await escalator.judge([], "a")
        finally:
            released.set()

    assert run(main) == ("a check took too long", True)


def test_checks_that_hang_leave_other_threads_alone_and_do_not_keep_the_loop_open(monkeypatch):
    monkeypatch.setattr(escalation, "CHECK_SECONDS", 0.05)
    released = threading.Event()

    async def main():
        escalator = Escalator(SETTINGS, checks=Checks(released.wait), clock=time.monotonic)
        found = await asyncio.gather(*(escalator.judge([], "a") for _ in range(40)))
        assert {escalation.check for escalation in found} == {"a check took too long"}
        hanging = [thread for thread in threading.enumerate() if thread.name == "answer-check"]
        assert all(thread.daemon for thread in hanging)
        return await asyncio.to_thread(lambda: "free")

    try:
        assert asyncio.run(main()) == "free"  # the end of the loop waits for asyncio's own threads
        assert not released.is_set()
    finally:
        released.set()


@given(
    steps=st.lists(st.floats(0, 50_000), max_size=60),
    per_minute=st.integers(1, 5) | st.none(),
    per_day=st.integers(1, 12) | st.none(),
)
def test_no_window_takes_more_than_its_budget(steps, per_minute, per_day):
    now = 0.0
    budget = RequestBudget(per_minute, per_day, clock=lambda: now)
    taken = []
    for step in steps:
        now += step
        if budget.take():
            taken.append(now)
    # Two minutes of the clock may be as close as one second: their budgets add up.
    for window, most in ((MINUTE_SECONDS, per_minute), (DAY_SECONDS, per_day)):
        if most is None:
            continue
        for first in taken:
            assert sum(first <= at < first + window for at in taken) <= 2 * most
    if per_day is not None:
        days = [at // DAY_SECONDS for at in taken]
        assert all(days.count(day) <= per_day for day in days)
    if per_minute is None and per_day is None:
        assert len(taken) == len(steps)


def test_the_budget_of_a_day_survives_a_restart_and_ends_with_the_day(tmp_path):
    now = 10.6 * DAY_SECONDS

    def open_budget():
        return RequestBudget(None, 2, clock=lambda: now)

    async def main():
        nonlocal now
        budget = open_budget()
        assert budget.take()
        await UsageFile(tmp_path, KeyRing(), budget).save()
        # The endpoint is killed here, and runs without `serve.escalate` for a while.
        without = UsageFile(tmp_path, KeyRing())
        without.restore()
        await without.save()

        again = open_budget()
        file = UsageFile(tmp_path, KeyRing(), again)
        file.restore()
        assert again.take()
        assert not again.take()
        again.give_back()
        await file.save()
        last = open_budget()
        UsageFile(tmp_path, KeyRing(), last).restore()
        assert [last.take(), last.take()] == [True, False]
        now = 11 * DAY_SECONDS
        assert [last.take(), last.take(), last.take()] == [True, True, False]

    asyncio.run(main())


def test_checks_that_are_given_up_while_all_threads_hang_leave_nothing_in_memory():
    class Answer:
        """Stands for the text of an answer."""

    async def main():
        threads, end = DaemonThreads(2, name="test"), threading.Event()
        hanging = [threads.submit(end.wait) for _ in range(2)]
        answers = [Answer() for _ in range(3)]
        kept = weakref.WeakSet(answers)
        given_up = [threads.submit(partial(id, answer)) for answer in answers]
        last = threads.submit(lambda: "answered")
        del answers
        for future in given_up:
            assert future.cancel()
        gc.collect()
        left = len(kept)
        end.set()
        assert await asyncio.wrap_future(last) == "answered"
        for future in hanging:
            assert await asyncio.wrap_future(future)
        return left

    assert asyncio.run(main()) == 0
