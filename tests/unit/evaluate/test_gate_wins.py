"""The gain that deploys: a better primary metric, or a saving that was declared."""

import pytest
from gate_samples import marks, report, subject

from graftwork.evaluate.gate.decide import GateCandidate, decide, decide_all
from graftwork.evaluate.gate.settings import GateRule, GateSettings, Primary, Win

GUARD = GateRule(metric="json_valid", against="base", margin=0.02)
SLOW = [2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.0, 2.1]
FAST = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.1]


def seen(after=400, before=400, n=400, *, latency=FAST, base_latency=SLOW, memory=2.0, base_memory=2.0):
    return report(
        subject("adapter", {"json_valid": marks(after, n)}, latency=latency, memory=memory),
        subject("base", {"json_valid": marks(before, n)}, latency=base_latency, memory=base_memory),
    )


def test_a_candidate_neither_worse_nor_better_is_not_deployed():
    verdict = decide(seen(), GateSettings(rules=(GUARD,), primary="json_valid"))
    assert verdict.decision == "iterate"


def test_a_declared_saving_deploys_what_is_not_worse():
    settings = GateSettings(rules=(GUARD,), primary="json_valid", win="latency_seconds")
    verdict = decide(seen(), settings)
    assert verdict.decision == "deploy"
    primary, win = verdict.rules[1:]
    assert (primary.outcome, primary.must) == ("fail", False)
    assert (win.outcome, win.must, win.kind) == ("pass", True, "win")
    assert win.value == pytest.approx(-1.0)
    assert "the saving that was declared" in win.sentence


def test_a_saving_does_not_deploy_what_is_not_proven_to_be_as_good():
    settings = GateSettings(rules=(GUARD,), win="latency_seconds")
    assert decide(seen(after=20, before=20, n=20), settings).decision == "not_enough_evidence"


def test_a_saving_must_be_as_large_as_declared():
    def large(by):
        return GateSettings(rules=(GUARD,), win=Win(metric="latency_seconds", by=by))

    assert decide(seen(), large(0.4)).decision == "deploy"
    assert decide(seen(), large(0.6)).decision == "iterate"


def test_a_saving_that_may_be_chance_is_not_enough_evidence():
    settings = GateSettings(rules=(GUARD,), win="latency_seconds")
    wobbling = [1.0, 3.5, 1.0, 3.5, 1.1, 3.4, 0.9, 1.0]
    verdict = decide(seen(latency=wobbling), settings)
    assert verdict.decision == "not_enough_evidence"
    assert verdict.rules[-1].cases_to_decide > 8
    assert f"About {verdict.rules[-1].cases_to_decide} timed requests would settle it" in verdict.reason


def test_memory_is_measured_once_so_a_small_difference_is_no_saving():
    settings = GateSettings(rules=(GUARD,), win="peak_memory_gib")
    assert decide(seen(memory=1.5), settings).decision == "deploy"
    assert decide(seen(memory=1.95), settings).decision == "iterate"


def test_a_win_without_a_rule_on_quality_is_refused():
    with pytest.raises(ValueError, match="needs a rule on the quality"):
        GateSettings(rules=(GateRule(metric="peak_memory_gib", at_most=10),), win="latency_seconds")
    with pytest.raises(ValueError, match="is a quality, not a cost"):
        GateSettings(rules=(GUARD,), win="json_valid")
    with pytest.raises(ValueError, match="is a cost, not a quality"):
        GateSettings(rules=(GUARD,), primary="latency_seconds")


def test_the_primary_metric_may_be_held_against_the_champion():
    champion = subject("champion", {"json_valid": marks(398, 400)})
    found = report(
        subject("adapter", {"json_valid": marks(400, 400)}),
        subject("base", {"json_valid": marks(100, 400)}),
        others=(champion,),
        champion="champion",
    )
    against = GateSettings(rules=(GUARD,), primary=Primary(metric="json_valid", against="champion"))
    verdict = decide(found, against)
    assert verdict.decision == "not_enough_evidence"
    assert verdict.rules[1].against == "champion"
    assert decide(found, GateSettings(rules=(GUARD,), primary="json_valid")).decision == "deploy"


def test_a_mean_of_grades_is_tested_by_its_bounds():
    better = [0.9, 0.8, 0.95, 0.7, 0.85, 0.9, 0.92, 0.81, 0.77, 0.99, 0.9, 0.83] * 3
    worse = [value - 0.3 for value in better]
    found = report(subject("adapter", {"token_f1": better}), subject("base", {"token_f1": worse}))
    settings = GateSettings(rules=(GateRule(metric="token_f1", over=0.5),), primary="token_f1")
    verdict = decide(found, settings)
    assert verdict.decision == "deploy"
    assert "bounded-mean test" in verdict.rules[1].sentence


def test_six_adapters_tried_in_one_go_need_more_than_one_alone():
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=0.5),), primary="json_valid")

    def one(gained):
        before = marks(94, 100)
        after = marks(94 + gained, 100)
        return report(subject("adapter", {"json_valid": after}), subject("base", {"json_valid": before}))

    lucky = decide(one(6), settings)
    assert (lucky.decision, lucky.rules[-1].p_value) == ("deploy", pytest.approx(0.03125))
    tried = {"lucky": GateCandidate(one(6), settings)} | {
        f"m{i}": GateCandidate(one(0), settings) for i in range(5)
    }
    together = decide_all(tried)
    assert together["lucky"].decision == "not_enough_evidence"
    assert together["lucky"].rules[-1].adjusted_p == pytest.approx(6 * 0.03125)
    assert "Holm" in together["lucky"].rules[-1].sentence
    assert decide_all({"lucky": GateCandidate(one(6), settings)})["lucky"] == lucky
