"""The processor's own step finds the loss and the gradient of the plain one, for every known family."""

import pytest
import torch
from cpu_rows import make_rows
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.blocks import has_onednn_products
from graftwork.model.shape import shape_of
from graftwork.train.cpu.step import (
    CpuStep,
    HiddenStateCache,
    first_trained_block,
    layout_tokens,
    make_cpu_step,
)
from graftwork.train.loss import TokenBatch, summed_loss, weighted_loss
from graftwork.train.settings import TrainSettings

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=64),
}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(config, *, layers=(2, 3), targets=EVERY, kind="lora"):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.requires_grad_(False)
    shape = AdapterShape(rank=3, alpha=6, targets=targets, layers=layers, kind=kind)
    parameters = attach(model, shape, seed=1)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, parameters


def gradients(loss, parameters):
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in parameters]


def assert_same(model, parameters, rows, *, packed=True):
    batch = TokenBatch(rows, device="cpu")
    way = CpuStep(model, first_trained_block(model), rows, states=HiddenStateCache(), packed=packed)
    ours = gradients(weighted_loss(way.logits(batch), batch.targets, None), parameters)
    theirs = gradients(summed_loss(model, batch), parameters)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6 * max(float(other.abs().max()), 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [0, 12])
def test_each_known_family_gets_the_loss_and_the_gradient_of_the_plain_way(family, shared):
    model, parameters = make_model(FAMILIES[family])
    assert_same(model, parameters, make_rows(shared=shared))


@pytest.mark.parametrize(
    "choice",
    [
        {"layers": (0, 1, 2, 3)},
        {"layers": (3,)},
        {"layers": (1, 3)},
        {"targets": ("q_proj", "down_proj")},
        {"targets": ("v_proj",), "layers": (2,)},
        {"kind": "dora"},
    ],
    ids=str,
)
def test_whatever_is_adapted_the_gradient_is_the_same(choice):
    model, parameters = make_model(FAMILIES["llama"], **choice)
    assert_same(model, parameters, make_rows(shared=12))


def test_without_packed_weights_the_gradient_is_the_same():
    model, parameters = make_model(FAMILIES["qwen3"])
    assert_same(model, parameters, make_rows(shared=12), packed=False)


def test_one_row_alone_and_a_reply_of_one_token_are_read_too():
    model, parameters = make_model(FAMILIES["llama"])
    row = make_rows(1)[0]
    short = row.model_copy(update={"tokens": row.tokens[: row.trained_from + 1]})
    assert_same(model, parameters, [short])


def test_weights_are_packed_on_this_machine():
    assert has_onednn_products()


def test_nothing_is_kept_for_a_gradient_below_the_first_adapted_block():
    model, _ = make_model(FAMILIES["llama"])
    rows = make_rows(shared=12)
    way = CpuStep(model, 2, rows, states=HiddenStateCache(), packed=True)
    entering = way._enter(rows, layout_tokens(rows))
    assert not entering.requires_grad
    assert entering.grad_fn is None


def test_the_last_token_of_a_row_is_not_read():
    rows = make_rows(shared=12)
    layout = layout_tokens(rows)
    assert layout.shared == 12
    assert layout.shared + sum(layout.rests) == 12 + sum(len(row.tokens) - 13 for row in rows)


def test_the_choice_says_where_the_trunk_is_kept_and_why(tmp_path):
    model, _ = make_model(FAMILIES["llama"])
    rows = make_rows(shared=12)
    settings = TrainSettings(epochs=3, batch_size=2)
    shape = shape_of(model.config.to_dict(), name="small")
    _, word = make_cpu_step(model, rows, settings=settings, shape=shape, folder=tmp_path)
    assert "in memory" in word
    once = TrainSettings(epochs=1)
    _, word = make_cpu_step(model, rows, settings=once, shape=shape, folder=tmp_path)
    assert "not cached: no row is seen twice" in word
