"""The gate as a whole holds its level: whole sessions that fail, many rules, many adapters, old reports."""

import random
import re

import pytest
from gate_samples import marks, report, simple, subject

from graftwork.evaluate.comparison import describe_wear
from graftwork.evaluate.gate.decide import GateCandidate, decide, decide_all
from graftwork.evaluate.gate.settings import GateRule, GateSettings, Win

BETTER = GateSettings(rules=(GateRule(metric="json_valid", over=0.1),), primary="json_valid")


def in_sessions(before, after, size):
    sessions = {f"c{i}": f"s{i // size}" for i in range(len(after))}
    return report(
        subject("adapter", {"json_valid": after}, sessions=sessions),
        subject("base", {"json_valid": before}, sessions=sessions),
        sessions=sessions,
    )


def test_an_adapter_that_fails_whole_sessions_is_not_called_better():
    """Both are right in nine answers of ten. Sign flips deployed the adapter in every fifth evaluation."""
    draw, deployed = random.Random(3), 0
    for _ in range(20):
        after = [mark for _ in range(16) for mark in [int(draw.random() < 0.9)] * 8]
        before = [int(draw.random() < 0.9) for _ in range(128)]
        deployed += decide(in_sessions(before, after, 8), BETTER).decision == "deploy"
    assert deployed <= 2


def test_a_gain_over_sessions_is_reported_in_plain_words():
    verdict = decide(in_sessions([0] * 80 + [1] * 80, [1] * 160, 4), BETTER)
    assert verdict.decision == "deploy"
    assert "better on average over sessions like these" in verdict.rules[1].sentence
    alone = decide(simple([0] * 40 + [1] * 40, [1] * 80), BETTER)
    assert "better on average over cases like these" in alone.rules[1].sentence


def test_scores_that_collapse_on_a_few_cases_are_not_called_better():
    """The adapter's grades are a little higher but for one case in fifty: on average both are alike."""
    draw, deployed = random.Random(4), 0
    gate = GateSettings(rules=(GateRule(metric="token_f1", over=0.1),), primary="token_f1")
    for _ in range(20):
        after = [0.0 if draw.random() < 0.02 else (0.8 + 0.01 * draw.random()) / 0.98 for _ in range(31)]
        before = [0.8 + 0.01 * draw.random() for _ in range(31)]
        found = report(subject("adapter", {"token_f1": after}), subject("base", {"token_f1": before}))
        deployed += decide(found, gate).decision == "deploy"
    assert deployed <= 2


def test_the_advice_counts_sessions_and_is_exact_where_nothing_varies():
    limit = GateSettings(rules=(GateRule(metric="json_valid", over=0.8),))
    rule = decide(in_sessions([1] * 400, [1] * 400, 25), limit).rules[0]
    assert (rule.cases_to_decide, rule.sessions_to_decide) == (425, 17)
    assert "425 fresh cases in 17 sessions like these" in rule.sentence
    assert decide(in_sessions([1] * 425, [1] * 425, 25), limit).decision == "deploy"
    won = decide(in_sessions([0] * 125, [1] * 125, 25), BETTER).rules[1]
    assert (won.cases_to_decide, won.sessions_to_decide) == (150, 6)
    assert decide(in_sessions([0] * 150, [1] * 150, 25), BETTER).decision == "deploy"


def test_the_advice_is_a_range_and_says_where_what_was_seen_may_be_noise():
    gained = simple([0] * 12 + [1] * 4 + [1] * 84, [1] * 12 + [0] * 4 + [1] * 84)
    rule = decide(gained, BETTER).rules[1]
    least, most = (
        int(number.replace(",", ""))
        for number in re.search(r"80 % power \(([\d,]+) to ([\d,]+), for so much", rule.sentence).groups()
    )
    assert least < rule.cases_to_decide / 1.5
    assert most > 3 * rule.cases_to_decide
    noise = decide(simple([0] * 6 + [1] * 5 + [1] * 89, [1] * 6 + [0] * 5 + [1] * 89), BETTER).rules[1]
    assert "what was seen may be noise" in noise.sentence
    assert "or no number of cases" in noise.sentence


def test_the_advice_knows_how_many_adapters_were_tried():
    gained = simple([0] * 12 + [1] * 3 + [1] * 16, [1] * 12 + [0] * 3 + [1] * 16)
    same = simple([1] * 31, [1] * 31)
    three = decide_all({f"m{i}": GateCandidate(gained if i == 0 else same, BETTER) for i in range(3)})["m0"]
    six = decide_all({f"m{i}": GateCandidate(gained if i == 0 else same, BETTER) for i in range(6)})["m0"]
    assert three.decision == six.decision == "not_enough_evidence"
    assert three.rules[1].cases_to_decide < six.rules[1].cases_to_decide


def at_look(found, look, cases_hash="cases"):
    wear = describe_wear(look, candidates=look, look=look)
    return found.model_copy(update={"wear": wear, "cases_hash": cases_hash})


@pytest.mark.parametrize(("shared", "look"), [(False, 12), (True, 13)])
def test_an_unchanged_main_model_takes_no_looks_from_a_retrained_specialist(shared, look):
    clear = simple([0] * 60 + [1] * 40, [1] * 100)
    lucky = simple([0] * 12 + [1] * 3 + [1] * 85, [1] * 12 + [0] * 3 + [1] * 85)
    main = GateCandidate(at_look(clear, 1, "cases" if shared else "others"), BETTER)
    verdicts = decide_all({"main": main, "specialist": GateCandidate(at_look(lucky, look), BETTER)})
    assert verdicts["main"].decision == "deploy"
    assert verdicts["specialist"].decision == "not_enough_evidence"
    assert "this is evaluation 12 on these" in verdicts["specialist"].rules[1].sentence


def test_adapters_judged_together_for_the_first_time_are_all_judged_as_on_fresh_cases():
    clear = simple([0] * 60 + [1] * 40, [1] * 100)
    tried = {f"m{i}": GateCandidate(at_look(clear, i + 1), BETTER) for i in range(6)}
    verdicts = decide_all(tried)
    assert verdicts["m5"] == verdicts["m0"].model_copy(
        update={"report_hash": verdicts["m5"].report_hash, "notes": verdicts["m5"].notes}
    )


def test_without_a_primary_metric_the_limits_are_corrected_for_the_adapters_that_were_tried():
    gate = GateSettings(rules=(GateRule(metric="json_valid", over=0.9),), primary="none")
    enough = simple([1] * 40, [1] * 40)
    assert decide(enough, gate).decision == "deploy"
    together = decide_all({f"m{i}": GateCandidate(enough, gate) for i in range(6)})["m0"]
    assert together.decision == "not_enough_evidence"
    assert "6 adapters are judged together and none has to be better, so every bound holds at" in " ".join(
        together.notes
    )
    plenty = simple([1] * 80, [1] * 80)
    assert decide_all({f"m{i}": GateCandidate(plenty, gate) for i in range(6)})["m0"].decision == "deploy"


def test_a_saving_is_corrected_for_the_adapters_that_were_tried():
    rules = (GateRule(metric="json_valid", against="base", margin=0.5),)
    gate = GateSettings(rules=rules, win=Win(metric="latency_seconds"))
    slow, fast = [2.0] * 8, [1.0] * 7 + [2.5]

    def one(times):
        return report(
            subject("adapter", {"json_valid": marks(60, 60)}, latency=times),
            subject("base", {"json_valid": marks(60, 60)}, latency=slow),
        )

    assert decide(one(fast), gate).decision == "deploy"
    tried = {f"m{i}": GateCandidate(one(fast if i == 0 else slow), gate) for i in range(6)}
    assert decide_all(tried)["m0"].decision == "not_enough_evidence"


def test_six_rules_raise_no_more_false_alarms_than_one():
    """Nine of nine lost is p 0.004: alone it aborts, of twenty rules it may be chance."""
    names = [f"check_{i}" for i in range(20)]
    lost = {name: [0] * 9 + [1] * 51 if name == names[0] else [1] * 60 for name in names}
    found = report(subject("adapter", lost), subject("base", {name: [1] * 60 for name in names}))
    alone = GateSettings(rules=(GateRule(metric=names[0], over=0.5),))
    assert decide(found, alone).decision == "abort"
    many = GateSettings(rules=tuple(GateRule(metric=name, over=0.5) for name in names))
    assert decide(found, many).decision != "abort"


def test_a_report_without_cases_is_not_advised_to_train_longer():
    verdict = decide(report(subject("adapter", {}), subject("base", {})), BETTER)
    assert verdict.decision == "not_enough_evidence"
    assert verdict.advice == (
        "Nothing was measured: hold out cases that the rules apply to, and evaluate on them.",
    )
