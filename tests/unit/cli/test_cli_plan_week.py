"""`graft plan week` at the door: tables, JSON, files, replanning, mistakes in words."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.week import WeekSchedule

PROJECT = """
project: small
data: {logs: [log.jsonl]}
models: {main: {}, reads: {}, writes: {}}
fleet:
  places:
    kaggle: {speed: 1.0, transfer_minutes: 5}
    lab: {catalog: sagemaker-studio-lab, speed: 1.0, transfer_minutes: 5}
    card: {speed: 2.0, windows: ["22:00-07:00"], setup_minutes: 7}
    rented: {speed: 4.0, usd_per_hour: 0.7, session_hours: 6}
plan:
  week:
    timezone: Europe/Berlin
    people: ["08:00-20:00"]
    spend_usd: 3
    models:
      main: {priority: 2}
      reads: &heir {starts_from: main, least_hours: 1}
      writes: *heir
"""
BRIEF = ("--seconds", "1", "--workers", "1", "--quick", "--start", "2026-11-16")


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    (tmp_path / "graft.yaml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def ask(*words):
    return CliRunner().invoke(app, ["plan", "week", *BRIEF, *words])


def read(*words):
    result = ask(*words, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def change(old, new):
    Path("graft.yaml").write_text(PROJECT.replace(old, new))


def test_the_week_is_one_json_document_that_reads_back():
    body = read("--scenario", "parallel")
    schedule = WeekSchedule.model_validate(body)
    assert schedule.scenario == "parallel"
    assert schedule.start.isoformat() == "2026-11-16T00:00:00+01:00"
    assert {session.place for session in schedule.sessions} <= {"kaggle", "lab", "card", "rented"}
    assert schedule.cost_usd <= 3
    assert any("kaggle's quota" in text for text in schedule.assumptions)


def test_catalog_terms_hold_where_the_project_sets_none():
    sessions = WeekSchedule.model_validate(read("--scenario", "parallel")).sessions
    lab = [session for session in sessions if session.place == "lab"]
    assert lab
    assert all(session.by_hand and session.end - session.start <= 240 for session in lab)
    assert all(8 <= session.starts_at.hour < 20 for session in lab)
    assert sum(s.end - s.start for s in sessions if s.place == "kaggle") <= 2 * 30 * 60
    assert all(
        (s.ends_at - s.starts_at).total_seconds() <= 12 * 3600 for s in sessions if s.place == "kaggle"
    )


@pytest.mark.parametrize("place", ["manual: {speed: 1.0}", "colab: {place: manual, speed: 1.0}"])
def test_sessions_of_a_place_that_is_run_by_hand_start_when_people_are_there(place, tmp_path):
    change("kaggle: {speed: 1.0, transfer_minutes: 5}", place)
    name = place.partition(":")[0]
    body = read("--scenario", "parallel", "--ical", str(tmp_path / "week.ics"))
    sessions = [s for s in WeekSchedule.model_validate(body).sessions if s.place == name]
    assert sessions
    assert all(session.by_hand and 8 <= session.starts_at.hour < 20 for session in sessions)
    events = (tmp_path / "week.ics").read_text().count("BEGIN:VEVENT")
    assert events == len(body["sessions"]) >= len(sessions)


def test_files_are_written_and_an_earlier_plan_is_kept(tmp_path):
    result = ask("--scenario", "parallel", "--out", "w.json", "--html", "w.html", "--ical", "w.ics")
    assert result.exit_code == 0, result.exception
    shown = " ".join(result.stdout.split())
    for text in ("kaggle", "half in 24 h, assumed", "bound"):
        assert text in shown
    assert "<svg" in (tmp_path / "w.html").read_text()
    assert "BEGIN:VEVENT" in (tmp_path / "w.ics").read_text()
    event = {"kind": "quota", "at": "2026-11-18T08:00:00Z", "place": "kaggle", "used_hours": 29}
    again = read(
        "--scenario",
        "parallel",
        "--keep",
        "w.json",
        "--now",
        "2026-11-18T10:00",
        "--event",
        json.dumps(event),
    )
    earlier = WeekSchedule.from_json((tmp_path / "w.json").read_text())
    made = WeekSchedule.model_validate(again)
    begun = [s for s in earlier.sessions if s.starts_at < made.now]
    assert [(s.place, s.start, s.end) for s in begun] == [
        (s.place, s.start, s.end) for s in made.sessions if s.fixed
    ]
    friday = sum(
        s.end - s.start for s in made.sessions if s.place == "kaggle" and not s.fixed and s.start < 5 * 1440
    )
    assert friday <= 60


def test_a_proposal_by_hand_is_compared_on_the_same_objective(tmp_path):
    sessions = [{"place": "kaggle", "model": "main", "start": "mon 08:00", "hours": 10}]
    (tmp_path / "mine.json").write_text(json.dumps({"title": "mine", "sessions": sessions}))
    found = read("--scenario", "parallel", "--compare", "mine.json")["proposal"]
    assert 0 < found["value"] < found["plan_value"]
    assert any("reads" in text for text in found["broken"])


def test_only_named_places_are_used():
    body = read("--scenario", "parallel", "--only", "kaggle", "--only", "lab")
    assert {session["place"] for session in body["sessions"]} == {"kaggle", "lab"}


@pytest.mark.parametrize(
    ("old", "new", "what", "fix"),
    [
        ("writes: *heir", "wirtes: *heir", "'wirtes'", "did you mean writes?"),
        ("starts_from: main", "starts_from: mian", "'mian'", "did you mean main?"),
        ("{speed: 4.0,", "{models: [raeds], speed: 4.0,", "'raeds'", "did you mean reads?"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(old, new, what, fix):
    change(old, new)
    refused = ask().exception
    assert isinstance(refused, UserError)
    assert what in refused.what
    assert refused.fix == fix


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Europe/Berlin", "Europe/Berlim", "time zone"),
        ("22:00-07:00", "22-7", "not a window"),
        ('people: ["08:00-20:00"]', "people: [morning]", "not a window"),
        ("{speed: 1.0, transfer_minutes: 5}\n    lab", "{speed: 1.0, quotas: [{hours: 3}]}\n    lab", "per"),
    ],
)
def test_settings_that_make_no_sense_name_the_key(old, new, message):
    change(old, new)
    refused = ask().exception
    assert isinstance(refused, UserError)
    assert message in f"{refused.what} {refused.why}"
    assert "graft.yaml:" in refused.where


def test_a_project_without_places_is_pointed_to_an_example():
    change(PROJECT[PROJECT.index("fleet:") : PROJECT.index("plan:")], "")
    refused = ask().exception
    assert isinstance(refused, UserError)
    assert refused.where == "fleet.places"


def test_without_or_tools_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools.linear_solver", None)
    refused = ask().exception
    assert isinstance(refused, EnvironmentFailure)
    assert "[week]" in refused.fix


def test_a_place_with_a_card_is_as_fast_as_the_planner_says():
    change("kaggle: {speed: 1.0,", "kaggle: {gpu: T4,")
    text = Path("graft.yaml").read_text().replace("{speed: 4.0,", "{gpu: RTX 4090,")
    Path("graft.yaml").write_text(text + "base: deepseek-coder-6.7b\n")
    sessions = [s for s in read("--scenario", "parallel")["sessions"] if s["place"] == "rented"]
    assert sessions
    assert all(s["hours"] > 4 * s["train"] / 60 for s in sessions)


def test_a_quota_of_the_catalog_resets_by_utc_whatever_the_zone_of_the_week():
    change("plan:\n  week:", "plan:\n  week:\n    starts: sat 01:00")
    body = read("--scenario", "parallel", "--only", "kaggle", "--only", "lab")
    kaggle = next(found for found in body["places"] if found["place"] == "kaggle")
    assert kaggle["offered_hours"] == 30
    assert not any("quota" in text for text in body["assumptions"])
