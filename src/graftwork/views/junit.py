"""Verdicts as a JUnit file, which every CI server shows.

In: verdicts by the model's name. Out: XML, one test case a rule: failed, or skipped for want of evidence.
Pure; does not know where the file goes. A skipped case lets a build pass; the exit code of the gate does not.
"""

import re
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from graftwork.records.report import RuleResult, Verdict

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NOT_ENOUGH = "not enough evidence"


def write_junit(verdicts: Mapping[str, Verdict]) -> str:
    """One test suite a model."""
    root = Element("testsuites", {"name": "graft gate"})
    counted = [_add_suite(root, name, verdict) for name, verdict in verdicts.items()]
    for place, what in enumerate(("tests", "failures", "skipped")):
        root.set(what, str(sum(counts[place] for counts in counted)))
    root.set("errors", "0")
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _add_suite(root: Element, name: str, verdict: Verdict) -> tuple[int, int, int]:
    needed = [rule for rule in verdict.rules if rule.must]
    tests = len(verdict.rules)
    failures = sum(rule.outcome == "fail" for rule in needed)
    skipped = sum(rule.outcome == "unknown" for rule in needed)
    skipped += sum(not rule.must and rule.outcome != "pass" for rule in verdict.rules)
    suite = SubElement(
        root,
        "testsuite",
        {
            "name": _clean(f"graft gate {name}"),
            "tests": str(tests),
            "failures": str(failures),
            "errors": "0",
            "skipped": str(skipped),
            "time": "0",
        },
    )
    properties = SubElement(suite, "properties")
    figures = {
        "decision": verdict.decision,
        "reason": verdict.reason,
        "report_hash": verdict.report_hash,
        "rules_hash": verdict.rules_hash,
    }
    for key, value in figures.items():
        SubElement(properties, "property", {"name": key, "value": _clean(value)})
    for rule in verdict.rules:
        _add_case(suite, name, rule)
    lines = [f"{verdict.decision}: {verdict.reason}", *verdict.notes, *verdict.advice]
    SubElement(suite, "system-out").text = _clean("\n".join(lines))
    return tests, failures, skipped


def _add_case(suite: Element, model: str, rule: RuleResult) -> None:
    place = {"classname": _clean(f"graft.gate.{model}.{rule.kind}"), "name": _clean(rule.rule), "time": "0"}
    case = SubElement(suite, "testcase", place)
    if rule.outcome == "pass":
        SubElement(case, "system-out").text = _clean(rule.sentence)
    elif not rule.must:
        SubElement(case, "skipped", {"message": _clean(f"another rule takes its place: {rule.sentence}")})
    elif rule.outcome == "unknown":
        SubElement(case, "skipped", {"message": _clean(f"{NOT_ENOUGH}: {rule.sentence}")})
    else:
        failure = SubElement(case, "failure", {"message": _clean(rule.sentence), "type": rule.kind})
        failure.text = _clean(_figures(rule))


def _figures(rule: RuleResult) -> str:
    shown = {"value": rule.value, "low": rule.low, "high": rule.high, "limit": rule.limit, "n": rule.n}
    return ", ".join(f"{key} {value:g}" for key, value in shown.items() if value is not None)


def _clean(text: str) -> str:
    """XML has no place for control characters, however they got into a name."""
    return NOT_IN_XML.sub("\ufffd", text)
