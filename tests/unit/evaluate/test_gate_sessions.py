"""Between training sessions: this checkpoint, or the one before."""

from gate_samples import marks, report, simple, subject
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import next_start
from graftwork.evaluate.gate.settings import GateRule, GateSettings

RULES = GateSettings(rules=(GateRule(metric="json_valid", against="base", margin=0.03),))


def session(right, n, **more):
    return simple(marks(0, n), marks(right, n), **more)


def test_not_worse_on_the_guardrails_goes_on_from_this_one():
    found = next_start(session(390, 400), session(392, 400), RULES)
    assert (found.start, found.certain) == ("this", True)
    assert found.rules[0].outcome == "pass"


def test_a_proven_loss_goes_back_to_the_one_before():
    found = next_start(session(390, 400), session(360, 400), RULES, loss_before=1.0, loss_after=0.9)
    assert (found.start, found.certain) == ("before", True)
    assert "JSON-valid rate" in found.reason


def test_too_few_cases_go_on_unless_the_validation_loss_rose():
    before, after = session(20, 20), session(19, 20)
    on = next_start(before, after, RULES, loss_before=1.0, loss_after=0.9)
    assert (on.start, on.certain) == ("this", False)
    assert on.cases_needed is None or on.cases_needed > 20
    back = next_start(before, after, RULES, loss_before=1.0, loss_after=1.2)
    assert (back.start, back.certain) == ("before", False)
    assert "rose from 1.000 to 1.200" in back.reason
    assert next_start(before, after, RULES).start == "this"


def test_how_many_cases_would_settle_it_is_reported():
    found = next_start(session(20, 20), session(20, 20), RULES)
    assert found.cases_needed > 20
    assert f"About {found.cases_needed} cases" in found.reason


def test_other_cases_cannot_be_compared():
    other = session(20, 400).model_copy(update={"cases_hash": "others"})
    found = next_start(other, session(400, 400), RULES)
    assert (found.start, found.certain) == ("this", False)
    assert "different cases" in found.reason


def test_answers_that_were_asked_for_in_another_way_cannot_be_compared():
    before = session(390, 400, settings={"max_new_tokens": 64})
    after = session(200, 400, settings={"max_new_tokens": 8})
    found = next_start(before, after, RULES, loss_before=1.0, loss_after=0.9)
    assert (found.start, found.certain) == ("this", False)
    assert "evaluate.max_new_tokens is another" in found.reason


def test_a_quality_without_a_guardrail_has_the_margin_of_sessions():
    limits = GateSettings(rules=(GateRule(metric="json_valid", over=0.5),), session_margin=0.1)
    assert next_start(session(100, 100), session(99, 100), limits).rules[0].margin == 0.1
    strict = limits.model_copy(update={"session_margin": 0.01})
    assert not next_start(session(100, 100), session(99, 100), strict).certain


def test_of_many_metrics_one_unlucky_one_is_no_proof():
    names = ("json_valid", "answer_match", "refusal_correct", "citation_correct", "citation_coverage")
    before = {name: marks(60, 60) for name in names}
    after = {**before, "json_valid": marks(54, 60)}  # 6 lost, none won: p = 0.031 alone
    rules = GateSettings(rules=tuple(GateRule(metric=name, against="base", margin=0.02) for name in names))
    base = subject("base", {name: marks(0, 60) for name in names})
    found = next_start(report(subject("a", before), base), report(subject("b", after), base), rules)
    assert found.rules[0].p_value < 0.05
    assert not found.certain


pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80)


@given(pairs, st.sampled_from([None, 0.8, 1.5]))
def test_whatever_was_seen_there_is_an_answer_with_a_reason(found, loss):
    before, after = ([int(mark) for mark in side] for side in zip(*found, strict=True))
    base = marks(0, len(found))
    answer = next_start(simple(base, before), simple(base, after), RULES, loss_before=1.0, loss_after=loss)
    assert answer.reason.endswith(".")
    if sum(after) >= sum(before) and loss != 1.5:
        assert answer.start == "this"
    if answer.start == "before" and answer.certain:
        assert sum(after) < sum(before)


def answered_by(found, **settings):
    generation = found.candidate.generation.model_copy(update={"settings": settings})
    candidate = found.candidate.model_copy(update={"generation": generation})
    return found.model_copy(update={"candidate": candidate})


def test_answers_of_two_engines_or_precisions_are_not_compared():
    before, after = session(390, 400), session(300, 400)
    ways = ({"engine": "graftwork", "base_as": "float32"}, {"engine": "vllm 0.32.0", "base_as": "float32"})
    for name, other in (("engine", ways[1]), ("precision", {**ways[0], "base_as": "bfloat16"})):
        found = next_start(answered_by(before, **ways[0]), answered_by(after, **other), RULES)
        assert (found.start, found.certain) == ("this", False)
        assert name in found.reason
    same = next_start(answered_by(before, **ways[0]), answered_by(after, **ways[0]), RULES)
    assert (same.start, same.certain) == ("before", True)
