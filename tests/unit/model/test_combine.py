"""Merged adapters: PEFT's own results are the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.model.adapters.combine import METHODS, LoraPair, combine_pairs, mask_source

PEFT_NAMES = {
    "average": "svd",
    "linear": "linear",
    "ties": "ties",
    "dare": "dare_linear",
    "dare_ties": "dare_ties",
}
RANK, INPUTS, OUTPUTS, ALPHA = 4, 12, 10, 8


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x):
        return self.layer(x)


def make_peft(count):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"])
    torch.manual_seed(3)
    model = get_peft_model(OneLayer(), config, adapter_name="0")
    for number in range(1, count):
        model.add_adapter(str(number), config)
    module = model.base_model.model.layer
    pairs = []
    for number in range(count):
        a, b = module.lora_A[str(number)].weight, module.lora_B[str(number)].weight
        with torch.no_grad():
            b.normal_()
        pairs.append(LoraPair(a.detach().numpy(), b.detach().numpy(), ALPHA / RANK))
    return model, module, pairs


@pytest.mark.parametrize("method", METHODS)
def test_merged_adapters_are_those_of_peft(method, monkeypatch):
    model, module, pairs = make_peft(3)
    weights, density = [0.5, 0.3, 0.2], 0.6
    masks = mask_source(density, 7)
    monkeypatch.setattr(torch, "bernoulli", lambda chances: torch.from_numpy(masks(tuple(chances.shape))))
    model.base_model.add_weighted_adapter(
        ["0", "1", "2"], weights, "merged", combination_type=PEFT_NAMES[method], svd_rank=RANK,
        density=None if method in ("average", "linear") else density,
    )  # fmt: skip
    expected = module.get_delta_weight("merged").detach().numpy()
    found = combine_pairs(
        pairs, weights, method=method, rank=RANK, density=density, draw=mask_source(density, 7)
    )
    assert found.b @ found.a == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_an_average_of_enough_rank_is_the_exact_mean_change(count, rank, seed):
    chance = np.random.default_rng(seed)
    pairs = [
        LoraPair(
            chance.normal(size=(rank, INPUTS)).astype(np.float32),
            chance.normal(size=(OUTPUTS, rank)).astype(np.float32),
            2.0,
        )
        for _ in range(count)
    ]
    weights = [1 / count] * count
    found = combine_pairs(
        pairs, weights, method="average", rank=count * rank, density=1, draw=mask_source(1, 0)
    )
    exact = sum(w * pair.scale * pair.b @ pair.a for w, pair in zip(weights, pairs, strict=True))
    assert found.b @ found.a == pytest.approx(exact, abs=1e-4)
    assert found.kept == pytest.approx(1.0)


def test_dare_keeps_the_expected_change():
    pair = LoraPair(np.ones((RANK, 4000), np.float32), np.ones((OUTPUTS, RANK), np.float32))
    found = combine_pairs([pair], [1.0], method="dare", rank=RANK, density=0.3, draw=mask_source(0.3, 1))
    assert found.a.mean() == pytest.approx(1.0, rel=0.05)
