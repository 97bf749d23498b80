"""Nothing is deployed on what a grader could not grade, nor on a single measurement."""

import math

import pytest
from gate_samples import marks, report, simple, subject
from pydantic import ValidationError

from graftwork.evaluate.comparison import compare
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.grading.custom import hash_own
from graftwork.records.report import JudgeTally, Metric, Report

OVER = GateSettings(rules=(GateRule(metric="json_valid", over=0.9),))
KEEPS = GateSettings(rules=(GateRule(metric="json_valid", margin=0.05, against="base"),))


def with_failed(found: Report, failed: int) -> Report:
    metric = found.candidate.metrics["json_valid"]
    lost = tuple(f"lost{n}" for n in range(failed))
    changed = {"failed": failed, "why_failed": "bug", "failed_cases": lost}
    changed["scores"] = {**metric.scores, **dict.fromkeys(lost)}
    metric = metric.model_copy(update=changed)
    candidate = found.candidate.model_copy(update={"metrics": {"json_valid": metric}})
    return found.model_copy(update={"candidate": candidate})


def test_a_grader_that_failed_on_many_answers_proves_no_limit():
    found = simple(marks(100, 100), marks(100, 100))
    assert decide(found, OVER).decision == "deploy"
    verdict = decide(with_failed(found, 100), OVER)
    assert verdict.decision == "not_enough_evidence"
    assert "100 more could not be graded and count against it" in verdict.rules[0].sentence
    assert "what could not be graded may be wrong" in verdict.rules[0].sentence
    assert verdict.advice[0].startswith("The grader of json_valid failed on 100 cases (bug): fix it")
    assert verdict.cases_needed is None


def test_a_few_failures_are_borne_where_the_bound_has_room_for_them():
    assert decide(with_failed(simple(marks(400, 400), marks(400, 400)), 2), OVER).decision == "deploy"


def test_a_figure_with_an_upper_limit_counts_failures_as_large():
    under = GateSettings(rules=(GateRule(metric="json_valid", under=0.1),))
    found = simple(marks(0, 200), marks(0, 200))
    assert decide(found, under).decision == "deploy"
    assert decide(with_failed(found, 100), under).decision == "not_enough_evidence"


def test_a_guardrail_counts_failures_as_losses():
    found = simple(marks(200, 200), marks(200, 200))
    assert decide(found, KEEPS).decision == "deploy"
    assert decide(with_failed(found, 20), KEEPS).decision == "not_enough_evidence"


def test_a_better_primary_metric_is_not_proven_by_the_answers_that_could_be_graded():
    rules = GateSettings(rules=(GateRule(metric="json_valid", over=0.1),), primary="json_valid")
    found = simple(marks(50, 100), marks(70, 100))
    assert decide(found, rules).decision == "deploy"
    assert decide(with_failed(found, 40), rules).decision == "not_enough_evidence"


def left_open(pairs: int) -> JudgeTally:
    return JudgeTally(
        model="m", baseline="base", candidate="adapter", pairs=40, wins=20, losses=0, ties=20, inconsistent=0,
        unjudged={f"c{i}": "no answer" for i in range(pairs)},
        agreement=1, agreement_low=0.9, agreement_high=1,
        first_place_share=0.5, position_bias_p=1,
    )  # fmt: skip


def test_pairs_that_the_judge_left_open_count_against_no_other_metric():
    seen = with_failed(simple(marks(400, 400), marks(400, 400)), 2)
    assert decide(seen, KEEPS).decision == "deploy"
    assert decide(seen.model_copy(update={"judged": (left_open(200),)}), KEEPS).decision == "deploy"


def test_pairs_that_the_judge_left_open_count_as_lost():
    found = simple(marks(100, 100), marks(100, 100))
    seen = found.comparisons[0].model_copy(
        update={"metric": "judge_preference", "n": 40, "wins": 20, "losses": 0, "difference": 0.5}
        | {"low": 0.35, "high": 0.65, "p_value": 1e-6}
    )
    rules = GateSettings(rules=OVER.rules, primary="judge_preference")
    found = found.model_copy(update={"comparisons": (*found.comparisons, seen)})
    assert decide(found, rules).decision == "deploy"
    assert (
        decide(found.model_copy(update={"judged": (left_open(60),)}), rules).decision == "not_enough_evidence"
    )


def test_the_gain_of_another_candidate_is_not_credited_to_this_one():
    base = subject("base", {"json_valid": marks(100, 100), "chrf": marks(0, 100)})
    rival = subject("run:other", {"json_valid": marks(100, 100), "chrf": marks(100, 100)})
    own = subject("adapter", {"json_valid": marks(100, 100)})
    found = report(own, base, others=[rival])
    found = found.model_copy(update={"comparisons": (*found.comparisons, *compare(base, candidate=rival))})
    verdict = decide(found, GateSettings(rules=OVER.rules, primary="chrf"))
    assert verdict.decision == "not_enough_evidence"


@pytest.mark.parametrize(
    "gate",
    [
        GateSettings(rules=(GateRule(metric="latency_seconds", under=5),)),
        GateSettings(rules=(GateRule(metric="latency_seconds", margin=1, against="base"),)),
        GateSettings(rules=OVER.rules, win="latency_seconds"),
    ],
)
def test_one_timed_request_proves_nothing(gate):
    def timed(times: int) -> Report:
        grades = {"json_valid": marks(100, 100)}
        slow, fast = [2.0 + i / 100 for i in range(times)], [1.0 + i / 100 for i in range(times)]
        return report(subject("adapter", grades, latency=fast), subject("base", grades, latency=slow))

    assert decide(timed(8), gate).decision == "deploy"
    assert decide(timed(1), gate).decision == "not_enough_evidence"


def test_perplexity_over_one_session_proves_no_margin():
    def weighed(name: str, loss: float):
        scores = {f"c{i}": math.exp(loss + i / 100) for i in range(20)}
        value = math.exp(loss)
        metric = Metric(
            name="reference_perplexity",
            kind="number",
            value=value,
            low=value,
            high=value,
            n=20,
            scores=scores,
        )
        return subject(name, {}).model_copy(update={"metrics": {"reference_perplexity": metric}})

    gate = GateSettings(rules=(GateRule(metric="reference_perplexity", margin=0.5, against="base"),))
    apart = report(weighed("adapter", 1.0), weighed("base", 1.1))
    together = report(
        weighed("adapter", 1.0), weighed("base", 1.1), sessions={f"c{i}": "one" for i in range(20)}
    )
    assert decide(apart, gate).decision == "deploy"
    assert decide(together, gate).decision == "not_enough_evidence"


@pytest.mark.parametrize("rule", [{"over": 0.9, "bound": "upper"}, {"at_most": 0.1, "bound": "lower"}])
def test_the_bound_that_flatters_is_refused(rule):
    with pytest.raises(ValidationError, match="is the favorable bound"):
        GateRule(metric="json_valid", **rule)


@pytest.mark.parametrize("rule", [{"margin": 5}, {"margin": 1}, {"under": 5}, {"over": 95}])
@pytest.mark.parametrize("metric", ["json_valid", "a_check_of_ours"])
def test_a_limit_that_no_grade_can_miss_is_refused_for_own_checks_too(metric, rule):
    with pytest.raises(ValidationError, match=r"between 0 and 1|allows everything"):
        GateRule(metric=metric, **rule)


def test_an_own_metric_that_was_rewritten_is_another_one(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def short(case, text): return True\n")
    before = hash_own("own.py:short", folder=tmp_path)
    file.write_text("def short(case, text): return False\n")
    assert hash_own("own.py:short", folder=tmp_path) != before
