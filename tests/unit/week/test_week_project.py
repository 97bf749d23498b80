"""The week of a project: its curves, and what it may cost."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from graftwork.fleet.settings import CapSettings, FleetSettings
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.fleet import FleetJob
from graftwork.week.project import (
    WeekRequest,
    fit_project_curves,
    hours_as_run,
    hours_by_tokens,
    longest_paid_minutes,
    week_as_it_is,
    week_money,
    week_problem,
)
from graftwork.week.replan import WeekEvent

WEEK = 7 * 24 * 60
START = datetime(2026, 11, 16, tzinfo=UTC)
CAPS = CapSettings(month_usd=50)


def job(usd, **ago):
    return START - timedelta(**ago), usd


def test_what_was_spent_this_month_is_not_there_for_the_week():
    found = week_money(CAPS, None, [job(12, days=3), job(30, days=40)], start=START, length=WEEK)
    assert (found.cap_usd, found.paid_from) == (38, 0)
    assert found.notes == (
        "$38.00 of fleet.caps.month_usd are left in 2026-11: $12.00 are spent or reserved",
    )


def test_the_limit_of_the_week_counts_where_it_is_lower_than_what_is_left():
    found = week_money(CAPS, 10, [job(12, days=3)], start=START, length=WEEK)
    assert found == (10, 0, ())


def test_the_cap_of_the_project_counts_all_that_was_ever_spent():
    caps = CapSettings(month_usd=50, project_usd=60)
    assert week_money(caps, None, [job(40, days=200)], start=START, length=WEEK).cap_usd == 20


def test_spending_in_the_week_itself_is_left_to_the_state_of_the_week():
    assert week_money(CAPS, None, [job(5, days=-1)], start=START, length=WEEK).cap_usd == 50


def test_an_overspent_month_leaves_nothing():
    assert week_money(CAPS, None, [job(80, days=1)], start=START, length=WEEK).cap_usd == 0


def test_a_week_that_ends_in_the_next_month_waits_for_it_where_little_is_left_of_this_one():
    start = datetime(2026, 11, 28, tzinfo=UTC)
    spent = [(datetime(2026, 11, 3, tzinfo=UTC), 49.0)]
    found = week_money(CAPS, None, spent, start=start, length=WEEK)
    assert (found.cap_usd, found.paid_from) == (50, 3 * 24 * 60)
    assert "from 2026-12-01 on" in found.notes[0]
    enough = week_money(CAPS, 1, spent, start=start, length=WEEK)
    assert (enough.cap_usd, enough.paid_from) == (1, 0)


def test_a_session_is_no_longer_than_the_cap_of_a_job_pays_for():
    fleet = FleetSettings(caps=CapSettings(job_usd=5))
    assert 5 * 60 < longest_paid_minutes(fleet, 0.69) < 6 * 60
    assert longest_paid_minutes(fleet, 50.0) == 0


@pytest.fixture
def rented(tmp_path):
    (tmp_path / "graft.yaml").write_text("""
project: small
data: {logs: [log.jsonl]}
fleet: {places: {rented: {speed: 1.0, usd_per_hour: 1.0}}, caps: {month_usd: 20, job_usd: 4}}
""")
    return open_project(tmp_path)


def ledger_job(name, created, usd):
    return FleetJob(
        id=name, label=name, place="rented", run_id=name, state="submitted", bundle="", seconds=60.0,
        created_at=created.timestamp(), updated_at=created.timestamp(), usd_per_hour=1.0, committed_usd=usd,
    )  # fmt: skip


def test_the_week_of_a_project_subtracts_what_its_ledger_has(rented):
    problem, state = week_as_it_is(rented, WeekRequest(start=START.date()))
    assert (problem.cap_usd, state.spent_usd) == (20, 0)
    assert not rented.state.exists()
    with use_project(rented, NullReporter()) as work:
        for name, created, usd in (
            ("a", START - timedelta(days=2), 3.0),
            ("b", START + timedelta(days=1), 2.0),
        ):
            work.jobs.reserve(ledger_job(name, created, usd), CapSettings())
    problem, state = week_as_it_is(rented, WeekRequest(start=START.date()))
    assert (problem.cap_usd, state.spent_usd) == (17, 2)
    assert problem.place("rented").longest < 4 * 60
    assert any("fleet.caps.job_usd" in text for text in problem.assumptions)


def test_a_reading_taken_before_the_week_counts_in_it(rented):
    later = datetime.now(tz=UTC) + timedelta(days=21)
    reading = WeekEvent(kind="quota", at=datetime.now(tz=UTC), place="rented", used_hours=3)
    problem, state = week_as_it_is(rented, WeekRequest(start=later.date(), events=(reading,)))
    assert (state.now, state.readings[0].used) == (0, 180)
    assert state.readings[0].at < 0
    assert problem.start > datetime.now(tz=UTC)


def test_a_paid_place_that_the_cap_of_a_job_cannot_pay_is_left_out_with_the_reason(rented):
    rented.file.write_text(rented.file.read_text().replace("job_usd: 4", "job_usd: 1"))
    problem, _ = week_as_it_is(open_project(rented.root), WeekRequest(start=START.date()))
    assert problem.place("rented").open == ()
    assert any(text.startswith("rented is not used") for text in problem.assumptions)


PROJECT = """
project: small
data: {logs: [log.jsonl]}
models: {main: {}, reads: {}}
fleet: {places: {local: {speed: 1.0}}}
"""


@pytest.fixture
def project(tmp_path):
    """A project with one finished run of `main`, whose loss halves its distance every two hours."""
    (tmp_path / "graft.yaml").write_text(PROJECT)
    found = open_project(tmp_path)
    folder = found.state / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"dataset_folder": str(found.state / "datasets" / "abc")}))
    steps = [
        {"step": n, "loss": 1 + 2 ** (-n / 40), "learning_rate": 1e-4, "gradient_norm": 1.0, "tokens": 1000,
         "trained_tokens": 500, "seconds": 180.0}
        for n in range(1, 161)
    ]  # fmt: skip
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with use_project(found, NullReporter()) as work:
        work.ledger.put(
            "prepare", fingerprint="f", output={"folders": {"main": str(found.state / "datasets" / "abc")}},
            finished_at="2026-11-16T00:00:00Z", seconds=1.0,
        )  # fmt: skip
        work.runs.create("r1", folder=str(folder), plan={}, when="2026-11-16T00:00:00Z")
        work.runs.update("r1", state="done", when="2026-11-16T08:00:00Z")
    return found


def test_a_curve_is_fitted_to_the_journal_of_a_finished_run(project):
    assert fit_project_curves(project, hours_as_run) == {"main": pytest.approx(2.0, rel=0.1)}
    assert fit_project_curves(project, hours_by_tokens(10_000)) == {"main": pytest.approx(4.0, rel=0.1)}


def test_the_week_uses_fitted_curves_and_says_which_are_assumed(project):
    problem = week_problem(project, WeekRequest())
    curves = {model.name: model.curve for model in problem.models}
    assert curves["main"].source == "fitted from runs"
    assert curves["main"].half_hours == pytest.approx(2.0, rel=0.1)
    assert (curves["reads"].source, curves["reads"].half_hours) == ("assumed", 24)
    assert any("24 h: reads" in text for text in problem.assumptions)


def test_a_project_that_never_ran_is_left_as_it_is(tmp_path):
    (tmp_path / "graft.yaml").write_text(PROJECT)
    assert fit_project_curves(open_project(tmp_path), hours_as_run) == {}
    assert not (tmp_path / ".graft").exists()


def test_a_rented_place_without_a_price_is_refused_instead_of_used_for_nothing(tmp_path):
    (tmp_path / "graft.yaml").write_text(PROJECT.replace("local: {speed: 1.0}", "runpod: {speed: 1.0}"))
    with pytest.raises(UserError, match="runpod has no price"):
        week_problem(open_project(tmp_path), WeekRequest())
