"""Gradients of preferences and policies equal TRL's on the same batch, and the weights keep their promises.

`tests/data/trl_reference.json` was written by `tools/trl_reference.py`, which runs TRL's own trainers.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from graftwork.records.interaction import Message, Origin
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.objectives.policy import PolicyGradient, kl_to_reference
from graftwork.train.objectives.preference import (
    DirectPreference,
    JudgedOrder,
    KahnemanTversky,
    OddsRatioPreference,
)
from graftwork.train.objectives.samples import (
    TrainingSample,
    join_units,
    scale_pairs,
    scale_policy,
    scale_supervised,
    split_units,
)
from graftwork.train.settings import MixSettings, PolicySettings, PreferenceSettings, TrainSettings
from trl_batch import (
    ADVANTAGES,
    ANSWERS,
    GRADIENT_OF,
    JUDGED,
    KTO_CASES,
    MAX_TOKENS,
    PAIRS,
    POLICY_CASES,
    PREFERENCE_CASES,
    PROMPTS,
    make_model,
    shift,
)

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "trl_reference.json").read_text())
SETTINGS = TrainSettings(max_grad_norm=1e9)


def make_sample(prompt, answer, **fields):
    return TrainingSample(
        id=f"{prompt}/{answer}",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="x"),),
        reply="y",
        tokens=PROMPTS[prompt] + ANSWERS[answer],
        trained_from=len(PROMPTS[prompt]),
        **fields,
    )


def make_engine(objective, **options):
    model = make_model()
    return TrainingEngine(
        model, list(model.parameters()), settings=SETTINGS, step=StepOptions(objective=objective, **options)
    )


def gradient_of(engine):
    return engine.model.get_parameter(GRADIENT_OF).grad.flatten()


def assert_equal_to_trl(gradient, reference):
    theirs = torch.tensor(reference["gradient"])
    assert float((gradient - theirs).norm() / theirs.norm()) < 1e-5


def make_group_rows(case):
    settings = PolicySettings(
        loss="cispo" if case["loss_type"] == "cispo" else "gspo" if case.get("level") else "grpo",
        kl=case.get("beta", 0.0),
        epsilon_high=case.get("epsilon_high"),
        normalize={"cispo": "dapo"}.get(case["loss_type"], case["loss_type"]),
    )
    rows = [
        make_sample(at // 3, at, unit=str(at // 3), part="rl", advantage=advantage)
        for at, advantage in enumerate(ADVANTAGES)
    ]
    now = make_engine(PolicyGradient(settings)).log_probabilities(rows)
    moved = [shift(at, size=max(map(len, ANSWERS)), by=1.0)[: len(now[at])] for at in range(len(rows))]
    fields = [
        {
            "reference": tuple((values - 0.2 * by).tolist()),
            "sampled": tuple((values + 0.4 * by).tolist()) if case.get("old") else None,
        }
        for values, by in zip(now, moved, strict=True)
    ]
    rows = [row.model_copy(update=more) for row, more in zip(rows, fields, strict=True)]
    return settings, scale_policy(rows, how=settings.normalize, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("name", POLICY_CASES)
@pytest.mark.parametrize("micro_rows", [None, 2])
def test_policy_gradients_equal_those_of_trl(name, micro_rows):
    settings, rows = make_group_rows(POLICY_CASES[name])
    engine = make_engine(PolicyGradient(settings), micro_rows=micro_rows)
    engine.backward(rows)
    assert_equal_to_trl(gradient_of(engine), REFERENCE["policy"][name])


def make_pair_rows():
    pairs = []
    for number, (prompt, *answers) in enumerate(PAIRS):
        chosen, rejected = (
            make_sample(prompt, answer, unit=str(number), part=part)
            for answer, part in zip(answers, ("chosen", "rejected"), strict=True)
        )
        pairs.append((chosen, rejected))
    engine = make_engine(DirectPreference(PreferenceSettings()))
    for number, pair in enumerate(pairs):
        now = engine.log_probabilities(list(pair))
        # TRL compares sums: the whole difference is in the first token.
        moved = [shift(number + half * len(pairs), size=1, by=0.7)[0] for half in (0, 1)]
        pairs[number] = tuple(
            row.model_copy(update={"reference": (float(values[0] + by), *values[1:].tolist())})
            for row, values, by in zip(pair, now, moved, strict=True)
        )
    return scale_pairs(pairs)


@pytest.mark.parametrize("name", PREFERENCE_CASES)
@pytest.mark.parametrize("micro_rows", [None, 2])
def test_preference_gradients_equal_those_of_trl(name, micro_rows):
    case = PREFERENCE_CASES[name]
    settings = PreferenceSettings(
        beta=case["beta"], sft=case["weights"][1] if len(case["weights"]) > 1 else 0.0
    )
    engine = make_engine(DirectPreference(settings), micro_rows=micro_rows)
    result = engine.backward(make_pair_rows())
    assert_equal_to_trl(gradient_of(engine), REFERENCE["preference"][name])
    if name == "dpo":
        assert result.loss == pytest.approx(REFERENCE["preference"]["dpo"]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", KTO_CASES)
@pytest.mark.parametrize("micro_rows", [None, 1])
def test_kto_gradients_equal_those_of_trl(name, micro_rows):
    case = KTO_CASES[name]
    assert case["desirable"] == 1
    settings = PreferenceSettings(beta=case["beta"], undesirable_weight=case["undesirable"])
    engine = make_engine(KahnemanTversky(settings), micro_rows=micro_rows)
    samples = []
    for number, (prompt, answer, is_good) in enumerate(JUDGED):
        row = make_sample(prompt, answer, unit=str(number), part="chosen" if is_good else "rejected")
        now = engine.log_probabilities([row])[0]
        by = shift(number, size=1, by=0.7)[0]
        start = (float(now[0] + by), *now[1:].tolist())
        samples.append(row.model_copy(update={"reference": start}))

    def sums(rows):
        return [float(values.sum()) for values in engine.log_probabilities(rows)]

    order = JudgedOrder(
        samples,
        settings=TrainSettings(objective="kto", batch_size=len(JUDGED), epochs=1),
        now=sums,
        start=lambda rows: [value + case["start"] for value in sums(rows)],
    )
    order._steps = (tuple(range(len(JUDGED))),)
    result = engine.backward(order.batch(1))
    assert order.measures(1)["baseline"] == pytest.approx(max(-case["start"], 0.0), abs=1e-5)
    assert_equal_to_trl(gradient_of(engine), REFERENCE["kto"][name])
    assert result.loss == pytest.approx(REFERENCE["kto"][name]["loss"], rel=1e-5)


def test_odds_ratio_weights_equal_those_of_trl():
    means = {"chosen": (-0.4, -1.2), "rejected": (-0.9, -0.3)}
    pairs = [tuple(make_sample(0, 0, unit=str(number), part=part) for part in means) for number in range(2)]
    rows = [row.model_copy(update={"supervised_scale": 0.0}) for row in scale_pairs(pairs)]
    values = [torch.full((3,), means[row.part][int(row.unit)]) for row in rows]
    objective = OddsRatioPreference(PreferenceSettings(beta=0.1))
    weights = objective.weights(rows, lambda: values)
    for row, weight in zip(rows, weights, strict=True):
        # A weight multiplies −log p, and the mean is over three tokens.
        assert float(-weight.sum()) == pytest.approx(REFERENCE["odds"][row.part][int(row.unit)], rel=1e-5)
    measured = objective.measure(rows, values)["loss"].mean()
    assert float(measured) == pytest.approx(REFERENCE["odds"]["loss"], rel=1e-5)


def test_policy_weights_with_one_update_need_no_log_probabilities():
    rows = [make_sample(0, at, unit="0", part="rl", advantage=0.5, scale=0.1) for at in range(3)]
    weights = PolicyGradient(PolicySettings()).weights(rows, lambda: pytest.fail("no forward pass is needed"))
    assert [value.tolist() for value in weights] == [
        pytest.approx([0.05] * len(ANSWERS[at]), rel=1e-6) for at in range(3)
    ]


def test_policy_weights_have_the_ratio_of_an_answer_next_to_rows_without_one():
    count, log_ratio = len(ANSWERS[0]), -math.log(1.1)
    old = make_sample(0, 0, unit="0", part="rl", advantage=0.5, scale=1.0, sampled=(log_ratio,) * count)
    rows = [old, make_sample(1, 4, unit="", part="sft", scale=0.1)]
    weights = PolicyGradient(PolicySettings()).weights(rows, lambda: [torch.zeros(count), torch.zeros(9)])
    assert weights[0].tolist() == pytest.approx([0.55] * count)
    assert weights[1].tolist() == pytest.approx([0.1] * len(weights[1]))


@pytest.mark.parametrize("share", [0.3, 0.05])
def test_mix_divides_each_part_by_its_own_tokens(share):
    rl = [make_sample(0, at, unit="0", part="rl", advantage=1.0) for at in range(3)]
    rl = scale_policy(rl, how="dapo", max_tokens=MAX_TOKENS, share=1 - share)
    sft = scale_supervised([make_sample(1, 4, unit="", part="sft")], unit="sft", share=share)
    weights = PolicyGradient(PolicySettings()).weights([*rl, *sft], lambda: pytest.fail("not needed"))
    assert float(torch.cat(weights[:3]).sum()) == pytest.approx(1 - share)
    assert float(weights[3].sum()) == pytest.approx(share)


def test_mix_shares_decay_as_set():
    mix = MixSettings(sft=0.3, decay="to_zero")
    assert mix.shares(1, 11) == (pytest.approx(0.7), pytest.approx(0.3))
    assert mix.shares(6, 11) == (pytest.approx(0.85), pytest.approx(0.15))
    assert mix.shares(11, 11) == (1.0, 0.0)
    assert MixSettings(sft=0.3).shares(11, 11)[1] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="less than 1"):
        MixSettings(sft=1.0)


def test_kl_estimate_is_never_negative():
    now = torch.linspace(-5, 0, 20)
    assert float(kl_to_reference(now, now.flip(0)).min()) >= 0
    assert float(kl_to_reference(now, now).abs().max()) == 0


@pytest.mark.parametrize("most", [None, 2, 3, 5])
def test_micro_batches_never_tear_a_pair_apart(most):
    rows = [
        make_sample(0, 0, unit=str(number), part=part)
        for number in range(5)
        for part in ("chosen", "rejected")
    ]
    portions = join_units(split_units(rows), most=most)
    assert [row for portion in portions for row in portion] == rows
    for portion in portions:
        assert sorted(row.unit for row in portion) == sorted(row.unit for row in portion for _ in "x")
        assert all(sum(other.unit == row.unit for other in portion) == 2 for row in portion)


def test_micro_batches_of_groups_share_one_prompt_each():
    rows = [make_sample(at // 3, at, unit=str(at // 3), part="rl") for at in range(6)]
    assert [len(portion) for portion in join_units(split_units(rows), most=None)] == [3, 3]
    assert [len(portion) for portion in join_units(split_units(rows), most=2)] == [2, 1, 2, 1]


def test_supervised_settings_do_not_name_the_other_objectives():
    """The names of runs and checkpoints of supervised fine-tuning stay what they were."""
    assert not {"objective", "rewards", "policy", "mix"} & set(TrainSettings().what_is_learned())
    assert TrainSettings(objective="dpo").what_is_learned()["preferences"]["beta"] == 0.1
    assert TrainSettings(objective="dpo").learning_rate == 1e-4
    assert TrainSettings(objective="dpo", learning_rate=2e-5).learning_rate == 2e-5
