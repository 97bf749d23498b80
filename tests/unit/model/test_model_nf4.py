"""Four bits: as near as the paper's, forgotten after each use, and never changed by training."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import base_digest, load_base, quantize_blocks
from graftwork.model.nf4 import (
    BLOCK,
    CHUNK,
    LEVELS,
    Nf4Linear,
    dequantize,
    quantize,
    quantize_linear,
    scales_of,
)
from graftwork.records.errors import UserError


def normal(outputs, inputs, seed=0):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(weight, again):
    return float((again - weight).square().mean().sqrt() / weight.square().mean().sqrt())


def test_the_layout_is_the_one_that_kernels_read():
    weight = normal(8, 128)
    held = quantize(weight)
    assert held.codes.dtype == torch.uint8
    assert held.codes.shape == (8, 64)
    assert held.scale_codes.dtype == torch.int8
    assert held.scale_codes.shape == (8, 2)
    assert held.chunk_scales.shape == (1,)
    assert held.offset.shape == ()
    levels, scales = torch.tensor(LEVELS), scales_of(held)
    for row, column in ((0, 0), (0, 1), (3, 77), (7, 127)):
        byte = int(held.codes[row, column // 2])
        code = byte & 15 if column % 2 else byte >> 4
        expected = levels[code] * scales[row, column // BLOCK]
        assert dequantize(held, torch.float32)[row, column] == expected


def test_scales_of_more_than_one_chunk_come_back():
    weight = normal(40, 64 * 10) * torch.linspace(0.1, 5, 40)[:, None]
    held = quantize(weight)
    largest = weight.reshape(40, 10, BLOCK).abs().amax(dim=-1)
    assert held.chunk_scales.shape == (-(-400 // CHUNK),)
    assert (scales_of(held) - largest).abs().max() <= held.chunk_scales.max() / 2 * 1.001


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 1000), size=st.floats(1e-6, 1e3))
def test_no_element_is_further_off_than_half_a_step(rows, blocks, seed, size):
    weight = normal(rows, blocks * BLOCK, seed) * size
    held = quantize(weight)
    scales = scales_of(held).repeat_interleave(BLOCK, dim=1)
    true = weight.reshape(rows, blocks, BLOCK).abs().amax(dim=-1).repeat_interleave(BLOCK, dim=1)
    widest = max(b - a for a, b in pairwise(LEVELS)) / 2
    bound = widest * true + (scales - true).abs() + 1e-6 * true
    assert bool(((dequantize(held, torch.float32) - weight).abs() <= bound).all())


def test_zeros_stay_zeros():
    weight = normal(4, 128)
    weight[1] = 0
    assert not dequantize(quantize(weight), torch.float32)[1].any()


def test_the_error_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(256, 512)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    theirs = error(weight, functional.dequantize_4bit(codes, state))
    assert error(weight, dequantize(quantize(weight), torch.float32)) <= theirs * 1.01


def test_the_error_is_that_of_the_nearest_level_with_whole_scales():
    weight = normal(64, 512)
    blocks = weight.reshape(64, 8, BLOCK, 1)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    levels = torch.tensor(LEVELS) * largest
    nearest = levels.expand(64, 8, BLOCK, 16).gather(3, (blocks - levels).abs().argmin(dim=3, keepdim=True))
    ours = error(weight, dequantize(quantize(weight), torch.float32))
    # Eight bits for the scales cost next to nothing.
    assert ours == pytest.approx(error(weight, nearest.reshape(64, 512)), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_gives_the_product_and_the_gradient_of_its_dequantised_weight(dtype):
    layer = nn.Linear(128, 24)
    small = quantize_linear(layer)
    whole = nn.Linear(128, 24).to(dtype)
    with torch.no_grad():
        whole.weight.copy_(dequantize(small.quantized, dtype))
        whole.bias.copy_(layer.bias)
    x, y = (torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    x.requires_grad_(True)
    y.requires_grad_(True)
    assert torch.allclose(small(x), whole(y), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    small(x).square().sum().backward()
    whole(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=2e-2, atol=2e-2 * float(y.grad.abs().max()))


def test_the_dequantised_weight_is_not_kept_for_the_backward_pass():
    layer = quantize_linear(nn.Linear(512, 512, bias=False))
    kept: list[int] = []

    def count(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        layer(torch.randn(1, 512, requires_grad=True))
    assert 0 < sum(kept) < 512 * 512


def test_a_base_in_four_bits_is_a_fraction_of_it_and_learns(tiny_base):
    whole, model = load_base(tiny_base), load_base(tiny_base, four_bits=True)
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, Nf4Linear)
    held = sum(b.numel() * b.element_size() for b in layer.buffers())
    assert held < 0.14 * whole.model.layers[0].mlp.up_proj.weight.numel() * 4
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain, small = whole(tokens).logits, model(tokens).logits
    assert 0.01 < error(plain, small) < 0.3
    before = base_digest(model)
    shape = AdapterShape(rank=4, alpha=8, targets=("up_proj", "q_proj"), layers=(0, 1))
    optimizer = torch.optim.AdamW(attach(model, shape, seed=1), lr=5e-2)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert base_digest(model) == before
    model.model.layers[1].mlp.down_proj.codes[0, 0] ^= 1
    assert base_digest(model) != before


def test_a_weight_is_let_go_before_the_next_is_quantised(tiny_base, monkeypatch):
    import weakref

    from graftwork.model import nf4

    model, seen, alive = load_base(tiny_base), [], []
    quantise_one = nf4.quantize_linear

    def watch(layer, **where):
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(layer.weight))
        return quantise_one(layer, **where)

    monkeypatch.setattr(nf4, "quantize_linear", watch)
    assert quantize_blocks(model, device="cpu") == len(alive) == 14
    assert max(alive) <= 1


def test_a_layer_without_whole_blocks_stays_as_it_is():
    import transformers as t

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    model = t.LlamaForCausalLM(t.LlamaConfig(hidden_size=48, intermediate_size=128, **sizes))
    assert quantize_blocks(model, device="cpu") == 1
    assert isinstance(model.model.layers[0].mlp.down_proj, Nf4Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    with pytest.raises(ValueError, match="whole blocks"):
        quantize(torch.zeros(4, 48))


def test_a_base_that_has_nothing_to_quantise_is_refused():
    import model_families

    with pytest.raises(UserError, match="4 bits"):
        quantize_blocks(model_families.make("gpt2"), device="cpu")
