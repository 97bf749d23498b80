"""Time left: from the tokens of the first batch, then from whole batches, and between single requests."""

import pytest
from gate_samples import new_case
from hypothesis import given
from hypothesis import strategies as st
from stand_in_engine import StandInEngine

from graftwork.evaluate.ask import runner as pacing
from graftwork.evaluate.ask.runner import CaseRunner, Pace
from graftwork.records.report import EvalJob


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Beats:
    def __init__(self):
        self.reported = []

    def beat(self, phase, done, total, *, seconds_left=None, **detail):
        self.reported.append((phase, done, seconds_left, detail))

    def of(self, phase):
        return [(done, left) for output, done, left, _ in self.reported if output == phase]


def write_tokens(pace, clock, *, rows, steps, each):
    for _ in range(steps):
        clock.now += each
        for row in range(rows):
            pace.hear(row)


def test_the_first_batch_is_judged_by_its_tokens_so_far():
    clock = Clock()
    pace = Pace(left=8, longest=11, clock=clock)
    pace.begin(4)
    assert pace.seconds_left() is None
    write_tokens(pace, clock, rows=4, steps=6, each=2.0)
    # 2 s to the first token, 10 more of 2 s each at most; the second batch as long as that.
    assert pace.seconds_left() == pytest.approx(10 + 22)
    assert pace.tokens_per_second() == pytest.approx(24 / 12)


def test_whole_batches_are_believed_before_tokens():
    clock = Clock()
    pace = Pace(left=12, longest=100, clock=clock)
    pace.begin(4)
    write_tokens(pace, clock, rows=4, steps=4, each=1.0)
    pace.end()
    assert pace.seconds_left() == pytest.approx(8.0)
    pace.begin(4)
    write_tokens(pace, clock, rows=4, steps=3, each=1.0)
    assert pace.seconds_left() == pytest.approx(1 + 4)


def test_a_batch_that_takes_longer_than_those_before_is_not_said_to_be_over():
    clock = Clock()
    pace = Pace(left=8, longest=11, clock=clock)
    pace.begin(4)
    write_tokens(pace, clock, rows=4, steps=4, each=1.0)
    pace.end()
    pace.begin(4)
    write_tokens(pace, clock, rows=4, steps=6, each=1.0)
    # 4 s were expected; the longest answer may have 5 more tokens of 1 s.
    assert pace.seconds_left() == pytest.approx(5.0)


def test_progress_is_reported_now_and_then_and_not_at_every_token():
    clock = Clock()
    pace = Pace(left=1, longest=1000, clock=clock)
    assert not pace.hear(0)
    pace.begin(1)
    reported = 0
    for _ in range(100):
        clock.now += pacing.BEAT_SECONDS / 10
        reported += pace.hear(0)
    assert 8 <= reported <= 10


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=5),
    st.integers(0, 30),
    st.integers(1, 15),
)
def test_the_time_left_is_never_negative(batches, left, longest):
    clock = Clock()
    pace = Pace(left=left, longest=longest, clock=clock)
    for rows, steps in batches:
        pace.begin(rows)
        write_tokens(pace, clock, rows=rows, steps=steps, each=0.5)
        assert (pace.seconds_left() or 0.0) >= 0
        pace.end()
        assert (pace.seconds_left() or 0.0) >= 0


def make_runner(tmp_path, *, timings=()):
    job = EvalJob(
        subject="base",
        folder=str(tmp_path),
        base_folder=str(tmp_path),
        adapter_folder=None,
        cases_file=str(tmp_path / "cases.jsonl"),
        max_new_tokens=8,
        batch_size=4,
        latency_cases=len(timings),
    )
    progress = Beats()
    engine = StandInEngine(tokens_told=5, timings=timings)
    return CaseRunner(job, engine=engine, progress=progress, stop_asked=lambda: False), progress


def make_cases(n):
    return [new_case(f"c{i}", "x" * (i + 1), "y") for i in range(n)]


def test_progress_of_the_first_batch_is_reported_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(pacing, "BEAT_SECONDS", 0.0)
    runner, progress = make_runner(tmp_path)
    runner.ask_all(make_cases(8))
    unfinished = [left for done, left in progress.of("answering") if done == 0]
    assert len(unfinished) > 2
    assert any(left is not None for left in unfinished)
    assert progress.of("answering")[-1] == (8, 0.0)


def test_single_requests_report_the_time_left_by_those_that_are_done(tmp_path):
    runner, progress = make_runner(tmp_path, timings=(2.0, 4.0, 3.0))
    runner.ask_all(make_cases(4))
    runner.time_requests(make_cases(4))
    assert progress.of("timing single requests") == [(0, None), (1, 4.0), (2, 3.0), (3, 0.0)]
