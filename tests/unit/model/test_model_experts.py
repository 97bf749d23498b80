"""Adapters of mixture-of-experts models: PEFT's own form, the same logits there and here."""

from functools import partial

import pytest
import torch
import transformers as t
from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.lora import LoraExperts, expert_modules, weights_of_adapter
from graftwork.model.adapters.merge import merge_into
from graftwork.model.adapters.peft import acting, activate, attach, load_adapter, save_adapter
from graftwork.model.generate.generator import open_decoder
from graftwork.model.generate.sampling import GenerationRequest, Sampling
from graftwork.model.load import base_digest
from graftwork.model.parts import block_linears
from graftwork.model.shape import (
    active_parameters,
    adapter_parameters,
    read_shape,
    shape_of,
    total_parameters,
)
from graftwork.records.errors import UserError
from graftwork.train.engine import TrainingEngine
from graftwork.train.settings import TrainSettings

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3_moe": partial(
        t.Qwen3MoeConfig, **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=4, norm_topk_prob=True
    ),
    "granitemoe": partial(t.GraniteMoeConfig, **SIZES, num_local_experts=4, logits_scaling=2.0),
    "olmoe": partial(t.OlmoeConfig, **SIZES, num_experts=4),
    "mixtral": partial(t.MixtralConfig, **SIZES, num_local_experts=4),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make(family, **changes):
    torch.manual_seed(4)
    model = t.AutoModelForCausalLM.from_config(FAMILIES[family](**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval().requires_grad_(False)


def shape_with_experts(layers=(0, 1), *, experts=True):
    return AdapterShape(rank=2, alpha=4, targets=ATTENTION, layers=layers, experts=experts)


def adapt(model, shape):
    parameters = attach(model, shape, seed=1)
    with torch.no_grad():
        for at, parameter in enumerate(parameters):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(at))
    return parameters


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_experts_has_the_same_logits_and_gradients_in_peft(family, layers, tmp_path):
    peft = pytest.importorskip("peft")
    model, shape = make(family), shape_with_experts(layers)
    base = model(TOKENS).logits
    parameters = adapt(model, shape)
    own = model(TOKENS, labels=TOKENS)
    own.loss.backward()
    assert not torch.allclose(own.logits, base, atol=1e-3)
    save_adapter(model, tmp_path / "adapter", shape=shape, base="base")
    theirs = peft.PeftModel.from_pretrained(make(family), tmp_path / "adapter", is_trainable=True)
    found = theirs(TOKENS, labels=TOKENS)
    assert torch.allclose(found.logits, own.logits, atol=1e-5)
    found.loss.backward()
    learned = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in learned.values()) == sum(p.numel() for p in parameters)
    norms = sorted(float(p.grad.norm()) for p in learned.values())
    assert norms == pytest.approx(sorted(float(p.grad.norm()) for p in parameters), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_an_adapter_that_peft_wrote_acts_here_and_lets_the_base_be(family, tmp_path):
    peft = pytest.importorskip("peft")
    model = make(family)
    names = [
        name.partition("layers.0.")[2]
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and "layers.0." in name
    ]
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=names, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(make(family), config)
    with torch.no_grad():
        for at, parameter in enumerate(p for p in theirs.parameters() if p.requires_grad):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(at))
    theirs.save_pretrained(tmp_path / "adapter")
    base = model(TOKENS).logits
    assert load_adapter(model, tmp_path / "adapter", name="one").experts
    with acting(model, "one"):
        assert torch.allclose(model(TOKENS).logits, theirs(TOKENS).logits, atol=1e-5)
    assert torch.equal(model(TOKENS).logits, base)
    # Rows with such an adapter never share a pass with others.
    assert weights_of_adapter(model, "one") == "one"
    assert weights_of_adapter(model, None) is None
    with pytest.raises(UserError, match="experts cannot be merged"):
        merge_into(tmp_path, tmp_path / "adapter", tmp_path)


def test_without_the_setting_only_attention_is_adapted():
    model = make("qwen3_moe")
    attach(model, shape_with_experts(experts=False), seed=1)
    assert not any(isinstance(module, LoraExperts) for module in model.modules())
    assert {path.rsplit(".", 1)[-1] for _, path, _ in block_linears(model)} == set(ATTENTION)


def test_a_dense_model_has_no_experts_to_adapt():
    dense = t.AutoModelForCausalLM.from_config(
        t.LlamaConfig(**{k: v for k, v in SIZES.items() if "exp" not in k})
    )
    with pytest.raises(UserError, match="no experts"):
        attach(dense, shape_with_experts(), seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_from_the_config_and_from_the_files(family, tmp_path):
    model = make(family)
    count = sum(parameter.numel() for parameter in model.parameters())
    stated = shape_of(model.config.to_dict(), name=family)
    assert total_parameters(stated) == count
    model.save_pretrained(tmp_path)
    read = read_shape(tmp_path)
    assert total_parameters(read) == count
    assert set(read.linears or stated.linears) == set(ATTENTION)
    stacks = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    # Two of four experts see a token.
    for shape in (stated, read):
        assert active_parameters(shape) == count - stacks // 2
        experts = adapter_parameters(shape, rank=2, targets=ATTENTION, layers=2, experts=True)
        assert experts == sum(p.numel() for p in attach(make(family), shape_with_experts(), seed=1))


@pytest.mark.parametrize("slots", [1, 3])
def test_the_embedded_engine_answers_with_adapters_of_experts_next_to_others(slots):
    model = make("qwen3_moe")
    for name, experts in (("wide", True), ("narrow", False)):
        parameters = attach(model, shape_with_experts(experts=experts), name=name, seed=len(name))
        with torch.no_grad():
            for at, parameter in enumerate(parameters):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(at))
    activate(model, None)
    names, prompt = ("wide", None, "narrow", "wide"), [5, 9, 40, 7]
    expected = []
    for name in names:
        with acting(model, name):
            found = model.generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
            )
        expected.append(found[0, len(prompt) :].tolist())
    assert expected[0] != expected[1]
    decoder = open_decoder(model, stop_tokens=[], slots=slots)
    requests = [GenerationRequest(prompt, Sampling(6), adapter=name) for name in names]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    assert [request.result.tokens for request in requests] == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "olmoe"])
def test_the_plain_step_trains_experts_and_leaves_the_base_as_it_was(family):
    model = make(family)
    before = base_digest(model)
    parameters = attach(model, shape_with_experts(), seed=1)
    engine = TrainingEngine(model, parameters, settings=TrainSettings(experts=True))
    row = make_row("1", range(3, 23), 4)
    losses = []
    for _ in range(4):
        losses.append(engine.backward([row]).loss)
        engine.apply(1e-2)
    assert losses[-1] < losses[0]
    assert all(float(parameter.detach().abs().sum()) > 0 for parameter in parameters)
    assert base_digest(model) == before


@pytest.mark.parametrize("method", ["dora", "full"])
def test_experts_are_adapted_by_lora_alone(method):
    with pytest.raises(ValueError, match="experts are adapted by lora"):
        TrainSettings(experts=True, method=method)


def test_expert_layers_are_found_once_wrapped_or_not():
    model = make("olmoe")
    before = [path for _, path, _ in expert_modules(model)]
    attach(model, shape_with_experts(), seed=1)
    assert [path for _, path, _ in expert_modules(model)] == before
    assert len(before) == 2
