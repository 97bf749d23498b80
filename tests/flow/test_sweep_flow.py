"""`graft train sweep`: the budget holds, a killed sweep goes on, and graft.yaml gets the best settings."""

import hashlib
import math

import pytest

from graftwork.api.project import open_project
from graftwork.model.probe import describe_device
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.records.base import Figure
from graftwork.records.errors import Interrupted, NegativeResult, UserError, WorkerFailed
from graftwork.records.run import TrainOutcome
from graftwork.train import sweep
from graftwork.train.sweep import SweepRequest, _Sweep, run_sweep, write_best

TEXT = """\
project: p
base: {base}
data:
  logs: [logs/*.jsonl]
  test: 0.3
  validation: 0.2
train:
  rank: 4      # of the adapters
  batch_size: 4
  epochs: 1
  threads: 1
"""
PER_ROW = 0.1
"""Minutes, by the stand-in planner."""


class Machine:
    """Plans by the number of rows and has a loss that is lowest for a high rate."""

    def __init__(self, work, *, fail=(), diverge=(), confirmed=True, killed_after=None):
        self.trained, self.fail, self.killed_after = [], fail, killed_after
        self.diverge, self.confirmed = diverge, confirmed
        self._real = sweep._Here(work, sweep.run_pipeline(work, upto="prepare"))
        self._real.__dict__["_device"] = describe_device()

    def plan(self, variant):
        plan = self._real.plan(variant)
        rows = variant.settings.train.max_rows or 50
        return plan.model_copy(update={"minutes": Figure.exact(PER_ROW * rows, "min")})

    def train(self, variant, plan):
        if self.killed_after is not None and len(self.trained) >= self.killed_after:
            raise Interrupted("killed", fix="")
        if not self.confirmed:
            raise NegativeResult("nothing was started", why="the cost was not confirmed")
        train = variant.settings.train
        if train.learning_rate in self.fail:
            raise WorkerFailed("it diverged", fix="")
        self.trained.append((run_id_of(plan), train.learning_rate, train.rank, train.max_rows))
        noise = int(hashlib.sha256(run_id_of(plan).encode()).hexdigest()[:6], 16) / 2**24 * 1e-3
        minutes = plan.minutes.value
        loss = math.nan if train.learning_rate in self.diverge else 1 - train.learning_rate + noise
        return TrainOutcome.model_construct(
            run_id=run_id_of(plan), validation_loss_after=loss, seconds=minutes * 60, load_seconds=0.0
        )


@pytest.fixture
def project(small_project, tiny_base):
    (small_project / "graft.yaml").write_text(TEXT.format(base=tiny_base))
    return small_project


def run(work, machine, **asked):
    request = SweepRequest(**{"minutes": 40, "trials": 9, **asked})
    made = sweep.run_pipeline(work, upto="prepare")
    return _Sweep(work, made, request, machine).run()


def test_the_best_settings_win_and_the_budget_holds(project):
    with open_project(project).open() as work:
        result = run(work, Machine(work))
    assert result.best is not None
    assert result.best.learning_rate == max(trial.settings.learning_rate for trial in result.trials)
    assert result.minutes <= 40
    assert [len([t for t in result.trials if t.rung == at]) for at in range(len(result.rungs))] == [
        rung.trials for rung in result.rungs
    ]
    # The strength of the adapter is kept.
    assert result.changes.get("alpha", 16) / result.best.rank == 16 / 4


def test_a_killed_sweep_goes_on_and_trains_nothing_twice(project):
    with open_project(project).open() as work:
        whole = run(work, Machine(work), minutes=30)
    (next((project / ".graft" / "sweeps").iterdir()) / "trials.jsonl").unlink()
    with open_project(project).open() as work:
        first = Machine(work, killed_after=4)
        with pytest.raises(Interrupted):
            run(work, first, minutes=30)
        second = Machine(work)
        result = run(work, second, minutes=30)
    assert not {trial[0] for trial in first.trained} & {trial[0] for trial in second.trained}
    assert [trial.model_dump() for trial in result.trials] == [trial.model_dump() for trial in whole.trials]


def test_a_trial_that_would_not_end_in_time_is_not_begun(project, monkeypatch):
    # The first plans were too low by half: the second rung has no time left.
    with open_project(project).open() as work:
        machine = Machine(work)
        monkeypatch.setattr(sweep, "USABLE", 2.0)
        result = run(work, machine, minutes=12)
    late = [trial for trial in result.trials if trial.state == "not begun"]
    assert late
    assert all("minutes that are left" in trial.why for trial in late)
    assert result.minutes <= 12
    assert result.best is not None


def test_a_trial_that_fails_is_noted_and_the_others_go_on(project):
    with open_project(project).open() as work:
        result = run(work, Machine(work, fail=(0.0015,)))
    failed = [trial for trial in result.trials if trial.state == "failed"]
    assert failed
    assert {trial.why for trial in failed} == {"it diverged"}
    assert result.best is not None
    assert result.best.learning_rate != 0.0015


def test_a_sweep_whose_cost_was_not_confirmed_runs_with_the_same_command_once_it_is(project):
    with open_project(project).open() as work:
        with pytest.raises(NegativeResult, match="nothing was started"):
            run(work, Machine(work, confirmed=False))
        result = run(work, Machine(work))
    assert {trial.state for trial in result.trials} == {"done"}


def test_a_trial_without_a_finite_loss_counts_against_the_budget(project):
    with open_project(project).open() as work:
        result = run(work, Machine(work, diverge=(0.0015,)))
    failed = [trial for trial in result.trials if trial.state == "failed"]
    assert failed
    assert all(trial.minutes > 0 for trial in failed)


def test_a_budget_of_steps_is_not_exceeded(project):
    with open_project(project).open() as work:
        result = run(work, Machine(work), minutes=None, steps=40)
    steps = sum(trial.rows / 4 for trial in result.trials)
    assert steps <= 40


def test_a_budget_that_is_too_small_is_refused_with_the_reason(project):
    with open_project(project).open() as work, pytest.raises(NegativeResult, match="too small"):
        run(work, Machine(work), minutes=0.1)


def test_impossible_values_are_refused_before_the_first_trial(project):
    with open_project(project).open() as work:
        machine = Machine(work)
        with pytest.raises(UserError, match="not possible"):
            run(work, machine, ranks=(4, 1024))
    assert not machine.trained


def test_the_result_is_written_with_the_comments_of_the_file(project):
    with open_project(project).open() as work:
        result = run(work, Machine(work))
        write_best(work, result)
    text = (project / "graft.yaml").read_text()
    assert "# of the adapters" in text
    with open_project(project).open() as work:
        train = work.settings.train
        assert result.best is not None
        assert (train.learning_rate, train.rank, train.batch_size) == tuple(result.best.model_dump().values())


@pytest.mark.parametrize("asked", [{}, {"minutes": 1.0, "steps": 3}])
def test_a_sweep_needs_exactly_one_budget(project, asked):
    with open_project(project).open() as work, pytest.raises(UserError, match="one budget"):
        run_sweep(work, SweepRequest(**asked))
