"""Each family's blocks, written out for GPU and CPU, give the loss and the gradients of transformers."""

import random

import family_samples
import pytest
import torch
from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.families import all_families, why_not_written_out
from graftwork.model.parts import block_linears
from graftwork.model.shape import shape_of, total_parameters
from graftwork.records.plan import Tuning
from graftwork.train.cpu.step import CpuStep, HiddenStateCache
from graftwork.train.gpu.engine import GpuEngine
from graftwork.train.gpu.load import load_quantized
from graftwork.train.loss import TokenBatch, weighted_loss
from graftwork.train.settings import TrainSettings

SETTINGS = TrainSettings(rank=4, alpha=8, max_grad_norm=1e9)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_rows(lengths=(30, 11, 19), *, beginning=7):
    chance = random.Random(3)
    begun = [chance.randrange(3, 512) for _ in range(beginning)]
    return [
        make_row(
            str(at),
            (*begun, *(chance.randrange(3, 512) for _ in range(length - beginning))),
            max(beginning + 1, length // 2),
        )
        for at, length in enumerate(lengths)
    ]


def adapted(model, layers):
    names = tuple(sorted({path.rsplit(".", 1)[-1] for _, path, _ in block_linears(model)}))
    parameters = attach(model, AdapterShape(rank=4, alpha=8, targets=names, layers=layers), seed=3)
    with torch.no_grad():
        for at, parameter in enumerate(parameters):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(at))
    return parameters


def of_transformers(family, rows, layers):
    """The mean loss of a trained token and its gradient, by the model's own forward pass, row by row."""
    model = family_samples.make(family)
    parameters = adapted(model, layers)
    trained = sum(len(row.tokens) - row.trained_from for row in rows)
    total = torch.zeros(())
    for row in rows:
        labels = torch.tensor([row.tokens])
        labels[0, : row.trained_from] = -100
        own = model(input_ids=torch.tensor([row.tokens]), labels=labels, use_cache=False).loss
        total = total + own * (len(row.tokens) - row.trained_from)
    (total / trained).backward()
    return float(total.detach()) / trained, [parameter.grad for parameter in parameters]


def by_the_gpu_step(family, rows, layers, *, keep, lean):
    tuning = Tuning(
        form="whole",
        head="whole",
        micro_tokens=48,
        longest=32,
        keep=keep,
        lean=lean,
        chunk_tokens=24,
        head_tokens=16,
        turned=False,
        host_embedding=family.startswith("gemma"),
        limit_gib=1.0,
        peak_gib=0.0,
        seconds_per_token=0.0,
    )
    model = family_samples.make(family)
    frozen = load_quantized(model, tuning, device="cpu")
    parameters = adapted(model, layers)
    shape = shape_of(model.config.to_dict(), name=family)
    engine = GpuEngine(model, parameters, settings=SETTINGS, frozen=frozen, tuning=tuning, shape=shape)
    engine.settle(())
    return engine.backward(rows).loss, [parameter.grad for parameter in parameters]


def by_the_cpu_step(family, rows, layers):
    model = family_samples.make(family)
    parameters = adapted(model, layers)
    assert why_not_written_out(model.config.to_dict()) is None
    batch = TokenBatch(rows, device="cpu")
    step = CpuStep(model, min(layers), rows, states=HiddenStateCache(), packed=True)
    loss = weighted_loss(step.logits(batch), batch.targets, None) / batch.trained
    loss.backward()
    return float(loss.detach()), [parameter.grad for parameter in parameters]


def assert_equal(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for mine, own in zip(ours[1], theirs[1], strict=True):
        assert float((mine - own).norm() / own.norm().clamp(min=1e-12)) < 1e-5


@pytest.mark.parametrize("family", family_samples.ALL)
def test_loss_and_gradients_of_a_family_are_those_of_transformers(family):
    rows, layers = make_rows(), (1, 2, 3)
    theirs = of_transformers(family, rows, layers)
    assert_equal(by_the_gpu_step(family, rows, layers, keep=1, lean=1), theirs)
    assert_equal(by_the_cpu_step(family, rows, layers), theirs)


def test_every_written_out_family_is_compared():
    written = {name for name, family in all_families().items() if family.block is not None}
    assert written == set(family_samples.ALL)
    for family in family_samples.ALL:
        assert why_not_written_out(family_samples.FAMILIES[family]().to_dict()) is None


@pytest.mark.parametrize("family", family_samples.ALL)
def test_a_config_states_the_parameters_that_its_family_has(family):
    model = family_samples.make(family)
    shape = shape_of(model.config.to_dict(), name=family)
    assert total_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
