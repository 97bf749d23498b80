"""A cycle knows its job at a place by what it trains, not by an id that the device changes."""

from types import SimpleNamespace

import pytest
from memory_cycles import MemoryCycles
from sample_plans import make_plan

from graftwork import open_project
from graftwork.cycle import runner, session
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import export_bundle
from graftwork.fleet.plans import adopt_plan, find_unpacked, traveling_splits
from graftwork.grading.checks import GradeCheck
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.records.errors import Busy, UserError
from graftwork.records.fleet import FleetJob, PlacedJob
from graftwork.records.plan import Plan
from graftwork.store.cycles import name_cycle
from graftwork.store.database import open_database
from graftwork.store.runs import StepLedger
from graftwork.train.run_folder import OUTCOME
from graftwork.train.settings import TrainSettings

HERE = make_plan(dtype="float32")
THERE = make_plan(dtype="bfloat16")
OTHER = make_plan(dtype="bfloat16", train={"epochs": 7})


def make_job(plan, number, state="submitted"):
    values = {"id": f"{number:012x}", "label": f"graft-00000000-{number:012x}", "place": "there"}
    return FleetJob(
        **values, run_id=run_id_of(plan), bundle="", state=state, created_at=0.0, updated_at=0.0, seconds=60.0
    )


@pytest.fixture
def work(tmp_path):
    """A project with a cycle that was planned here."""
    jobs, plans = [], {run_id_of(plan): plan for plan in (HERE, THERE, OTHER)}
    entries = {run_id: SimpleNamespace(plan=plan.model_dump(mode="json")) for run_id, plan in plans.items()}
    step = SimpleNamespace(output=HERE.model_dump(mode="json"))
    return SimpleNamespace(
        cycles=MemoryCycles(),
        jobs=SimpleNamespace(list=lambda: tuple(jobs), enter=jobs.append),
        runs=SimpleNamespace(get=entries.get),
        ledger=SimpleNamespace(get={"cycle/7/plan": step}.get),
        project=SimpleNamespace(runs=tmp_path),
        reporter=SimpleNamespace(info=lambda _text: None),
        settings=SimpleNamespace(
            cycle=SimpleNamespace(place="there", gpu=""),
            fleet=SimpleNamespace(mirror=None),
            train=TrainSettings(),
        ),
    )


def test_jobs_planned_for_another_device_are_jobs_of_the_run(work):
    assert run_id_of(HERE) != run_id_of(THERE)
    for number, plan in enumerate((HERE, THERE, OTHER)):
        work.jobs.enter(make_job(plan, number))
    assert [job.id[-1] for job in fleet_jobs.find_jobs(work, HERE)] == ["0", "1"]


def test_a_canceled_cycle_stops_the_job_that_was_planned_for_the_place(work, monkeypatch):
    stopped = []
    monkeypatch.setattr(runner, "stop", lambda _work, job, at_once: stopped.append((job.id[-1], at_once)))
    monkeypatch.setattr(runner, "name_cycle", lambda number, step: f"cycle/{number}/{step}")
    for number, (plan, state) in enumerate(
        ((THERE, "submitted"), (THERE, "failed"), (OTHER, "submitted"), (HERE, "submitted"))
    ):
        work.jobs.enter(make_job(plan, number, state))
    runner.stop_jobs(work, SimpleNamespace(number=7))
    assert stopped == [("0", True), ("3", True)]


def test_a_canceled_cycle_leaves_the_job_that_the_next_one_trains_with(work, monkeypatch):
    """The next cycle has the same data and settings: its job is known by the same plan."""
    stopped = []
    monkeypatch.setattr(runner, "stop", lambda _work, job, at_once: stopped.append(job.id[-1]))
    entries = {name_cycle(7, "plan"): HERE, name_cycle(8, "plan"): HERE, name_cycle(9, "plan"): OTHER}
    outputs = {name: SimpleNamespace(output=plan.model_dump(mode="json")) for name, plan in entries.items()}
    work.ledger.get = outputs.get
    work.jobs.enter(make_job(THERE, 1))
    for number in (8, 9):
        store = MemoryCycles()
        cycle = CycleState(
            number=number,
            model="main",
            cause="x",
            version="",
            started_at=0.0,
            steps=(CycleStepState(name="train", status="running"),),
        )
        store.change(lambda state, cycle=cycle: state.model_copy(update={"cycle": cycle}))
        work.cycles = store
        runner.stop_jobs(work, SimpleNamespace(number=7))
        assert stopped == ([] if number == 8 else ["1"])


def test_a_cycle_that_begins_while_jobs_are_stopped_keeps_the_job_that_it_follows(work, monkeypatch):
    """Stopping the first one takes a while; the next cycle trains the same in the second."""
    stopped = []
    entries = dict.fromkeys((name_cycle(7, "plan"), name_cycle(8, "plan")), HERE)
    outputs = {name: SimpleNamespace(output=plan.model_dump(mode="json")) for name, plan in entries.items()}
    work.ledger.get = outputs.get
    for number in range(2):
        work.jobs.enter(make_job(THERE, number))

    def stop(_work, job, at_once):
        stopped.append(job.id[-1])
        train = CycleStepState(name="train", status="running")
        cycle = CycleState(number=8, model="main", cause="x", version="", started_at=0.0, steps=(train,))
        work.cycles.change(lambda state: state.model_copy(update={"cycle": cycle}))

    monkeypatch.setattr(runner, "stop", stop)
    runner.stop_jobs(work, SimpleNamespace(number=7))
    assert stopped == ["0"]


def test_a_job_that_cannot_be_stopped_does_not_keep_the_others_of_a_canceled_cycle(work, monkeypatch):
    stopped, lines = [], []

    def stop(_work, job, at_once):
        if job.id[-1] == "0":
            raise KeyError("status")
        stopped.append((job.id[-1], at_once))

    work.reporter.info = lines.append
    monkeypatch.setattr(runner, "stop", stop)
    monkeypatch.setattr(runner, "name_cycle", lambda number, step: f"cycle/{number}/{step}")
    for number in range(2):
        work.jobs.enter(make_job(THERE, number))
    runner.stop_jobs(work, SimpleNamespace(number=7))
    assert stopped == [("1", True)]
    assert "not stopped yet: its client failed (KeyError)" in lines[0]


@pytest.mark.parametrize("asked", ["ssh", "ssh:gpu1", "auto"])
def test_an_interrupted_run_goes_on_with_its_job_at_the_place(work, monkeypatch, asked):
    at_gpu1 = PlacedJob(place="ssh", id="1", label="graft-00000000-000000000001", host="gpu1")
    job = make_job(THERE, 1).model_copy(update={"place": "ssh", "placed": at_gpu1})
    work.jobs.enter(job)
    planned = StepOutputs({"plan": HERE})
    monkeypatch.setattr(fleet_jobs, "run_pipeline", lambda *_words, **_more: planned)
    monkeypatch.setattr(
        fleet_jobs, "control", lambda *_words: SimpleNamespace(place=SimpleNamespace(paid=False))
    )
    assert fleet_jobs.continue_job(work, asked) == job
    assert fleet_jobs.continue_job(work, "ssh:gpu2") is None
    assert fleet_jobs.continue_job(work, "kaggle") is None


@pytest.mark.parametrize(("paid", "submitted"), [(False, 1), (True, 0)])
def test_a_job_whose_submission_was_cut_off_is_submitted_again_where_that_is_free(
    work, monkeypatch, paid, submitted
):
    work.jobs.enter(make_job(THERE, 1, "intended").model_copy(update={"place": "ssh"}))
    sent = []

    def submit(job, order, **_more):
        sent.append(order.label)
        return job.model_copy(update={"state": "submitted"})

    monkeypatch.setattr(fleet_jobs, "run_pipeline", lambda *_words, **_more: StepOutputs({"plan": HERE}))
    controller = SimpleNamespace(place=SimpleNamespace(paid=paid), submit=submit)
    monkeypatch.setattr(fleet_jobs, "control", lambda *_words: controller)
    assert fleet_jobs.continue_job(work, "ssh:gpu1").state == ("intended" if paid else "submitted")
    assert len(sent) == submitted


def test_a_clock_that_is_set_back_does_not_put_off_the_reconciliation(work, monkeypatch):
    seen, steady = [], SimpleNamespace(now=1000.0)
    work.jobs.enter(make_job(THERE, 1))
    work.settings.fleet.reconcile_minutes = 10
    monkeypatch.setattr(session, "reconcile", lambda _work: seen.append(steady.now))
    monkeypatch.setattr(session.clock, "steady", lambda: steady.now)
    housekeeper = session.Housekeeper(work)
    for day in (2_000_000_000.0, 1_800_000_000.0, 1_800_000_300.0):
        monkeypatch.setattr(session.time, "time", lambda day=day: day)
        housekeeper.tick()
        housekeeper.tick()
        steady.now += 300
    assert seen == [1000.0, 1300.0, 1600.0]


def test_a_restarted_cycle_follows_the_job_that_was_planned_for_the_place(work, monkeypatch):
    followed = []
    work.jobs.enter(make_job(THERE, 1))

    def follow(_work, job):
        followed.append(job.id[-1])
        return job

    monkeypatch.setattr(fleet_jobs, "follow", follow)
    monkeypatch.setattr(fleet_jobs, "require_done", lambda *_words: None)
    made = runner.train_at_place(work, StepOutputs({"plan": HERE}))
    assert followed == ["1"]
    # What comes next goes on from the run that was trained there.
    assert made.get("plan", Plan) == THERE


def test_the_result_of_a_job_that_was_planned_for_the_place_is_taken(work):
    work.jobs.enter(make_job(THERE, 1, "done"))
    folder = work.project.runs / run_id_of(THERE)
    folder.mkdir()
    (folder / OUTCOME).touch()
    assert runner.train_at_place(work, StepOutputs({"plan": HERE})).get("plan", Plan) == THERE


def test_a_run_that_is_at_a_place_is_not_started_at_a_second_one(work, monkeypatch):
    work.jobs.enter(make_job(THERE, 1))
    monkeypatch.setattr(fleet_jobs, "control", lambda *_words: None)
    request = fleet_jobs.FleetRequest("elsewhere")
    with pytest.raises(Busy, match="already at there"):
        fleet_jobs.start_run(work, request, lambda _quote: True, outputs=StepOutputs({"plan": HERE}))


def grpo(metric="task_success", **rollouts):
    given = {"objective": "grpo", "rewards": [{"metric": metric}], "rollouts": rollouts}
    return TrainSettings.model_validate(given)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (TrainSettings(), []),
        (grpo(), []),
        (grpo(source="train"), []),
        (grpo(source="prompts.jsonl"), ["train.rollouts.source: prompts.jsonl"]),
        (grpo("trl:own.py:f"), ["train.rewards: trl:own.py:f"]),
        (grpo("mine"), ["train.rewards: mine"]),
        (grpo(environment={"python": "game.py:Game"}), ["train.rollouts.environment"]),
        (grpo("taskset", taskset={"name": "set", "python": "python"}), ["train.rollouts.taskset"]),
    ],
)
def test_files_that_a_bundle_does_not_hold_are_named(train, named):
    checks = [GradeCheck(name="mine", metric="rewards/own.py:f")]
    assert find_unpacked(train, checks) == named


def test_a_bundle_without_the_files_of_its_rewards_is_not_exported(tmp_path):
    settings = """
project: p
base: smollm2-135m-instruct
data: {logs: [log.jsonl]}
train: {objective: grpo, rewards: [{metric: "rewards/own.py:short"}]}
"""
    (tmp_path / "graft.yaml").write_text(settings)
    (tmp_path / "log.jsonl").write_text("")
    with open_project(tmp_path).open() as opened, pytest.raises(UserError, match="not sent along"):
        export_bundle(opened, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("train", "splits"),
    [
        (TrainSettings(), ("train", "validation")),
        (grpo(source="train"), ("train", "validation")),
        (grpo(), ("train", "validation", "rl")),
    ],
)
def test_the_prompts_of_rollouts_travel_with_their_run(train, splits):
    assert traveling_splits(train) == splits


def test_a_run_that_needs_files_of_the_project_is_refused_before_a_place_is_asked(work, monkeypatch):
    monkeypatch.setattr(fleet_jobs, "control", lambda *_words: None)
    work.settings.train, work.settings.evaluate = grpo("own.py:f"), SimpleNamespace(checks=())
    request = fleet_jobs.FleetRequest("elsewhere")
    with pytest.raises(UserError, match="not sent along"):
        fleet_jobs.start_run(work, request, lambda _quote: True, outputs=StepOutputs({"plan": HERE}))


def test_a_plan_that_is_adopted_does_not_replace_one_that_was_made_meanwhile(tmp_path):
    database = open_database(tmp_path / "state.db")
    ledger = StepLedger(database, project="p")

    def put(mark, plan):
        output = plan.model_dump(mode="json")
        ledger.put("plan", fingerprint=mark, output=output, finished_at="", seconds=0.0)

    class PlannedAgain:
        """Another command plans again between the look and the change."""

        put_if = ledger.put_if

        def get(self, name):
            found = ledger.get(name)
            put("new data", OTHER)
            return found

    settings = SimpleNamespace(all_models=("main",), main_model="main")
    put("old data", HERE)
    adopt_plan(SimpleNamespace(settings=settings, ledger=PlannedAgain()), THERE)
    assert Plan.model_validate(ledger.get("plan").output) == OTHER
    put("old data", HERE)
    adopt_plan(SimpleNamespace(settings=settings, ledger=ledger), THERE)
    assert Plan.model_validate(ledger.get("plan").output) == THERE
    database.close()
