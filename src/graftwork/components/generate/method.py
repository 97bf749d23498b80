"""Whether a stage kept to the method: checked on sources, values and counts, never judged. Pure.

Stage 1 has no optimisation. Stage 2 changes nothing that passed. Stage 3 gives the same values for less.
Stage 4 adds only handling and monitoring.
"""

from collections import Counter

from graftwork.components.spec.cases import Stage
from graftwork.components.verify.verdict import Evidence, SourceFacts, SourceVerdict
from graftwork.records.base import Record

HANDLING = frozenset({"Raise", "Return", "Assert", "If", "Import", "ImportFrom", "Pass", "Continue", "Break"})
"""Statements that stage 4 may add; besides them calls of a logger."""
KEPT_SHARE = 0.5
"""Of the statements of stage 3, the share that stage 4 keeps word for word."""
LESS_EVENTS = 1.0


class StageState(Record):
    """A source at the end of a stage, with what is known about it."""

    source: str
    verdict: SourceVerdict
    evidence: Evidence | None = None


def check_stage(stage: Stage, before: StageState | None, after: StageState) -> dict[str, bool]:
    """The checks of a stage by name. An unchanged source keeps to every method."""
    facts = after.verdict.facts
    if stage == 1 or before is None:
        return {"stage 1 has no optimisation": not facts.optimisations}
    if before.source == after.source:
        return {f"stage {stage} keeps the source": True}
    kept = {
        f"stage {stage} keeps the interface": keeps_interface(before.verdict.facts, facts),
        f"stage {stage} keeps what passed": keeps_passed(before.verdict, after.verdict),
    }
    if stage == 3:
        kept["stage 3 gives the same values"] = before.verdict.values == after.verdict.values
        kept["stage 3 needs less"] = needs_less(before.evidence, after.evidence)
    if stage == 4 and before.verdict.facts.statements:
        kept["stage 4 adds only handling and monitoring"] = adds_only_handling(before.verdict.facts, facts)
    return kept


def keeps_interface(before: SourceFacts, after: SourceFacts) -> bool:
    """The same public names; the same parameters first, and new ones need not be given."""
    count = len(before.parameters)
    same = after.parameters[:count] == before.parameters
    return (
        same
        and before.public == after.public
        and not any(each["needed"] for each in after.parameters[count:])
    )


def keeps_passed(before: SourceVerdict, after: SourceVerdict) -> bool:
    return all(not after.cases.get(case, "missing") for case, reason in before.cases.items() if not reason)


def needs_less(before: Evidence | None, after: Evidence | None) -> bool:
    """Fewer executed lines and no more memory, or less memory and no more lines."""
    if before is None or after is None:
        return False
    fewer, lighter = after.events < before.events, after.peak_bytes < before.peak_bytes * 0.95
    return (fewer and after.peak_bytes <= before.peak_bytes * 1.25 + 1024) or (
        lighter and after.events <= before.events
    )


def adds_only_handling(before: SourceFacts, after: SourceFacts) -> bool:
    old, new = Counter(before.statements), Counter(after.statements)
    added = new - old
    kept = (old & new).total() / max(1, old.total())
    return kept >= KEPT_SHARE and all(
        kind in HANDLING
        or (kind == "Expr" and text.startswith(("log.", "logger.", "logging.", "_log.")))
        or (kind == "Assign" and "logging.getLogger" in text)
        for kind, text in added
    )
