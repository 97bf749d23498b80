"""Inputs of a gate from project and store: the champion, earlier reports and verdicts, the rules of a run.

Input: an open project. Output: the report with the champion among its subjects where both answered the same
cases in the same way; reports and verdicts by adapter; a note where the rules were changed since the run
began. Asks no model.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from graftwork.engines.local import name_engine
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.gate.advice import BetterRun, compare_plans
from graftwork.evaluate.gate.decide import GateCandidate, asked_otherwise, decide
from graftwork.evaluate.gate.figures import describe_change
from graftwork.evaluate.gate.rules import Surroundings
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.subjects import CHAMPION
from graftwork.files.disk import Journal, file_digest, make_folder, read_record, write_atomic
from graftwork.grading.metrics import (
    COST_PER_SUCCESS,
    FIRST_TOKEN,
    LATENCY,
    LATENCY_P95,
    MEMORY,
    TOKENS_PER_SECOND,
)
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.errors import Corrupted, NegativeResult
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Report, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.peft import WEIGHTS
from graftwork.registry.project import full_alias, open_store
from graftwork.serve.settings import ServeSettings

SERVED_ALREADY = "This very adapter is served already"
HELD_AGAINST_BASE = "rules on the champion were checked against the base"
REPORT = "report.json"
OF_THE_MACHINE = (LATENCY, LATENCY_P95, FIRST_TOKEN, TOKENS_PER_SECOND, MEMORY, COST_PER_SUCCESS)
UNTIMED = {
    "single_latency_seconds": (),
    "first_token_seconds": (),
    "tokens_per_second": 0.0,
    "peak_memory_gib": 0.0,
}


class Champion(NamedTuple):
    """The subject that a candidate is compared with. Without a release it is the base, and `instead` says
    why.
    """

    release: Release | None
    instead: str = ""


def look_for_champion(work: OpenProject, *, adapter_hash: str) -> Champion:
    """Return the served release; if that is this very adapter, the one that it replaced."""
    release_id = work.releases.aliases().get(full_alias(work))
    if release_id is None:
        return Champion(None)
    served = work.releases.get(release_id)
    if served.adapter_hash != adapter_hash:
        return Champion(served)
    if served.parent is None:
        return Champion(None, f"{SERVED_ALREADY}, and nothing was served before it: {HELD_AGAINST_BASE}.")
    # Not by `get`, which takes a part of an id too: a parent is named in full, or is not known here.
    parent = next((release for release in work.releases.list() if release.id == served.parent), None)
    if parent is None:
        missing = f"the release before it ({served.parent[:12]}) is not known here"
        return Champion(None, f"{SERVED_ALREADY}, and {missing}: {HELD_AGAINST_BASE}.")
    return Champion(parent)


def with_champion(work: OpenProject, report: Report, champion: Release | None) -> Report:
    """Use the champion's own report where it was not evaluated again on the same cases."""
    if report.champion is not None or champion is None:
        return report
    earlier = read_report(work, champion)
    if earlier is None or not comparable(earlier, report):
        return report
    # Seconds and bytes of another day, perhaps of another machine, say nothing about this one.
    grades = {
        name: metric for name, metric in earlier.candidate.metrics.items() if name not in OF_THE_MACHINE
    }
    generation = earlier.candidate.generation.model_copy(update=UNTIMED)
    served = earlier.candidate.model_copy(
        update={"subject": CHAMPION, "metrics": grades, "generation": generation}
    )
    return report.model_copy(update={"others": (*report.others, served), "champion": CHAMPION})


def surroundings_of(champion: Champion) -> Surroundings:
    if champion.release is None:
        return Surroundings(no_champion=True, instead=champion.instead)
    return Surroundings(champion=champion.release.id)


def read_report(work: OpenProject, release: Release) -> Report | None:
    """Read the verified report of a release; None if it has none."""
    promised = next((file.sha256 for file in release.files if file.path == REPORT), None)
    path = open_store(work).folder(release.id) / REPORT
    if promised is None or not path.is_file():
        return None
    body = path.read_bytes()
    if hashlib.sha256(body).hexdigest() != promised:
        raise Corrupted(
            f"the report of release {release.id[:12]} was changed",
            why="it does not match its hash in the manifest",
            fix="`graft release verify` checks the others; roll back to an intact one",
            where=str(path),
        )
    try:
        return Report.from_json(body)
    except ValidationError:
        # Made by another version: it cannot be compared, which the verdict says.
        return None


def comparable(earlier: Report, report: Report) -> bool:
    """Whether both answered the same cases under the same conditions."""
    return earlier.cases_hash == report.cases_hash and not asked_otherwise(earlier, report)


def keep_report(work: OpenProject, adapter_hash: str, report: Report) -> None:
    path = _place(work, adapter_hash)
    write_atomic(path, report.to_json())


def find_report(work: OpenProject, adapter_hash: str) -> Report | None:
    """None if the adapter was never judged here, or by an incompatible version."""
    return read_record(Report, _place(work, adapter_hash))


def find_judged_report(
    work: OpenProject, adapter_hash: str, *, verdict: Verdict, evaluated: Report
) -> Report:
    """The report that the verdict is about: it may include the champion, which was evaluated on another
    day.
    """
    judged = find_report(work, adapter_hash)
    return judged if judged is not None and judged.fingerprint() == verdict.report_hash else evaluated


def keep_verdict(work: OpenProject, adapter_folder: Path, verdict: Verdict) -> None:
    """Store a verdict by the content of the weights, wherever they are copied: a refusal must not be
    forgotten.
    """
    weights = adapter_folder / WEIGHTS
    if not weights.is_file():
        return
    path = _verdict_place(work, file_digest(weights))
    make_folder(path.parent)
    write_atomic(path, verdict.to_json())


def find_verdict(work: OpenProject, weights_sha256: str) -> Verdict | None:
    """The last verdict about these weights: of a gate here, or of a release that contains them."""
    if (verdict := read_record(Verdict, _verdict_place(work, weights_sha256))) is not None:
        return verdict
    for release in work.releases.list():
        if any(file.path == WEIGHTS and file.sha256 == weights_sha256 for file in release.files):
            return Verdict(
                decision=release.decision,
                reason=f"release {release.id[:12]} says {release.decision}",
                rules=(),
                report_hash="",
            )
    return None


def _verdict_place(work: OpenProject, weights_sha256: str) -> Path:
    return work.project.evaluations / "verdicts" / f"{weights_sha256}.json"


def find_better_run(work: OpenProject, outcome: TrainOutcome, report: Report) -> BetterRun | None:
    """The newest earlier run that was better at the primary metric, with what was changed since."""
    primary = work.settings.gate.primary_rule
    now, plan = work.runs.get(outcome.run_id), None
    if primary is not None and now is not None:
        plan = _read_plan(now.plan)
    mine = report.candidate.metrics.get(primary.metric) if primary is not None else None
    if plan is None or primary is None or mine is None:
        return None
    for entry in work.runs.list():
        if entry.id == outcome.run_id or entry.outcome is None:
            continue
        earlier_report, before = (
            find_report(work, str(entry.outcome.get("adapter_hash", ""))),
            _read_plan(entry.plan),
        )
        theirs = earlier_report.candidate.metrics.get(primary.metric) if earlier_report is not None else None
        if (
            earlier_report is None
            or before is None
            or theirs is None
            or not theirs.n
            or theirs.value <= mine.value
        ):
            continue
        return BetterRun(entry.id, earlier_report, compare_plans(before, plan))
    return None


def _read_plan(document: dict[str, Any]) -> Plan | None:
    try:
        return Plan.model_validate(document)
    except ValidationError:
        return None


def _place(work: OpenProject, adapter_hash: str) -> Path:
    return work.project.evaluations / "reports" / f"{adapter_hash[:32]}.json"


RULES = "rules.jsonl"
Stage = Literal["trained", "evaluated", "judged"]


def note_rules(work: OpenProject, run_id: str, *, stage: Stage) -> dict[str, Any]:
    """Note the current rules unless the last note is the same; return the first note."""
    journal = Journal(work.project.runs / run_id / RULES)
    notes: list[dict[str, Any]] = journal.read()
    rules = work.settings.gate
    if not notes or notes[-1]["rules_hash"] != rules.rules_hash():
        note = {
            "rules_hash": rules.rules_hash(),
            "when": timestamp(),
            "stage": stage,
            "rules": rules.model_dump(mode="json"),
        }
        journal.append(note, durable=True)
        notes = notes or [note]
    return notes[0]


def with_changes(verdict: Verdict, judged: GateCandidate, first_note: dict[str, Any]) -> Verdict:
    """Return the verdict, with a note if its rules have changed since the run began."""
    if first_note["rules_hash"] == verdict.rules_hash:
        return verdict
    change = f"The rules were changed after this run was first {first_note['stage']} ({first_note['when']})"
    try:
        settings = GateSettings.model_validate(first_note["rules"])
    except ValidationError:
        pass  # of another version
    else:
        then = decide(judged.report, settings, training=judged.training, around=judged.around)
        decision = then.decision.replace("_", " ")
        changes = describe_change(settings, judged.settings)
        change += f": {changes}. By the rules as they were, the verdict would be: {decision}"
    return verdict.model_copy(update={"notes": (f"{change}.", *verdict.notes)})


def describe_engine(engine: EngineSettings) -> str:
    """Describe the engine as a verdict names it: a different version or precision is a different engine."""
    precision = f" {engine.precision}" if engine.kind == "llamacpp" else ""
    return f"{name_engine(engine.kind)}{precision}"


def keep_engine_verdict(
    work: OpenProject, adapter_hash: str, engine: EngineSettings, verdict: Verdict
) -> None:
    path = _verdict_path(work, adapter_hash, engine)
    make_folder(path.parent)
    write_atomic(path, verdict.to_json())


def find_engine_verdict(work: OpenProject, release: Release, engine: EngineSettings) -> Verdict | None:
    """The last verdict about the adapter or prompt of a release on this engine."""
    return read_record(Verdict, _verdict_path(work, release.adapter_hash, engine))


def require_engine_gate(work: OpenProject, release: Release, settings: ServeSettings) -> None:
    """Refuse to serve a release by an engine on which the gate has not passed for it."""
    engine = settings.engine
    if engine.kind == "embedded" or not settings.require_gate_for_engine:
        return
    verdict = find_engine_verdict(work, release, engine)
    if verdict is not None and verdict.decision == "deploy":
        return
    why = "the gate has not judged it there" if verdict is None else f"the gate said {verdict.decision}"
    raise NegativeResult(
        f"release {release.id[:12]} may not be served by {describe_engine(engine)}",
        why=f"{why.replace('_', ' ')}; conversion and quantization change answers",
        fix=(
            f"`graft gate --engine {engine.kind} --release {release.id[:12]}` judges it; "
            if engine.kind == "llamacpp"
            else "evaluate the server, `graft eval --subject URL#model`; "
        )
        + "`serve.require_gate_for_engine: false` serves it without",
        where="serve.engine",
    )


def _verdict_path(work: OpenProject, adapter_hash: str, engine: EngineSettings) -> Path:
    slug = re.sub(r"[^a-z0-9_.]+", "-", describe_engine(engine).lower())
    return work.project.evaluations / "verdicts" / f"{adapter_hash}.{slug}.json"
