"""What was changed about the rules, in words.

In: the rules as they stood and as they stand. Out: what went and what came. Pure.
"""

from graftwork.evaluate.gate.wording import SUBJECTS, write_rule
from graftwork.evaluate.gate_settings import GateSettings
from graftwork.evaluate.wording import name_of


def describe_change(before: GateSettings, after: GateSettings) -> str:
    """Which rules are gone and which are new; empty where both ask for the same."""
    old, new = _list_rules(before), _list_rules(after)
    gone = [rule for rule in old if rule not in new]
    come = [rule for rule in new if rule not in old]
    parts = [f"no longer {rule}" for rule in gone] + [f"now {rule}" for rule in come]
    return "; ".join(parts)


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
