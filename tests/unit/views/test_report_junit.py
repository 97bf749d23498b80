"""A verdict as a JUnit file: read back, it says the same."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.report import RuleResult, Verdict
from graftwork.views.evaluation import write_junit


def rule(outcome, text="JSON-valid rate over 90 %", *, must=True, sentence="It was so.", kind="limit"):
    return RuleResult(
        metric="json_valid",
        rule=text,
        outcome=outcome,
        value=0.5,
        low=None,
        high=0.6,
        limit=0.9,
        sentence=sentence,
        must=must,
        kind=kind,
    )


def verdict(*rules, decision="iterate", **more):
    return Verdict(decision=decision, reason="Because.", rules=rules, report_hash="r", rules_hash="h", **more)


def test_junit_has_one_test_case_per_rule_with_failures_and_skips():
    text = write_junit(
        {"main": verdict(rule("pass"), rule("fail"), rule("unknown"), advice=("Try <more>.",))}
    )
    root = ElementTree.fromstring(text)
    suite = root[0]
    assert root.tag == "testsuites"
    assert [suite.get(name) for name in ("tests", "failures", "skipped", "errors")] == ["3", "1", "1", "0"]
    assert [root.get(name) for name in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    passed, failed, skipped = suite.findall("testcase")
    assert passed.find("failure") is None
    assert passed.find("skipped") is None
    assert failed.find("failure").get("message") == "It was so."
    assert "limit 0.9" in failed.find("failure").text
    assert skipped.find("skipped").get("message") == "not enough evidence: It was so."
    reported = {element.get("name"): element.get("value") for element in suite.iter("property")}
    assert reported == {"decision": "iterate", "reason": "Because.", "report_hash": "r", "rules_hash": "h"}
    assert "Try <more>." in suite.find("system-out").text


def test_a_rule_that_another_replaces_is_no_failure():
    suite = ElementTree.fromstring(write_junit({"m": verdict(rule("pass"), rule("fail", must=False))}))[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")


def test_several_models_are_several_suites():
    root = ElementTree.fromstring(write_junit({"a": verdict(rule("pass")), "b": verdict(rule("fail"))}))
    assert [suite.get("name") for suite in root] == ["graft gate a", "graft gate b"]
    assert root.get("failures") == "1"


@given(st.text(), st.text(), st.lists(st.sampled_from(["pass", "fail", "unknown"]), max_size=5))
def test_a_file_with_any_text_can_be_read_back(name, words, outcomes):
    made = verdict(*(rule(outcome, words, sentence=words) for outcome in outcomes), notes=(words,))
    suite = ElementTree.fromstring(write_junit({name: made}).encode())[0]
    cases = suite.findall("testcase")
    assert len(cases) == len(outcomes)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert (case.find("failure") is not None) == (outcome == "fail")
        assert (case.find("skipped") is not None) == (outcome == "unknown")
