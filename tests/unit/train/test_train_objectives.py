"""Objectives: every engine applies the weights that an objective gives to tokens."""

import math

import pytest
import torch
from test_train_gpu import make_model, make_tuning
from train_samples import SHAPE, make_rows

from graftwork.model.adapters.peft import attach
from graftwork.records.plan import ModelShape
from graftwork.train.cpu.step import CpuStep, HiddenStateCache
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.gpu.engine import GpuEngine
from graftwork.train.gpu.load import load_quantized
from graftwork.train.loss import TokenBatch, loss_and_gradient, token_losses, weighted_loss
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.policy import PolicyGradient
from graftwork.train.objectives.samples import SupervisedFineTuning, count_trained, make_sample
from graftwork.train.settings import PolicySettings, TrainSettings

SETTINGS = TrainSettings(rank=4, alpha=8, batch_size=4, max_grad_norm=1e9)
MODEL_SHAPE = ModelShape(
    name="tiny",
    hidden_size=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=192,
    vocab_size=512,
    tied_embeddings=False,
    max_positions=128,
)


class Stand:
    def measure(self, rows, log_probabilities):
        return {"likelihood": torch.cat([values.exp() for values in log_probabilities])}


class Uneven(Stand):
    """Every second token counts, more in later rows; divided by the number of rows."""

    name = "uneven"

    def normalizer(self, rows):
        return len(rows)

    def weights(self, rows, log_probabilities):
        return [
            torch.tensor([(int(row.id) + 1.0) * (at % 2) for at in range(len(row.tokens) - row.trained_from)])
            for row in rows
        ]


class Likely(Stand):
    """A weight that depends on what the model says now."""

    name = "likely"

    def normalizer(self, rows):
        return 1.0

    def weights(self, rows, log_probabilities):
        return [values.exp() for values in log_probabilities()]


def make_engine(kind, objective):
    model = make_model()
    if kind == "gpu":
        frozen = load_quantized(model, make_tuning(), device="cpu")
    parameters = attach(model, SHAPE, seed=3)
    for at, parameter in enumerate(parameters):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(at))
    if kind == "gpu":
        engine = GpuEngine(
            model, parameters, settings=SETTINGS, frozen=frozen, tuning=make_tuning(), shape=MODEL_SHAPE
        )
        engine._objective = objective
        engine.settle(make_rows(4))
        return engine
    logits = None
    if kind == "cpu":
        logits = CpuStep(model, 0, make_rows(4), states=HiddenStateCache(), packed=False).logits
    step = StepOptions(logits=logits, objective=objective, micro_rows=3 if kind == "micro" else None)
    return TrainingEngine(model, parameters, settings=SETTINGS, step=step)


def gradient_by_hand(objective):
    """The weighted loss by the model's own logits."""
    engine = make_engine("eager", objective)
    rows, total = make_rows(4), torch.zeros(())
    weights = objective.weights(rows, lambda: engine.log_probabilities(rows))
    for row, weight in zip(rows, weights, strict=True):
        logits = engine.model(input_ids=torch.tensor([row.tokens])).logits[0, row.trained_from - 1 : -1]
        log_p = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens[row.trained_from :])[:, None])[:, 0]
        total = total - (weight * log_p).sum() / objective.normalizer(rows)
    total.backward()
    return float(total.detach()), [parameter.grad for parameter in engine.parameters]


@pytest.mark.parametrize("kind", ["eager", "micro", "cpu", "gpu"])
@pytest.mark.parametrize("objective", [Uneven(), Likely()])
def test_every_engine_applies_the_weights_of_the_objective(kind, objective):
    engine = make_engine(kind, objective)
    result = engine.backward(make_rows(4))
    loss, gradients = gradient_by_hand(objective)
    assert result.loss == pytest.approx(loss, rel=1e-4)
    assert result.trained_tokens == count_trained(make_rows(4))
    for ours, theirs in zip(engine.parameters, gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["eager", "micro", "cpu", "gpu"])
def test_the_weight_of_a_row_multiplies_its_loss(kind):
    weights = (3.0, 1.0, 0.5, 2.0)
    rows = [row.model_copy(update={"weight": w}) for row, w in zip(make_rows(4), weights, strict=True)]
    # One step an epoch: over two epochs each row counts twice its weight.
    order = EpochOrder(rows, settings=SETTINGS.model_copy(update={"epochs": 2, "batch_size": 99}))
    assert order.steps == 2
    engine, summed, gradient = make_engine(kind, SupervisedFineTuning()), 0.0, 0.0
    for step in (1, 2):
        batch = order.batch(step)
        summed += engine.backward(batch).loss * count_trained(batch)
        gradient = gradient + engine.parameters[0].grad * count_trained(batch)
        for parameter in engine.parameters:
            parameter.grad = None
    expected, expected_gradient = 0.0, 0.0
    for row, weight in zip(rows, weights, strict=True):
        expected += 2 * weight * engine.backward([row]).loss * count_trained([row])
        expected_gradient = expected_gradient + 2 * weight * engine.parameters[0].grad * count_trained([row])
        for parameter in engine.parameters:
            parameter.grad = None
    assert summed == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


def test_log_probabilities_on_a_card_come_from_packed_passes_in_chunks(monkeypatch):
    rows = make_rows(5)
    card, plain = make_engine("gpu", Likely()), make_engine("eager", Likely())
    monkeypatch.setattr(card, "_logits", lambda _batch: pytest.fail("the whole logits are never built"))
    for ours, theirs in zip(card.log_probabilities(rows), plain.log_probabilities(rows), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_who_only_reads_sees_each_update(kind):
    """Rollouts, references, evaluations: lengths of DoRA that were kept for reading belong to old weights."""
    model = make_model()
    parameters = attach(model, SHAPE.model_copy(update={"kind": kind}), seed=3)
    engine = TrainingEngine(model, parameters, settings=SETTINGS)
    rows = make_rows(4)
    for _ in range(3):
        read = engine.log_probabilities(rows)
        with torch.enable_grad():
            fresh = engine._logits(batch := TokenBatch(rows, device="cpu"))
        expected = batch.by_row(-token_losses(fresh.detach(), batch.targets))
        for ours, theirs in zip(read, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        engine.backward(rows)
        engine.apply(0.05)


@pytest.mark.parametrize("kind", ["eager", "gpu"])
def test_kl_to_the_start_is_measured_without_being_in_the_loss(kind):
    objective = PolicyGradient(PolicySettings(kl=0.0))
    engine = make_engine(kind, objective)
    rows = [make_sample(row, unit="0", part="rl", advantage=1.0, scale=0.1) for row in make_rows(4)]
    start = tuple((engine.log_probabilities(rows[:1])[0] - 0.5).tolist())
    rows[0] = rows[0].model_copy(update={"reference": start})
    result = engine.backward(rows)
    assert result.measures["kl"] == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-3)


def test_weights_of_one_give_the_loss_without_weights():
    logits, targets = torch.randn(5, 11, requires_grad=True), torch.tensor([1, 2, 3, 4, 5])
    plain, weighted = weighted_loss(logits, targets, None), weighted_loss(logits, targets, torch.ones(5))
    torch.testing.assert_close(plain, weighted)
    written_out, gradient = loss_and_gradient(logits.detach(), targets, None)
    torch.testing.assert_close(written_out, plain.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, logits)[0])


def test_sft_weighs_every_reply_token_alike():
    rows = make_rows(3)
    assert SupervisedFineTuning().weights(rows, lambda: pytest.fail("no forward pass is needed")) is None
    assert SupervisedFineTuning().normalizer(rows) == sum(len(row.tokens) - row.trained_from for row in rows)


def test_epoch_order_gives_a_resumed_run_the_same_batches():
    rows = make_rows(10)
    first, again = (EpochOrder(rows, settings=SETTINGS) for _ in range(2))
    steps = range(1, first.steps + 1)
    assert [first.batch(step) for step in steps] == [again.batch(step) for step in steps]
    assert first.identity() == again.identity() != EpochOrder(rows[:-1], settings=SETTINGS).identity()
    assert first.rows_before(first.steps) == len(rows) * SETTINGS.epochs


def test_the_largest_ratio_of_cispo_lets_unchanged_tokens_pass():
    assert PolicySettings(loss="cispo").upper_clip == 5.0
    with pytest.raises(ValueError, match="largest ratio"):
        PolicySettings(loss="cispo", epsilon_high=0.2)
