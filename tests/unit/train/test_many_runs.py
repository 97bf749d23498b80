"""Many runs: sweeps here and elsewhere, federated sites, variants, several runs in one process."""

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.files.disk import Journal, write_atomic
from graftwork.fleet import jobs as fleet_jobs
from graftwork.pipeline.step import StepOutputs
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import EnvironmentFailure, UserError, WorkerFailed
from graftwork.records.fleet import Moment, Reconciled
from graftwork.records.hardware import Offer
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome
from graftwork.train import multi_run, sweep
from graftwork.train.all_models import with_train
from graftwork.train.multi_run import _require_patience, consecutive_crashes, train_many
from graftwork.train.run_folder import ATTEMPTS, OUTCOME, SAVED, failure_of, is_settled
from graftwork.train.sweep import (
    SearchSpace,
    SweepSettings,
    advance,
    choose_trials,
    count_rungs,
    default_space,
    plan_rungs,
)

NOW = SweepSettings(learning_rate=5e-4, rank=8, batch_size=8)


def test_the_present_settings_are_tried_first_and_once():
    trials = choose_trials(default_space(NOW), NOW, most=9, seed=1)
    assert trials[0] == NOW
    assert len(set(trials)) == len(trials) == 9


def test_the_same_seed_gives_the_same_trials():
    space = default_space(NOW)
    assert choose_trials(space, NOW, most=9, seed=1) == choose_trials(space, NOW, most=9, seed=1)


def test_a_space_of_one_value_has_one_trial():
    space = SearchSpace((5e-4,), (8,), (8,))
    assert choose_trials(space, NOW, most=9, seed=1) == (NOW,)


@pytest.mark.parametrize(("trials", "counts"), [(9, (9, 3, 1)), (2, (2, 1)), (10, (10, 4, 2, 1)), (1, (1,))])
def test_a_third_of_the_trials_goes_on(trials, counts):
    assert count_rungs(trials) == counts


@given(
    st.integers(2, 30),
    st.integers(1, 5000),
    st.integers(1, 64),
    st.floats(0.1, 1e6),
    st.floats(0, 5),
    st.floats(0.001, 2),
)
def test_the_rungs_cost_no_more_than_the_budget(trials, rows, least, budget, fixed, slope):
    def cost(count):
        return fixed + slope * count

    rungs = plan_rungs(trials, rows=rows, least=least, budget=budget, cost=cost)
    assert sum(rung.trials * cost(rung.rows) for rung in rungs) <= budget
    assert all(rung.rows <= rows for rung in rungs)
    assert [rung.rows for rung in rungs] == sorted({rung.rows for rung in rungs})
    if rungs:
        assert rungs[0].rows >= min(least, rows)


def test_a_budget_for_every_row_has_no_second_rung():
    rungs = plan_rungs(9, rows=100, least=10, budget=1e9, cost=float)
    assert [(rung.trials, rung.rows) for rung in rungs] == [(9, 100)]


def test_a_budget_that_pays_for_no_two_trials_gives_no_rungs():
    assert plan_rungs(9, rows=100, least=10, budget=15, cost=float) == ()


def test_the_best_by_loss_go_on_and_of_equal_ones_the_first():
    others = [NOW.model_copy(update={"rank": rank}) for rank in (2, 4, 16)]
    losses = [(NOW, 1.0), (others[0], 0.5), (others[1], 1.0), (others[2], 2.0)]
    assert advance(losses, 2) == (others[0], NOW)


PRICED = Offer(place="cloud", gpu="L4", instance="g6.xlarge", usd_per_hour=0.8, source="", dated="")
FREE = PRICED.model_copy(update={"usd_per_hour": None})


class Place:
    """Jobs that write their outcome once they are followed."""

    def __init__(self, folder, *, offer=PRICED, jobs=()):
        self.jobs, self.requests, self.followed = list(jobs), [], []
        self.runs, self.ends = folder, None
        entered = SimpleNamespace(update=lambda *_asked, **_values: None)
        self.variant = SimpleNamespace(project=SimpleNamespace(runs=folder), runs=entered)
        self.machine = sweep._Elsewhere(
            self.variant, StepOutputs({}), sweep.SweepRequest(place="cloud", confirmed=True)
        )
        self.machine.__dict__["_offer"] = offer

    def start_run(self, _work, request, _confirm, *, outputs):
        self.requests.append(request)
        return SimpleNamespace(id="new", run_id="of-the-new-offer", is_open=True)

    def follow(self, _work, job):
        self.followed.append(job.id)
        if self.ends is not None:
            return self.ends
        self.write(job.run_id)
        return job

    def write(self, run_id):
        (self.runs / run_id).mkdir()
        (self.runs / run_id / "outcome.json").write_text(run_id)

    def train(self, monkeypatch):
        monkeypatch.setattr(fleet_jobs, "run_id_of", lambda _plan: "of-the-plan")
        monkeypatch.setattr(fleet_jobs, "find_jobs", lambda *_asked: self.jobs)
        monkeypatch.setattr(fleet_jobs, "start_run", self.start_run)
        monkeypatch.setattr(fleet_jobs, "follow", self.follow)
        if self.ends is None:
            monkeypatch.setattr(sweep, "require_done", lambda *_asked: None)
        read = lambda data: TrainOutcome.model_construct(run_id=data.decode())  # noqa: E731
        monkeypatch.setattr(sweep.TrainOutcome, "from_json", read)
        monkeypatch.setattr(sweep.TrainOutcome, "model_dump", lambda *_asked, **_how: {})
        return self.machine.train(self.variant, Plan.model_construct()).run_id


def test_an_open_job_that_was_planned_for_another_offer_is_followed(tmp_path, monkeypatch):
    job = SimpleNamespace(id="old", run_id="of-the-old-offer", is_open=True)
    place = Place(tmp_path, jobs=[job])
    assert place.train(monkeypatch) == "of-the-old-offer"
    assert place.followed == ["old"]
    assert not place.requests


def test_a_result_that_was_planned_for_another_offer_is_taken(tmp_path, monkeypatch):
    job = SimpleNamespace(id="old", run_id="of-the-old-offer", is_open=False)
    place = Place(tmp_path, jobs=[job])
    place.write("of-the-old-offer")
    assert place.train(monkeypatch) == "of-the-old-offer"
    assert not place.followed


@pytest.mark.parametrize(("offer", "gpu"), [(PRICED, "g6.xlarge"), (FREE, "")])
def test_a_new_job_asks_for_the_offer_it_was_planned_for(tmp_path, monkeypatch, offer, gpu):
    place = Place(tmp_path, offer=offer)
    assert place.train(monkeypatch) == "of-the-new-offer"
    assert [request.gpu for request in place.requests] == [gpu]


@pytest.mark.parametrize(
    ("state", "booted_at", "is_failed"),
    [("lost", 1.0, False), ("failed", None, False), ("failed", 1.0, True)],
)
def test_a_machine_that_was_taken_away_says_nothing_of_the_settings(
    tmp_path, monkeypatch, state, booted_at, is_failed
):
    place = Place(tmp_path)
    reason = "the machine was taken away"
    place.ends = SimpleNamespace(
        id="new", place="cloud", run_id="r", state=state, reason=reason, booted_at=booted_at, fetched=False
    )
    with pytest.raises(EnvironmentFailure, match=reason) as caught:
        place.train(monkeypatch)
    # Only this one would be noted as the result of a trial.
    assert isinstance(caught.value, WorkerFailed) == is_failed


@pytest.fixture
def poll(monkeypatch):
    """Why the run has ended at a time, with the place up, down or refusing; None while it goes on."""
    place = "ssh:far"
    job = SimpleNamespace(id="job", place="ssh", is_open=True, state="running", reason="")
    monkeypatch.setattr(fleet_jobs, "get_job", lambda *_asked: job)
    monkeypatch.setattr(fleet_jobs, "find_jobs", lambda *_asked: [job])
    work = SimpleNamespace(reporter=SimpleNamespace(info=lambda _text: None))
    runs, made = fleet_jobs.RunSet(patience_seconds=900), StepOutputs({"plan": Plan.model_construct()})

    def ask(now, *, down=False, refuses=False):
        def reconcile(**_asked):
            if refuses:
                raise EnvironmentFailure("the key is not known there")
            return Reconciled(unreachable=(place,) if down else ())

        if not runs:
            runs.start("far", work, fleet_jobs.FleetRequest(place), made)
        monkeypatch.setattr(fleet_jobs, "collecting", lambda *_asked: SimpleNamespace(reconcile=reconcile))
        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
        monkeypatch.setattr(fleet_jobs, "time", clock)
        return {name: why for name, _, why in runs.ended()}.get("far")

    return ask


def test_a_place_that_does_not_answer_for_long_fails_and_may_be_tried_again(poll):
    assert poll(0, down=True) is None
    assert poll(899, down=True) is None
    assert poll(900, down=True) == "ssh:far has not answered for 15 minutes"
    assert poll(901, down=True) is None


def test_a_place_that_refuses_for_long_fails(poll):
    assert poll(0, refuses=True) is None
    assert poll(900, refuses=True) == "ssh:far has not answered for 15 minutes"


def test_a_place_that_answers_in_between_goes_on(poll):
    assert poll(0, down=True) is None
    assert poll(600) is None
    assert poll(1000, down=True) is None
    assert poll(1899, down=True) is None


@pytest.mark.parametrize(
    ("has_it", "requested", "polled"),
    [("slurm", "ray", "slurm"), ("ssh", "ssh:far", "ssh:far"), ("ray", "ray", "ray")],
)
def test_a_job_of_an_earlier_command_is_asked_for_at_the_place_that_has_it(
    monkeypatch, has_it, requested, polled
):
    job, asked = SimpleNamespace(id="job", place=has_it, is_open=True), []

    def collecting(_work, place):
        asked.append(place)
        return SimpleNamespace(reconcile=lambda **_when: Reconciled())

    monkeypatch.setattr(fleet_jobs, "get_job", lambda *_asked: job)
    monkeypatch.setattr(fleet_jobs, "find_jobs", lambda *_asked: [job])
    monkeypatch.setattr(fleet_jobs, "collecting", collecting)
    runs, outputs = fleet_jobs.RunSet(), StepOutputs({"plan": Plan.model_construct()})
    runs.start("run", SimpleNamespace(), fleet_jobs.FleetRequest(requested), outputs)
    assert not list(runs.ended())
    assert asked == [polled]


@dataclass
class Project:
    settings: ProjectSettings


@dataclass
class Work:
    project: Project
    model: str

    @property
    def settings(self):
        return self.project.settings.of_model(self.model)


def make_work(train=None, models=None):
    content = {"project": "p", "base": "b", "data": {"logs": ["l"]}, "train": train or {}}
    settings = ProjectSettings.model_validate({**content, "models": models or {}})
    return Work(Project(settings), settings.main_model)


MODELS = {"main": {"train": {"rank": 4}}}


@pytest.mark.parametrize("models", [None, MODELS])
def test_changes_apply_to_the_model_that_is_worked_on(models):
    assert with_train(make_work(models=models), {"rank": 2}).settings.train.rank == 2


@pytest.mark.parametrize("models", [None, MODELS])
@pytest.mark.parametrize(
    ("train", "changes"),
    [({}, {"rank": 1024}), ({}, {"learning_rate": 2.0}), ({"strategy": "ddp"}, {"proximal": 0.1})],
)
def test_impossible_settings_are_a_mistake_with_its_reason(models, train, changes):
    with pytest.raises(UserError, match="not possible") as mistake:
        with_train(make_work(train, models), changes)
    assert next(iter(changes)) in mistake.value.why
    assert mistake.value.where == "train"


@pytest.mark.parametrize(
    ("attempts", "saved", "crashes"),
    [
        ([], [], 0),
        ([10, 20, 30], [], 3),
        # Another command's, long ago.
        ([1, 2, 10], [(1.5, 4)], 1),
        # The second came further and was killed after that: its crash counts, those before do not.
        ([10, 20], [(25, 4)], 1),
        ([10, 20, 30, 40], [(15, 2), (25, 4)], 3),
        # Saving the same step again is no progress.
        ([10, 20, 30], [(15, 4), (25, 4), (35, 4)], 3),
        ([10, 20, 30], [(15, 4), (25, 4), (35, 6)], 1),
    ],
)
def test_only_crashes_since_the_newest_checkpoint_count(attempts, saved, crashes):
    assert consecutive_crashes(attempts, saved, begun=5) == crashes


def make_job(folder, *, max_restarts=1):
    plan = SimpleNamespace(train={"settings": {}})
    return SimpleNamespace(
        run_id=folder.name,
        folder=str(folder),
        base_folder="base",
        start_adapter=None,
        plan=plan,
        run={"max_restarts": max_restarts},
        crew={},
        keeping={},
        endpoint={},
    )


def when(at):
    """The moment of a journal's line by a clock that nobody sets."""
    return {"at": at, "steady": at - 5, "boot": ""}


def test_a_run_that_comes_further_each_time_is_never_given_up(tmp_path):
    job, clock = make_job(tmp_path), iter(range(10, 1000))
    for step in range(20):
        _require_patience(job, begun=Moment(at=5, steady=0, boot=""))
        Journal(tmp_path / ATTEMPTS).append({"pid": 1, **when(next(clock))})
        Journal(tmp_path / SAVED).append({**when(next(clock)), "step": step, "folder": "x"})
    _require_patience(job, begun=Moment(at=5, steady=0, boot=""))
    Journal(tmp_path / ATTEMPTS).append({"pid": 1, **when(next(clock))})
    with pytest.raises(WorkerFailed, match="killed 2 time"):
        _require_patience(job, begun=Moment(at=5, steady=0, boot=""))


class Card:
    """Stands in for torch.cuda."""

    def __init__(self):
        self.asked = []

    def is_available(self):
        return True

    is_initialized = is_available

    def empty_cache(self):
        self.asked.append("empty")

    def set_per_process_memory_fraction(self, share):
        self.asked.append(share)


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self):
        self.self = self


@pytest.fixture
def _few_objects():
    """The collector visits what a test makes, not what all before it have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_few_objects")
@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_run_is_free_when_the_next_begins(tmp_path, monkeypatch, fails):
    card, left, alive = Card(), [], []
    monkeypatch.setattr(torch, "cuda", card)
    jobs = [make_job(tmp_path / name) for name in ("one", "two")]

    def train(job, _load, _crew):
        alive.extend(ref() is not None for ref in left)
        left.append(weakref.ref(Knot()))
        if fails:
            raise ValueError("broken")
        write_atomic(tmp_path / job.run_id / OUTCOME, "{}")

    batch = SimpleNamespace(jobs=jobs, side_by_side=(), begun=Moment(at=0, steady=0, boot=""))
    train_many(batch, train)
    assert alive == [False]
    assert card.asked == ["empty", 1.0] * 2
    assert all(is_settled(job) for job in jobs)
    assert [failure_of(job) is not None for job in jobs] == [fails, fails]


@pytest.mark.usefixtures("_few_objects")
def test_without_a_card_that_was_used_none_is_touched(monkeypatch):
    card = Card()
    card.is_initialized = lambda: False
    monkeypatch.setattr(torch, "cuda", card)
    multi_run.free_memory()
    assert card.asked == []
