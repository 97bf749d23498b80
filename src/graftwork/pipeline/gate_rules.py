"""The rules that a run set out with: noted in its folder, and held against those of its gate.

In: an open workplace and a run. Out: the rules as they first stood; a sentence where they were changed. They
do not name the run: other rules do not train another adapter, they only may not pass unnoticed.
"""

from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from graftwork.evaluate.gate import Judged, decide
from graftwork.evaluate.gate.changes import describe_change
from graftwork.evaluate.gate_settings import GateSettings
from graftwork.files.disk import Journal
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.records.verdict import Verdict

RULES = "rules.jsonl"
Stage = Literal["trained", "evaluated", "judged"]


class Noted(NamedTuple):
    """`settings` is None where the rules of another version cannot be read any more."""

    rules_hash: str
    when: str
    stage: Stage
    settings: GateSettings | None


def note_rules(work: OpenProject, run_id: str, *, stage: Stage) -> Noted:
    """Note the rules as they stand, unless the last note says the same; the first one comes back."""
    journal = Journal(work.project.runs / run_id / RULES)
    kept, rules = journal.read(), work.settings.gate
    if not kept or kept[-1]["rules_hash"] != rules.rules_hash():
        note = {
            "rules_hash": rules.rules_hash(),
            "when": timestamp(),
            "stage": stage,
            "rules": rules.model_dump(mode="json"),
        }
        journal.append(note, durable=True)
        kept = kept or [note]
    return _read(kept[0])


def with_changes(verdict: Verdict, judged: Judged, noted: Noted) -> Verdict:
    """The verdict, saying so where its rules are not those that the run set out with."""
    if noted.rules_hash == verdict.rules_hash:
        return verdict
    said = f"The rules were changed after this run was first {noted.stage} ({noted.when})"
    if noted.settings is not None:
        changes = describe_change(noted.settings, judged.settings)
        then = decide(judged.report, noted.settings, training=judged.training, around=judged.around)
        said += f": {changes}. By the rules as they stood the verdict would be: {_plain(then.decision)}"
    return verdict.model_copy(update={"notes": (f"{said}.", *verdict.notes)})


def _read(note: dict[str, Any]) -> Noted:
    try:
        settings = GateSettings.model_validate(note["rules"])
    except ValidationError:
        settings = None
    return Noted(note["rules_hash"], note["when"], note["stage"], settings)


def _plain(decision: str) -> str:
    return decision.replace("_", " ")
