"""The proximal term: its gradient, what it leaves alone, and that a resumed run has the same start."""

import pytest
import torch
from torch import nn

from graftwork.train.engine import ProximalTerm
from graftwork.train.settings import TrainSettings


def test_the_gradient_is_that_of_half_the_squared_distance():
    weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    term = ProximalTerm(weights, 0.3)
    start = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))
    written_out = 0.15 * sum(((w - s) ** 2).sum() for w, s in zip(weights, start, strict=True))
    expected = torch.autograd.grad(written_out, weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    value = term.add_gradients()
    assert value == pytest.approx(float(written_out.detach()), rel=1e-5)
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, 1 + gradient, atol=1e-6)


def test_at_the_start_the_term_adds_nothing():
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.ones(4)
    assert ProximalTerm([weight], 5.0).add_gradients() == 0
    assert torch.equal(weight.grad, torch.ones(4))


@pytest.mark.parametrize("other", [{"method": "full"}, {"objective": "dpo"}, {"strategy": "ddp"}])
def test_the_term_is_refused_where_no_engine_adds_it(other):
    with pytest.raises(ValueError, match="proximal"):
        TrainSettings(proximal=0.1, **other)
