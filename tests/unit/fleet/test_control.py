"""Starting and reconciling jobs: the caps, each fault alone, and random schedules with crashes."""

import csv
import io
from collections import Counter
from random import Random

import pytest
from fleet_drill import MemoryLedger, judge_runs, run_drill
from fleet_simulator import CARD, FAULTS, SimulatedPlace, SimulatedProvider

from graftwork.fleet.control import (
    UNSTATED,
    Controller,
    OverCap,
    Safety,
    affordable_seconds,
    export_csv,
    largest_cost,
)
from graftwork.fleet.place import PlaceUnreachable, Refused, make_label
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import Busy, UserError
from graftwork.records.fleet import FleetJob, JobOrder, JobPoll

SAFETY = Safety(boot_seconds=600, reconcile_seconds=300, settle_seconds=240)
CAPS = CapSettings(job_usd=3.0, month_usd=10.0, project_usd=None)


class Certain(Random):
    """Every fault happens at the first chance."""

    def random(self):
        return 0.99

    def uniform(self, a, b):
        return (a + b) / 2


class Drill:
    def __init__(self, **faults):
        self.provider = SimulatedProvider(chance=Certain(1))
        self.provider.faults = Counter({kind.replace("_", " "): count for kind, count in faults.items()})
        self.ledger = MemoryLedger()
        self.controller = Controller(SimulatedPlace(self.provider), self.ledger, SAFETY)

    def order(self, number=1, *, run="run", seconds=7200.0, price=0.4):
        job_id = f"{number:012x}"
        values = {"gpu": CARD, "seconds": seconds, "usd_per_hour": price, "bundle": ""}
        return JobOrder(job_id=job_id, label=make_label(self.ledger.key, job_id), run_id=run, **values)

    def start(self, *arguments, caps=CAPS, **options):
        return self.controller.start(self.order(*arguments, **options), caps=caps, now=self.provider.now)

    def reconcile(self, rounds=12):
        reports = []
        for _ in range(rounds):
            self.provider.advance(SAFETY.reconcile_seconds)
            reports.append(self.controller.reconcile(now=self.provider.now))
        return reports

    def only(self):
        (job,) = self.ledger.list()
        return job


def test_a_job_is_followed_to_its_end_and_its_machine_is_given_back():
    drill = Drill()
    assert drill.start().state == "submitted"
    drill.reconcile()
    job = drill.only()
    assert (job.state, job.outcome, drill.provider.alive()) == ("done", "done", ())
    billed = drill.provider.billed_usd()
    assert billed <= job.actual_usd <= job.committed_usd
    assert job.counted_usd == job.actual_usd


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("slow create", "done", ""),
        ("never boots", "failed", "never came up"),
        ("other card", "failed", "gave RTX 3090"),
        ("preempted", "lost", "preempted"),
        ("preempted with notice", "stopped", "notice"),
        ("stop ignored", "done", ""),
        ("list lags", "done", ""),
        ("clock skew", "done", ""),
        ("duplicate", "done", ""),
        ("price rises", "failed", "price rose"),
    ],
)
def test_each_fault_ends_without_a_leak(fault, state, reason):
    drill = Drill(**{fault.replace(" ", "_"): 2 if fault == "stop ignored" else 1})
    drill.start()
    drill.reconcile(rounds=16)
    job = drill.only()
    assert job.state == state
    assert reason in job.reason
    assert drill.provider.alive() == ()
    assert drill.provider.billed_usd() <= job.committed_usd


def test_a_create_that_succeeds_after_the_timeout_is_adopted_and_not_repeated():
    drill = Drill(create_after_the_timeout=1)
    with pytest.raises(PlaceUnreachable):
        drill.start()
    assert drill.only().state == "intended"
    with pytest.raises(Busy, match="at simulated already"):
        drill.start(2)
    drill.reconcile()
    assert drill.only().state == "done"
    assert len(drill.provider.machines) == 1


def test_a_refusal_costs_nothing_and_frees_its_reservation():
    drill = Drill(quota=1)
    with pytest.raises(Refused, match="quota"):
        drill.start()
    assert (drill.only().state, drill.only().counted_usd) == ("refused", 0.0)
    assert drill.start(2).state == "submitted"


def test_machines_without_a_job_in_this_ledger_are_reported_or_ignored_but_never_ended():
    drill = Drill()
    # A copy of the project has the same key: what it starts is not ours.
    ours = make_label(drill.ledger.key, "f" * 12)
    others = (make_label("1" * 8, "f" * 12), f"{ours}-x", f"x{ours}", "training", ours.upper())
    for label in (ours, *others):
        drill.provider.create(label, gpu=CARD, seconds=60)
    (report,) = drill.reconcile(rounds=1)
    assert [machine.label for machine in drill.provider.alive()] == [ours, *others]
    assert report.ended == ()
    (unknown,) = report.unknown
    assert unknown.startswith(f"{ours}: not in this ledger")


def test_a_job_of_another_place_that_this_one_lists_too_is_left_alone():
    """`ssh` and `ssh:HOST` list the same machines."""
    drill = Drill()
    drill.ledger.update(drill.start().model_copy(update={"place": "simulated:one"}))
    (report,) = drill.reconcile(rounds=1)
    assert (report.ended, report.unknown) == ((), ())
    assert len(drill.provider.alive()) == 1


def test_a_job_that_is_started_during_a_reconciliation_is_left_alone():
    drill = Drill()
    place, list_machines = drill.controller.place, drill.controller.place.list

    def list_after_a_start():
        place.list = list_machines
        drill.start()
        return list_machines()

    place.list = list_after_a_start
    report = drill.controller.reconcile(now=drill.provider.now)
    assert (report.ended, report.unknown, drill.only().state) == ((), (), "submitted")


def test_a_machine_of_a_closed_job_is_ended_and_paid_by_that_job():
    drill = Drill()
    drill.start()
    drill.reconcile()
    cost = drill.only().actual_usd
    drill.provider.create(drill.only().label, gpu=CARD, seconds=60)
    drill.reconcile(rounds=2)
    assert drill.provider.alive() == ()
    assert drill.only().actual_usd > cost


def test_a_place_that_refuses_to_answer_for_a_job_does_not_keep_its_machine():
    drill = Drill()
    drill.start()
    place = drill.controller.place
    place.poll = lambda _job: raise_error(Refused("the far side has no Python 3.11"))
    drill.reconcile()
    reason = "the machine never came up: the far side has no Python 3.11"
    assert (drill.only().state, drill.only().reason) == ("failed", reason)
    assert drill.provider.alive() == ()


def raise_error(error):
    raise error


@pytest.mark.parametrize("works", [True, False])
def test_a_job_is_fetched_only_if_its_files_came(works):
    drill = Drill()
    drill.controller.collect = lambda _job: works or raise_error(PlaceUnreachable("no answer"))
    drill.start()
    drill.reconcile(rounds=40)
    assert (drill.only().state, drill.only().fetched) == ("done", works)
    assert drill.provider.alive() == ()


def test_a_reconciliation_without_collecting_keeps_that_the_files_came():
    drill = Drill()
    drill.ledger.update(drill.start().model_copy(update={"fetched": True}))
    drill.reconcile()
    assert (drill.only().state, drill.only().fetched) == ("done", True)


def test_waiting_in_a_queue_without_a_price_takes_no_time_of_the_job():
    drill = Drill()
    place = drill.controller.place
    place.paid = False
    place.poll = lambda _job: JobPoll(phase="starting")
    drill.start(seconds=3600.0)
    drill.reconcile(rounds=100)
    assert drill.only().state == "submitted"
    place.poll = lambda _job: JobPoll(phase="running")
    drill.reconcile(rounds=10)
    assert drill.only().state == "submitted"
    drill.reconcile(rounds=10)
    assert (drill.only().state, drill.only().reason) == ("stopped", "its time is over")


def test_caps_hold_for_a_job_a_month_and_the_project():
    drill = Drill()
    with pytest.raises(OverCap, match="cap of a job is"):
        drill.start(caps=CapSettings(job_usd=0.5))
    caps = CapSettings(job_usd=3.0, month_usd=2.0)
    drill.start(1, run="a", caps=caps)
    with pytest.raises(OverCap, match=r"cap of a month is \$2\.00"):
        drill.start(2, run="b", caps=caps)
    with pytest.raises(OverCap, match="cap of a project"):
        drill.start(2, run="b", caps=CapSettings(job_usd=3.0, month_usd=100, project_usd=1.5))
    assert len(drill.ledger.list()) == 1
    # A closed job counts with its cost only, and another month has its own cap.
    drill.reconcile()
    drill.start(2, run="b", caps=caps)
    drill.provider.advance(40 * 86400)
    drill.start(3, run="c", caps=caps)


def test_a_stop_is_repeated_until_the_list_confirms_it():
    drill = Drill(stop_ignored=2)
    job = drill.start()
    drill.provider.advance(120)
    drill.controller.stop(job, now=drill.provider.now, at_once=True)
    assert len(drill.provider.alive()) == 1
    drill.reconcile(rounds=6)
    assert (drill.only().state, drill.only().reason) == ("stopped", "stopped by the user")
    assert drill.provider.alive() == ()


def test_a_job_that_is_no_longer_listed_ends_whatever_the_place_says_about_it(monkeypatch):
    drill = Drill()
    drill.start(seconds=3000.0)
    monkeypatch.setattr(SimulatedPlace, "poll", lambda _place, _job: JobPoll(phase="starting"))
    for machine in drill.provider.machines:
        machine.ended_at = drill.provider.now
    drill.reconcile(rounds=10)
    assert drill.only().is_open
    drill.reconcile(rounds=4)
    assert (drill.only().state, drill.only().is_open) == ("lost", False)


class KeepingPlace(SimulatedPlace):
    """Keeps secrets apart from jobs. A create call fails before the job exists, and nobody sees that."""

    def __init__(self, provider, *, failures):
        super().__init__(provider)
        self.kept, self.failures = set(), list(failures)

    def submit(self, order, *, secrets):
        self.kept.add(order.label)
        raise PlaceUnreachable("no answer")

    def forget(self, label):
        if self.failures:
            raise self.failures.pop(0)
        self.kept.discard(label)


@pytest.mark.parametrize("failures", [[], [PlaceUnreachable("no answer")] * 2])
def test_a_create_call_that_failed_unseen_leaves_no_secrets(failures):
    drill = Drill()
    drill.controller.place = place = KeepingPlace(drill.provider, failures=failures)
    with pytest.raises(PlaceUnreachable):
        drill.start()
    assert place.kept
    drill.reconcile(rounds=1 + len(failures))
    assert (drill.only().state, place.kept) == ("failed", set())


def test_a_place_that_refuses_to_delete_secrets_does_not_keep_a_job_open(caplog):
    drill = Drill()
    drill.controller.place = KeepingPlace(drill.provider, failures=[Refused("no right to delete")])
    with pytest.raises(PlaceUnreachable):
        drill.start()
    drill.reconcile(rounds=1)
    assert drill.only().state == "failed"
    assert "may still keep secrets of the job 000000000001: no right to delete" in caplog.text


UNFORESEEN = (KeyError("pods"), OSError(28, "No space left on device"), ValueError("no JSON"))


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["poll", "collect", "deliver"])
def test_an_error_that_no_place_should_raise_keeps_no_machine(call, error):
    drill = Drill(never_boots=1 if call == "deliver" else 0)
    holder = drill.controller.place if call == "poll" else drill.controller
    drill.start()
    setattr(holder, call, lambda _job: raise_error(error))
    drill.reconcile(rounds=60)
    assert drill.provider.alive() == ()
    assert not drill.only().is_open
    assert drill.provider.billed_usd() <= drill.only().committed_usd


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_a_machine_that_cannot_be_ended_does_not_keep_those_of_other_jobs(error):
    drill = Drill()
    drill.start(1, run="a")
    drill.start(2, run="b")
    place, stuck = drill.controller.place, drill.provider.machines[0].id
    ends = place.stop
    place.stop = lambda job, **how: raise_error(error) if job.id == stuck else ends(job, **how)
    drill.reconcile(rounds=30)
    assert [machine.id for machine in drill.provider.alive()] == [stuck]
    assert [job.state for job in drill.ledger.list()] == ["stopping", "done"]


def test_a_list_that_cannot_be_understood_is_a_place_that_does_not_answer():
    drill = Drill()
    drill.start()
    listed = drill.controller.place.list
    drill.controller.place.list = lambda: raise_error(KeyError("pods"))
    (report,) = drill.reconcile(rounds=1)
    assert (report.unreachable, report.open) == (("simulated: its client failed (KeyError)",), 1)
    drill.controller.place.list = listed
    drill.reconcile()
    assert drill.only().state == "done"


def test_secrets_that_cannot_be_deleted_for_an_unforeseen_reason_are_tried_again():
    drill = Drill()
    drill.controller.place = place = KeepingPlace(drill.provider, failures=[KeyError("error")])
    with pytest.raises(PlaceUnreachable):
        drill.start()
    drill.reconcile(rounds=2)
    assert (drill.only().state, place.kept) == ("failed", set())


def test_a_machine_whose_price_the_place_does_not_tell_counts_with_the_price_of_the_order():
    drill = Drill(create_after_the_timeout=1)
    place = drill.controller.place
    listed = place.list
    place.list = lambda: tuple(job.model_copy(update={"usd_per_hour": 0.0}) for job in listed())
    with pytest.raises(PlaceUnreachable):
        drill.start()
    drill.reconcile()
    assert drill.only().state == "done"
    assert drill.provider.billed_usd() <= drill.only().counted_usd


@pytest.mark.parametrize("listed", [(0.4, 0.4), (0.4, 0.0)])
def test_a_machine_counts_with_the_highest_price_it_was_listed_with(listed):
    drill = Drill()
    place, prices = drill.controller.place, iter(listed)
    drill.start(price=0.1)
    machines = place.list
    place.list = lambda: tuple(job.model_copy(update={"usd_per_hour": next(prices)}) for job in machines())
    drill.reconcile(rounds=2)
    assert [bill.usd_per_hour for bill in drill.only().machines.values()] == [0.4]


def test_a_process_that_read_the_job_before_it_ran_does_not_get_its_machine_given_back():
    drill = Drill()
    early = drill.start(seconds=7200.0)
    drill.reconcile(rounds=1)
    assert drill.only().booted_at is not None
    # As `graft fleet fetch` does after a long transfer.
    drill.ledger.update(early.model_copy(update={"fetched": True}))
    drill.controller.place.poll = lambda _job: raise_error(PlaceUnreachable("no answer"))
    drill.reconcile(rounds=5)
    assert drill.only().state == "submitted"
    assert drill.provider.now - early.created_at > SAFETY.boot_seconds


@pytest.mark.parametrize("works", [True, False])
def test_what_a_job_has_saved_is_brought_before_its_machine_is_given_back_for_lack_of_time(works):
    """A slow boot or a large bundle takes of the time that the controller allows, not of the job's own."""
    drill = Drill()
    alive = []

    def collect(_job):
        alive.append(len(drill.provider.alive()))
        assert works or raise_error(PlaceUnreachable("no answer"))

    drill.controller.collect = collect
    drill.controller.place.poll = lambda _job: JobPoll(phase="running")
    drill.start(seconds=3600.0)
    drill.reconcile(rounds=20)
    assert (drill.only().state, drill.only().reason) == ("stopped", "its time is over")
    assert (alive, drill.only().fetched) == ([1], works)
    assert drill.provider.alive() == ()


@pytest.mark.parametrize(("arrived", "state"), [(True, "done"), (False, "failed")])
def test_a_machine_that_has_taken_the_bundle_has_come_up(arrived, state):
    """A large bundle, and packages to install, take longer than a boot."""
    drill = Drill()
    drill.controller.deliver = lambda _job: arrived
    place, polled = drill.controller.place, drill.controller.place.poll
    place.poll = lambda _job: JobPoll(phase="starting")
    drill.start()
    drill.reconcile(rounds=4)
    assert 4 * SAFETY.reconcile_seconds > SAFETY.boot_seconds
    place.poll = polled
    drill.reconcile()
    assert drill.only().state == state
    assert drill.provider.alive() == ()


def test_the_affordable_time_and_the_largest_cost_agree():
    seconds = affordable_seconds(3.0, 0.4, SAFETY)
    assert largest_cost(seconds, 0.4, SAFETY) == pytest.approx(3.0)
    with pytest.raises(UserError, match="not enough"):
        affordable_seconds(0.1, 0.4, SAFETY)
    assert largest_cost(1000, 0.0, SAFETY) == 0.0


def test_the_ledger_is_exported_as_csv():
    drill = Drill()
    drill.start()
    drill.reconcile()
    (row,) = csv.DictReader(io.StringIO(export_csv(drill.ledger.list())))
    assert (row["place"], row["state"]) == ("simulated", "done")
    assert 0 < float(row["actual_usd"]) < float(row["committed_usd"])


def check_schedules(seeds):
    seen = Counter()
    ends = Counter()
    for seed in seeds:
        outcome = run_drill(seed, rents="jobs" if seed % 2 else "machines")
        assert outcome.is_clean, outcome
        seen.update(outcome.faults)
        ends.update(outcome.runs.values())
    # Caps and faults of these schedules let every run finish: it is started again until it is done.
    assert set(ends) == {"done"}
    return seen


def test_random_schedules_leak_nothing_and_keep_the_caps():
    assert set(check_schedules(range(40))) == set(FAULTS)


@pytest.mark.slow
def test_a_thousand_random_schedules_leak_nothing_and_keep_the_caps():
    check_schedules(range(1000, 2000))


def test_the_drill_finds_a_controller_that_ends_nothing(monkeypatch):
    monkeypatch.setattr(Controller, "_end", lambda *_arguments: None)
    assert any(run_drill(seed).leaked for seed in range(5))


def test_the_drill_finds_a_run_whose_job_never_ends(monkeypatch):
    monkeypatch.setattr(Controller, "_within_limits", lambda _controller, job, *_arguments: job)
    found = [line for seed in range(20) for line in run_drill(seed, kinds=("never boots",)).silent]
    assert found
    assert "is submitted and never ended" in found[0]


def test_the_drill_finds_a_job_that_was_stopped_without_a_reason(monkeypatch):
    poll = SimulatedPlace.poll

    def poll_without_reason(place, job):
        return poll(place, job).model_copy(update={"message": ""})

    monkeypatch.setattr(SimulatedPlace, "poll", poll_without_reason)
    # Too little for the whole run: its time limit stops it.
    caps = CapSettings(job_usd=0.7, month_usd=8.0)
    assert any(run_drill(seed, caps=caps, kinds=()).unfinished for seed in range(10))
    monkeypatch.setattr(SimulatedPlace, "poll", poll)
    assert not any(run_drill(seed, caps=caps, kinds=()).unfinished for seed in range(10))


@pytest.mark.parametrize(
    ("caps", "reason"),
    [
        (CapSettings(job_usd=0.1), "is not enough at $0.40 an hour"),
        (CapSettings(job_usd=2.0, month_usd=1.0), "the cap of a month is $1.00"),
    ],
)
def test_a_run_of_the_drill_that_the_caps_refuse_says_so(caps, reason):
    outcome = run_drill(3, caps=caps)
    assert outcome.is_clean
    assert any(reason in end for end in outcome.runs.values())


def entry(run, state, reason="", number=1):
    job_id = f"{number:012x}"
    values = {"bundle": "", "created_at": 0.0, "updated_at": 0.0, "seconds": 60.0}
    return FleetJob(
        id=job_id,
        label=make_label("0" * 8, job_id),
        place="p",
        run_id=run,
        state=state,
        reason=reason,
        **values,
    )


def test_runs_are_done_or_say_why_or_are_named():
    jobs = [
        entry("a", "lost", "taken away", 1),
        entry("a", "done", "done", 2),
        entry("b", "failed", "the machine never came up", 3),
        entry("c", "submitted", number=4),
        entry("d", "failed", number=5),
        entry("e", "stopped", f"stopped cleanly; {UNSTATED}", 6),
        entry("g", "stopped", "its time is over", 7),
    ]
    found = judge_runs("abcdefg", jobs, {"g": "the cap of a month is $1.00"})
    assert {run: found.ends[run] for run in "abg"} == {
        "a": "done",
        "b": "the machine never came up",
        "g": "the cap of a month is $1.00",
    }
    assert [line[0] for line in found.silent] == ["c", "d", "e", "f"]
    assert "never ended" in found.silent[0]
    assert "no job was started" in found.silent[3]
