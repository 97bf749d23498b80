"""What was changed about the rules, or about how they are judged, in words.

In: the rules as they stood and as they stand, or two verdicts on one report. Out: what went and what came.
Pure.
"""

from graftwork.evaluate.gate.wording import SUBJECTS, write_rule
from graftwork.evaluate.gate_settings import GateSettings
from graftwork.grading.metrics import name_of
from graftwork.records.verdict import RuleOutcome, Verdict

OUTCOMES: dict[RuleOutcome, str] = {"pass": "kept", "fail": "broken", "unknown": "open"}


def describe_change(before: GateSettings, after: GateSettings) -> str:
    """Which rules are gone and which are new; empty where both ask for the same."""
    old, new = _list_rules(before), _list_rules(after)
    gone = [rule for rule in old if rule not in new]
    come = [rule for rule in new if rule not in old]
    parts = [f"no longer {rule}" for rule in gone] + [f"now {rule}" for rule in come]
    return "; ".join(parts)


def describe_outcomes(before: Verdict, after: Verdict) -> str:
    """Why the same report is judged otherwise: which rule came out how, and by which test."""
    was = {(rule.kind, rule.metric, rule.rule): rule for rule in before.rules}
    said = []
    for rule in after.rules:
        old = was.pop((rule.kind, rule.metric, rule.rule), None)
        if old is None or old.outcome != rule.outcome:
            then = (
                f"{OUTCOMES[old.outcome]} ({old.test or 'no test'})" if old is not None else "not looked at"
            )
            said.append(
                f"{rule.rule}: {then} before, {OUTCOMES[rule.outcome]} now ({rule.test or 'no test'})"
            )
    said += [f"{rule.rule}: {OUTCOMES[rule.outcome]} before, no longer so" for rule in was.values()]
    return "; ".join(said)


def _list_rules(settings: GateSettings) -> list[str]:
    said = []
    for rule in settings.rules:
        invariant = "invariant: " if rule.severity == "invariant" else ""
        counted = f" by its {rule.bound}" if rule.bound else ""
        said.append(f"{invariant}{write_rule(rule)}{counted}")
    if (primary := settings.primary_rule) is not None:
        said.append(f"{name_of(primary.metric)} better than {SUBJECTS[primary.against]}")
    if (win := settings.win_rule) is not None:
        said.append(f"a saving of {100 * win.by:g} % of {name_of(win.metric)} of {SUBJECTS[win.against]}")
    if (stop := settings.abort_when) is not None:
        named = ", ".join(map(name_of, stop.worse_on))
        said.append(f"abort when worse than {SUBJECTS[stop.against]} on {named} by {stop.by}")
    return said
