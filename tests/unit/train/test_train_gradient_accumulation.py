"""Fewer rows at a time give the same gradient, and everything inside a step is reported."""

import pytest
import torch
from train_rows import SETTINGS, SHAPE, make_rows

from graftwork.model.adapters.peft import attach
from graftwork.model.load import load_base
from graftwork.train.engine import StepOptions, TrainingEngine


def make_engine(tiny_base, **more):
    torch.set_num_threads(1)
    model = load_base(tiny_base)
    parameters = attach(model, SHAPE, seed=3)
    with torch.no_grad():
        # Fresh adapters do nothing, and half of their gradient is zero: give them something to do.
        for parameter in parameters:
            parameter.add_(torch.full_like(parameter, 0.01))
    return TrainingEngine(model, parameters, settings=SETTINGS, **more)


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 5, 100])
def test_fewer_rows_at_a_time_give_the_same_gradient(tiny_base, micro_rows):
    rows = make_rows(5)
    whole, split = make_engine(tiny_base), make_engine(tiny_base, step=StepOptions(micro_rows=micro_rows))
    expected, found = whole.backward(rows), split.backward(rows)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert (found.tokens, found.trained_tokens) == (expected.tokens, expected.trained_tokens)
    for one, other in zip(whole.parameters, split.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_step_says_what_it_does_at_every_micro_batch(tiny_base):
    reported = []
    make_engine(tiny_base, step=StepOptions(micro_rows=2), progress=reported.append).backward(make_rows(5))
    assert reported == ["data", "forward", "backward"] * 3 + ["update"]
