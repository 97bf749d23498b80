"""The parts of any decoder are found, and the loss over reply tokens is the one transformers computes."""

import random

import model_families
import pytest
import torch
from sample_rows import make_row
from torch import nn

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.families import family_or_llama
from graftwork.model.parts import block_linears, decoder_parts, head_is_followed, layer_sizes, logits_reader
from graftwork.records.errors import UserError
from graftwork.train.loss import TokenBatch, summed_loss

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = {
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}


def make_rows(*, beginning, count=3):
    chance = random.Random(2)
    begun = [chance.randrange(3, 300) for _ in range(beginning)]
    rows = []
    for number in range(count):
        prompt = [*begun, *(chance.randrange(3, 300) for _ in range(3 + 2 * number))]
        reply = [chance.randrange(3, 300) for _ in range(4 + number)]
        rows.append(make_row(str(number), (*prompt, *reply), len(prompt)))
    return rows


def own_loss(model, rows):
    """transformers' own loss, row by row: labels everywhere but on the prompt."""
    total = 0.0
    for row in rows:
        tokens = torch.tensor([row.tokens])
        labels = tokens.clone()
        labels[0, : row.trained_from] = -100
        trained = len(row.tokens) - row.trained_from
        total = total + model(input_ids=tokens, labels=labels).loss * trained
    return total


@pytest.mark.parametrize("beginning", [0, 12])
@pytest.mark.parametrize("family", model_families.ALL)
def test_the_loss_is_that_of_transformers(family, beginning):
    torch.set_num_threads(1)
    model = model_families.make(family)
    rows = make_rows(beginning=beginning)
    ours, theirs = summed_loss(model, TokenBatch(rows, device="cpu")), own_loss(model, rows)
    assert float(ours) == pytest.approx(float(theirs), rel=2e-5)


@pytest.mark.parametrize("family", model_families.ALL)
def test_the_gradient_is_that_of_transformers(family):
    model = model_families.make(family)
    names = NAMES.get(family, LLAMA)
    parameters = attach(model, AdapterShape(rank=2, alpha=4, targets=names, layers=(0, 1)), seed=1)
    with torch.no_grad():
        for parameter in parameters[1::2]:
            parameter.normal_(std=0.05)
    rows = make_rows(beginning=12)
    summed_loss(model, TokenBatch(rows, device="cpu")).backward()
    ours = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    own_loss(model, rows).backward()
    for mine, parameter in zip(ours, parameters, strict=True):
        assert torch.allclose(mine, parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))


@pytest.mark.parametrize("family", model_families.ALL)
def test_the_stated_ending_of_a_family_is_true(family):
    assert head_is_followed(model_families.make(family))


def test_families_that_are_called_plain_have_no_ending():
    for family in (name for name in model_families.ALL if family_or_llama(name).plain_logits):
        model = model_families.make(family)
        tokens = torch.arange(3, 9)[None]
        hidden = model.base_model(input_ids=tokens).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(hidden), model(input_ids=tokens).logits)


def test_an_unknown_ending_is_noticed_and_the_model_reads_itself():
    model = model_families.make("gemma2")
    rows = make_rows(beginning=12)
    right = float(own_loss(model, rows))
    # The same model, with a cap that goes by a name that nobody knows.
    model.config.model_type = "stranger"
    forward = type(model).forward

    def capped(self, **arguments):
        output = forward(self, **arguments)
        output.logits = torch.tanh(output.logits / 0.5) * 0.5
        return output

    model.config.final_logit_softcapping = None
    model.forward = capped.__get__(model)
    assert not head_is_followed(model)
    assert logits_reader(model).decoder is not model.base_model
    assert float(summed_loss(model, TokenBatch(rows, device="cpu"))) == pytest.approx(right, rel=2e-5)


@pytest.mark.parametrize("family", model_families.ALL)
def test_linear_layers_are_found_whatever_their_names(family):
    model = model_families.make(family)
    found = list(block_linears(model))
    assert {path.rsplit(".", 1)[-1] for _, path, _ in found} == set(NAMES.get(family, LLAMA))
    assert {block for block, _, _ in found} == {0, 1}
    assert all(model.get_submodule(path) is layer for _, path, layer in found)
    weights = sum(inputs * outputs for _, _, layer in found for inputs, outputs in [layer_sizes(layer)])
    matrices = sum(p.numel() for p in decoder_parts(model).blocks.parameters() if p.dim() == 2)
    assert weights == matrices


def test_routers_get_no_adapter():
    import transformers as t

    config = t.MixtralConfig(**model_families.SIZES, num_local_experts=4)
    model = t.AutoModelForCausalLM.from_config(config)
    names = {path.rsplit(".", 1)[-1] for _, path, _ in block_linears(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_model_without_a_decoder_is_refused():
    import transformers as t

    config = t.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UserError, match="not a causal decoder"):
        decoder_parts(t.BertModel(config))
    with pytest.raises(UserError, match="not a causal decoder"):
        decoder_parts(nn.Linear(2, 2))
