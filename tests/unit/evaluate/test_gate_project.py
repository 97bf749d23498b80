"""The rules that a run set out with, the champion's own report, reports kept by adapter."""

import hashlib
from pathlib import Path

import pytest
import yaml
from gate_samples import new_generation
from registry_samples import alias_move
from sample_plans import make_outcome, make_plan

from graftwork.evaluate.comparison import compare
from graftwork.evaluate.gate.decide import GateCandidate, decide
from graftwork.evaluate.gate.project import (
    RULES,
    find_better_run,
    find_judged_report,
    find_report,
    keep_report,
    look_for_champion,
    note_rules,
    surroundings_of,
    with_champion,
    with_changes,
)
from graftwork.evaluate.project import Evaluated
from graftwork.evaluate.report import make_rate, measure
from graftwork.files.disk import Journal
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.evaluate import gather_candidate, record_verdict
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Corrupted
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Metric, Report, SubjectReport
from graftwork.records.run import TrainOutcome

STRICT = {"rules": [{"metric": "json_valid", "over": 0.95}], "primary": "none"}
LAX = {"rules": [{"metric": "json_valid", "over": 0.5}], "primary": "none"}


def write_project(folder: Path, gate: dict) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"project": "small", "data": {"logs": ["log.jsonl"]}, "gate": gate}
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    return folder


def opened(folder):
    return use_project(open_project(folder), NullReporter())


def subject(name, right, n=100):
    scores = {f"c{i}": float(i < right) for i in range(n)}
    made = new_generation(name, answers=n)
    return SubjectReport(
        subject=name, metrics={"json_valid": make_rate("json_valid", scores=scores)}, generation=made
    )


def report(right, **more):
    base, adapter = subject("base", 0), subject("adapter", right)
    pairs = compare(base, candidate=adapter)
    fields = {
        "cases_hash": "cases",
        "cases": 100,
        "baseline": base,
        "candidate": adapter,
        "comparisons": pairs,
    }
    return Report(**{**fields, **more})


def release_of(work, found: Report, *, adapter_hash: str, parent: str | None = None) -> Release:
    """A release of which only the report lies in the store."""
    body = found.to_json().encode()
    release = Release(
        id=hashlib.sha256(adapter_hash.encode()).hexdigest(),
        project="small",
        base="b",
        base_fingerprint="b",
        template_fingerprint="t",
        adapter_hash=adapter_hash,
        dataset_hash="d",
        plan_hash="p",
        report_hash="r",
        verdict_hash="v",
        decision="deploy",
        run_id="run",
        parent=parent,
        created_at="2025-03-01T12:00:00Z",
        files=(ReleaseFile(path="report.json", sha256=hashlib.sha256(body).hexdigest(), size=len(body)),),
        settings={},
        versions={},
    )
    work.releases.add(release)
    folder = work.project.releases / release.id
    folder.mkdir(parents=True)
    (folder / "report.json").write_bytes(body)
    return release


def promote(work, release, previous=None):
    work.releases.move_alias(alias_move("champion", release.id, previous=previous))


def test_changed_rules_are_reported_with_the_verdict_of_the_old_ones(tmp_path):
    found = report(90)
    with opened(write_project(tmp_path / "p", STRICT)) as work:
        note_rules(work, "run", stage="trained")
        assert note_rules(work, "run", stage="evaluated")["stage"] == "trained"
        judged = GateCandidate(found, work.settings.gate)
        same = decide(found, work.settings.gate)
        assert with_changes(same, judged, note_rules(work, "run", stage="judged")) == same
    with opened(write_project(tmp_path / "p", LAX)) as work:
        noted = note_rules(work, "run", stage="judged")
        verdict = decide(found, work.settings.gate)
        reported = with_changes(verdict, GateCandidate(found, work.settings.gate), noted)
        kept = Journal(work.project.runs / "run" / RULES).read()
    assert reported.decision == "deploy"
    assert "The rules were changed after this run was first trained" in reported.notes[0]
    assert "no longer JSON-valid rate over 95 %; now JSON-valid rate over 50 %" in reported.notes[0]
    assert "would be: iterate" in reported.notes[0]
    assert [line["stage"] for line in kept] == ["trained", "judged"]


def test_rules_of_a_version_that_cannot_be_read_still_show_that_they_were_others(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        note = {"rules_hash": "old", "when": "then", "stage": "trained", "rules": {"unheard": "of"}}
        Journal(work.project.runs / "run" / RULES).append(note)
        verdict = decide(report(90), work.settings.gate)
        noted = note_rules(work, "run", stage="judged")
        reported = with_changes(verdict, GateCandidate(report(90), work.settings.gate), noted)
    assert "The rules were changed after this run was first trained (then)." in reported.notes


def test_seconds_of_another_day_do_not_replace_the_champions(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        timed = report(97)
        latency = Metric(name="latency_seconds", kind="number", value=9, low=8, high=10, n=8)
        metrics = {**timed.candidate.metrics, latency.name: latency}
        slow = timed.candidate.model_copy(update={"metrics": metrics})
        champion = release_of(work, timed.model_copy(update={"candidate": slow}), adapter_hash="old")
        promote(work, champion)
        assert set(with_champion(work, report(60), champion).others[-1].metrics) == {"json_valid"}


@pytest.mark.parametrize("metric", ["latency_seconds", "first_token_seconds", "tokens_per_second"])
def test_no_rule_on_seconds_is_kept_by_those_of_another_day(tmp_path, metric):
    rules = {"rules": [{"metric": metric, "against": "champion", "margin": 1}]}

    def timed(found, seconds):
        made = {
            "single_latency_seconds": (seconds,) * 8,
            "first_token_seconds": (seconds,) * 8,
            "tokens_per_second": 100 / seconds,
        }
        generation = found.candidate.generation.model_copy(update=made)
        measured = measure({}, generation=generation)
        metrics = {**found.candidate.metrics, **measured}
        candidate = found.candidate.model_copy(update={"generation": generation, "metrics": metrics})
        return found.model_copy(update={"candidate": candidate})

    with opened(write_project(tmp_path / "p", rules)) as work:
        champion = release_of(work, timed(report(97), 9.0), adapter_hash="old")
        promote(work, champion)
        found = look_for_champion(work, adapter_hash="new")
        seen = with_champion(work, timed(report(97), 1.0), found.release)
        verdict = decide(seen, work.settings.gate, around=surroundings_of(found))
    assert verdict.decision == "not_enough_evidence"
    assert "not measured on the same cases as the champion" in verdict.rules[0].sentence


def test_the_champions_own_report_on_the_same_cases_replaces_asking_it_again(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        champion = release_of(work, report(97), adapter_hash="old")
        promote(work, champion)
        assert look_for_champion(work, adapter_hash="new").release == champion
        seen = with_champion(work, report(60), champion)
        assert seen.champion == "champion"
        assert seen.others[-1].metrics["json_valid"].successes == 97
        other_cases = report(60, cases_hash="others")
        assert with_champion(work, other_cases, champion) == other_cases
        longer = report(60, settings={"max_new_tokens": 99})
        assert with_champion(work, longer, champion) == longer
        asked = report(60, champion="champion", others=(subject("champion", 50),))
        assert with_champion(work, asked, champion) == asked


def test_an_adapter_that_serves_already_is_held_against_what_it_took_the_place_of(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        assert look_for_champion(work, adapter_hash="new").release is None
        old = release_of(work, report(97), adapter_hash="old")
        promote(work, old)
        new = release_of(work, report(99), adapter_hash="new", parent=old.id)
        promote(work, new, previous=old.id)
        assert look_for_champion(work, adapter_hash="new").release == old
        assert look_for_champion(work, adapter_hash="newer").release == new


@pytest.mark.parametrize("parent", [None, "f" * 64, "7"])
def test_an_adapter_that_serves_already_and_whose_parent_is_not_known_is_held_against_the_base(
    tmp_path, parent
):
    rules = {"rules": [{"metric": "json_valid", "against": "champion", "margin": 0.05}]}
    with opened(write_project(tmp_path / "p", rules)) as work:
        served = release_of(work, report(97), adapter_hash="new", parent=parent)
        promote(work, served)
        found = look_for_champion(work, adapter_hash="new")
        assert found.release is None
        verdict = decide(report(97), work.settings.gate, around=surroundings_of(found))
    assert verdict.rules[0].against == "base"
    (note,) = verdict.notes
    assert note.startswith("This very adapter is served already, and ")
    assert ("nothing was served before it" if parent is None else f"({parent[:12]}) is not known") in note
    assert "Nothing is served yet" not in note


def test_a_champions_report_that_was_tampered_with_is_refused(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        champion = release_of(work, report(97), adapter_hash="old")
        (work.project.releases / champion.id / "report.json").write_text(report(1).to_json())
        with pytest.raises(Corrupted, match="was changed"):
            with_champion(work, report(60), champion)


def test_the_verdict_names_the_report_with_the_champion_that_was_judged(tmp_path):
    rules = {"rules": [{"metric": "json_valid", "against": "champion", "margin": 0.05}], "primary": "none"}
    with opened(write_project(tmp_path / "p", rules)) as work:
        promote(work, release_of(work, report(97), adapter_hash="old"))
        outcome, evaluated = enter_run(work, "new", right=99)
        made = StepOutputs(
            {"evaluate": Evaluated(cases_file="", folders={}, report=evaluated), "train": outcome}
        )
        judged = gather_candidate(work, made)
        verdict = record_verdict(
            work, made, judged, decide(judged.report, judged.settings, around=judged.around)
        )
        found = find_judged_report(work, outcome.adapter_hash, verdict=verdict, evaluated=evaluated)
    assert found.champion == "champion"
    assert found.fingerprint() == verdict.report_hash != evaluated.fingerprint()


def test_reports_are_found_again_by_their_adapter(tmp_path):
    with opened(write_project(tmp_path / "p", LAX)) as work:
        assert find_report(work, "a" * 64) is None
        keep_report(work, "a" * 64, report(60))
        keep_report(work, "b" * 64, report(70))
        assert find_report(work, "a" * 64) == report(60)
        next((work.project.evaluations / "reports").glob("a*")).write_text("{}")
        assert find_report(work, "a" * 64) is None


def enter_run(work, name, *, right, **settings) -> tuple[TrainOutcome, Report]:
    """A finished run with its plan and its report."""
    plan = make_plan(train={"settings": settings})
    outcome = make_outcome(run_id=name, adapter_hash=hashlib.sha256(name.encode()).hexdigest())
    when = "2025-03-01T12:00:00Z"
    work.runs.create(name, folder=name, plan=plan.model_dump(mode="json"), when=when)
    work.runs.update(name, state="done", when=when, outcome=outcome.model_dump(mode="json"))
    found = report(right)
    keep_report(work, outcome.adapter_hash, found)
    return outcome, found


def test_the_newest_better_run_is_found_with_what_was_changed_since(tmp_path):
    gate = {"rules": [{"metric": "json_valid", "over": 0.5}], "primary": "json_valid"}
    with opened(write_project(tmp_path / "p", gate)) as work:
        enter_run(work, "old", right=90, epochs=4, rank=8)
        enter_run(work, "good", right=80, epochs=3, rank=16)
        enter_run(work, "bad", right=0, epochs=1, rank=16)
        outcome, found = enter_run(work, "now", right=10, epochs=1, rank=16)
        better = find_better_run(work, outcome, found)
        assert better is not None
        assert (better.run_id, better.changes) == ("good", ("train.epochs 3 → 1",))
        best, seen = enter_run(work, "best", right=99, epochs=5, rank=16)
        assert find_better_run(work, best, seen) is None
