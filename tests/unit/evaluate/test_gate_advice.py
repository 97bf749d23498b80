"""Advice drawn from how training went and from what the answers show."""

import math

import pytest
from gate_samples import marks, outcome, report, simple, steps, subject

from graftwork.evaluate.gate.advice import BetterRun, Training, compare_plans, find_spikes, hints_of
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.records.base import Figure
from graftwork.records.plan import DeviceFacts, Plan

RULE = GateSettings(rules=(GateRule(metric="json_valid", over=0.9),))
FLAT = [2.0, 1.5, 1.2, 1.1, 1.05, 1.02, 1.0] + [1.0] * 33
FALLING = [2.0 - 0.03 * i for i in range(40)]


def training(losses, **more):
    return Training(outcome(losses, **more), steps(losses))


def plan(**more):
    device = DeviceFacts(kind="cpu", name="cpu", memory_gib=4, threads=1)
    named = ("total_parameters", "trainable_parameters", "peak_memory_gib", "disk_gib", "tokens")
    named += ("trained_tokens", "steps", "tokens_per_second", "minutes")
    values = {
        "base": "tiny",
        "base_fingerprint": "f",
        "dataset_hash": "d",
        "method": "lora",
        "dtype": "float32",
        "device": device,
        "certainty": "computed",
        "fits": True,
        "train": {},
        **dict.fromkeys(named, Figure.exact(1)),
    }
    return Plan.model_validate({**values, **more})


def advice(how, **more):
    verdict = decide(simple(marks(10, 100), marks(80, 100)), RULE, training=how, **more)
    assert verdict.decision == "iterate"
    return " ".join(verdict.advice)


def test_a_loss_that_was_still_falling_asks_for_more_steps():
    output = advice(training(FALLING))
    assert "still falling" in output
    assert "train.epochs: 2 → 3" in output
    assert "still falling" not in advice(training(FLAT))
    assert "still falling" in advice(training([*FALLING[:36], *[FALLING[36]] * 4]))  # by fifths of the run


def test_a_training_loss_far_under_the_validation_loss_asks_for_less():
    by_heart = [2.0 - 0.045 * i for i in range(43)]
    output = advice(training(by_heart, before=1.9, after=1.4))
    assert "memorized" in output
    assert "still falling" not in output  # more steps would make it worse


def test_a_validation_loss_that_rose_asks_for_less():
    output = advice(training(FLAT, before=1.1, after=1.3))
    assert "memorized" in output
    assert "up from 1.10" in output


def test_a_best_evaluation_long_before_the_end_says_that_more_steps_do_not_help():
    looks = [(10, 1.2), (20, 1.0), (30, 1.05), (40, 1.06)]
    output = advice(training(FLAT, after=1.06, looks=looks, best_step=20))
    assert "best evaluation was at step 20 of 40, and 2 after it were no better" in output
    rising_to_the_end = advice(training(FLAT, looks=[(10, 1.3), (20, 1.2), (40, 1.1)], best_step=40))
    assert "best evaluation" not in rising_to_the_end


def test_jumps_of_the_loss_ask_for_a_lower_rate():
    jumping = [*FLAT]
    jumping[15], jumping[25] = 4.0, 5.0
    output = advice(training(jumping))
    assert "jumped 2 times (steps 16, 26)" in output
    assert "train.learning_rate: 0.001 → 0.0005" in output


def test_a_loss_that_is_no_number_is_a_jump():
    broken = [*FLAT[:20], math.nan, *FLAT[21:]]
    assert find_spikes(steps(broken)) == [21]
    assert find_spikes(steps(FLAT)) == []


def test_a_loss_that_hardly_moved_asks_for_a_higher_rate():
    assert "Hardly anything was learned" in advice(training([2.0, 1.99] * 20, before=2.0, after=1.99))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_short_course_is_not_read_for_where_it_was_going(length):
    assert not any("falling" in hint.text for hint in hints_of(training(FALLING[:length]), failures=5))


def test_without_a_training_nothing_is_reported_about_it():
    assert hints_of(None, failures=5) == []
    assert "loss" not in advice(None)


def test_training_is_not_blamed_where_only_cases_are_missing():
    verdict = decide(simple(marks(2, 20), marks(20, 20)), RULE, training=training(FALLING))
    assert verdict.decision == "not_enough_evidence"
    assert not any("falling" in line for line in verdict.advice)


def test_wrong_answers_that_were_cut_off_ask_for_a_longer_limit_whatever_the_rule():
    right, cut = marks(60, 100), [0] * 60 + [1] * 40
    seen = report(
        subject("adapter", {"answer_match": right, "truncated": cut}),
        subject("base", {"answer_match": marks(10, 100), "truncated": cut}),
        settings={"max_new_tokens": 48},
    )
    verdict = decide(
        seen, GateSettings(rules=(GateRule(metric="answer_match", over=0.9),)), training=training(FALLING)
    )
    assert "40 wrong answers had been cut off at 48 tokens" in verdict.advice[0]
    assert "still falling" in verdict.advice[1]  # what may explain all comes after what does


def test_a_rule_on_cut_off_answers_asks_for_a_longer_limit():
    cut = marks(40, 100)
    seen = report(
        subject("adapter", {"truncated": cut}),
        subject("base", {"truncated": cut}),
        settings={"max_new_tokens": 48},
    )
    verdict = decide(seen, GateSettings(rules=(GateRule(metric="truncated", under=0.2),)))
    assert verdict.decision == "iterate"
    assert "40 wrong answers had been cut off at 48 tokens" in verdict.advice[0]


def test_a_difference_that_no_test_set_could_show_asks_for_better_training_first():
    base, adapter = [1, 0] * 100, [0, 1] * 99 + [1, 1]
    verdict = decide(simple(base, adapter), GateSettings(primary="json_valid"))
    output = " ".join(verdict.advice)
    assert "too small to prove" in output
    assert "Evaluate on about" not in output


def test_refusals_are_distinguished_both_ways():
    # Coverage does not apply where the reference refuses.
    coverage = [None] * 20 + [1] * 80
    refusals = [0] * 15 + [1] * 5 + [0] * 10 + [1] * 70
    grades = {"refusal_correct": refusals, "citation_coverage": coverage}
    seen = report(subject("adapter", grades), subject("base", grades))
    output = " ".join(
        decide(seen, GateSettings(rules=(GateRule(metric="refusal_correct", over=0.9),))).advice
    )
    assert "15 questions without an answer in the sources got one anyway" in output
    assert "10 questions with an answer in the sources got a refusal" in output


def test_latency_over_its_limit_asks_for_fewer_tokens_or_a_smaller_base():
    seen = report(
        subject("adapter", {"json_valid": marks(9, 9)}, latency=[14.0] * 8, speed=35.0),
        subject("base", {"json_valid": marks(9, 9)}, latency=[14.0] * 8),
    )
    verdict = decide(seen, GateSettings(rules=(GateRule(metric="latency_seconds", under=12),)))
    assert "fewer tokens (it makes 35 tokens per second)" in verdict.advice[0]
    assert "quantized" in verdict.advice[0]


def test_advice_starts_with_what_was_changed_since_a_better_run():
    better = simple(marks(0, 90), marks(70, 90), metric="queue")
    worse = simple(marks(0, 90), marks(0, 90), metric="queue")
    gate = GateSettings(rules=(GateRule(metric="queue", over=0.5),), primary="queue")
    changes = ("train.epochs 3 → 1", "train.upper_layers 15 → 8")
    good = BetterRun("abcdef0123456789", better, changes)
    verdict = decide(worse, gate, training=training(FLAT)._replace(good=good))
    assert verdict.decision == "iterate"
    assert "train.epochs 3 → 1, train.upper_layers 15 → 8" in verdict.advice[0]
    assert "queue from 70 of 90 to 0 of 90" in verdict.advice[0]
    # A run that did no better explains nothing.
    alike = training(FLAT)._replace(good=BetterRun("abcdef0123456789", worse, changes))
    assert not any("Changed since" in line for line in decide(worse, gate, training=alike).advice)


def test_two_plans_are_compared_by_settings_data_and_base():
    before = plan(train={"settings": {"epochs": 3, "eval": {"every": None}}}, dataset_hash="a" * 64)
    now = plan(train={"settings": {"epochs": 1, "eval": {"every": 5}}}, dataset_hash="b" * 64)
    changed = compare_plans(before, now.model_copy(update={"base_fingerprint": "other"}))
    assert changed[0].startswith("the files of the base")
    assert changed[1:3] == ("train.epochs 3 → 1", "train.eval.every none → 5")
    assert changed[3].startswith("the dataset aaaaaaaa → bbbbbbbb")
    assert compare_plans(now, now) == ()
