"""rsLoRA, DoRA and other ranks for some layers: PEFT reads ours, and we read PEFT's, to the same logits."""

import json

import model_families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.model.adapter_shape import AdapterShape, from_peft, to_peft
from graftwork.model.adapters.peft import activate, attach, load_adapter, save_adapter
from graftwork.model.load import load_base
from graftwork.records.errors import UserError

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.arange(3, 40).reshape(1, -1)
METHODS = {
    "rslora": {"use_rslora": True},
    "dora": {"kind": "dora"},
    "dora and rslora": {"kind": "dora", "use_rslora": True},
    "other ranks": {"ranks": {"q_proj": 2, "down_proj": 8}, "alphas": {"q_proj": 3.0}},
    "all of it": {"kind": "dora", "use_rslora": True, "ranks": {"up_proj": 3}, "alphas": {"up_proj": 1.5}},
}


def shape_of(method, *, targets=ALL, layers=(0, 1)):
    return AdapterShape(rank=4, alpha=12, targets=targets, layers=layers, **METHODS[method])


def move(parameters):
    """As if it had been trained: nothing stays at its first value."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("method", METHODS)
def test_peft_gives_the_same_logits(tiny_base, tmp_path, method):
    from peft import PeftModel

    ours = load_base(tiny_base)
    plain = logits(ours)
    parameters = attach(ours, shape_of(method), seed=1)
    assert torch.allclose(logits(ours), plain, atol=1e-5)
    move(parameters)
    save_adapter(ours, tmp_path / "adapter", shape=shape_of(method), base="tiny")
    theirs = PeftModel.from_pretrained(load_base(tiny_base), tmp_path / "adapter")
    assert torch.allclose(logits(ours), logits(theirs), atol=2e-5)
    assert not torch.allclose(logits(ours), plain, atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("named", ["by list", "by pattern"])
def test_pefts_adapters_give_the_same_logits_here(tiny_base, tmp_path, method, named):
    from peft import LoraConfig, get_peft_model

    shape = shape_of(method)
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=list(ALL) if named == "by list" else r".*layers\.1\..*(q_proj|up_proj|down_proj)",
        rank_pattern=dict(shape.ranks),
        alpha_pattern=dict(shape.alphas),
        use_rslora=shape.use_rslora,
        use_dora=shape.kind == "dora",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(5)
    theirs = get_peft_model(load_base(tiny_base), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_base(tiny_base)
    plain = logits(ours)
    loaded = load_adapter(ours, tmp_path / "adapter")
    assert (loaded.kind, loaded.use_rslora) == (shape.kind, shape.use_rslora)
    assert torch.allclose(logits(ours), logits(theirs), atol=2e-5)
    activate(ours, None)
    assert torch.equal(logits(ours), plain)


def test_the_gradients_of_dora_are_pefts(tiny_base, tmp_path):
    from peft import PeftModel

    ours = load_base(tiny_base)
    shape = shape_of("dora", targets=("q_proj", "down_proj"))
    move(attach(ours, shape, seed=1))
    save_adapter(ours, tmp_path / "adapter", shape=shape, base="tiny")
    theirs = PeftModel.from_pretrained(load_base(tiny_base), tmp_path / "adapter", is_trainable=True)
    for model in (ours, theirs):
        model(TOKENS, labels=TOKENS).loss.backward()
    peers = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert len(mine) == len(peers) == 12
    for name, gradient in mine.items():
        path = f"base_model.model.{name}"
        peer = peers.get(path, peers.get(f"{path}.weight"))
        assert torch.allclose(gradient, peer, rtol=1e-3, atol=1e-5 * float(peer.abs().max())), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "qwen2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_agrees_on_families_with_other_layers(tmp_path, family, kind):
    from peft import PeftModel

    names = {
        "gpt2": ("c_attn", "c_proj"),
        "gpt_neox": ("query_key_value", "dense_4h_to_h"),
        "phi3": ("qkv_proj", "gate_up_proj"),
        "qwen2": ("q_proj", "up_proj"),
    }[family]
    shape = AdapterShape(rank=3, alpha=6, targets=names, layers=(1,), kind=kind)
    ours = model_families.make(family)
    move(attach(ours, shape, seed=2))
    save_adapter(ours, tmp_path / "adapter", shape=shape, base=family)
    theirs = PeftModel.from_pretrained(model_families.make(family), tmp_path / "adapter")
    peers = logits(theirs)
    assert (logits(ours) - peers).abs().max() <= 1e-4 * peers.abs().max()
    again = model_families.make(family)
    assert load_adapter(again, tmp_path / "adapter") == shape
    assert torch.equal(logits(again), logits(ours))


def test_a_length_that_was_kept_is_dropped_when_the_adapter_moves(tiny_base):
    model = load_base(tiny_base)
    parameters = attach(model, shape_of("dora"), seed=1)
    first = logits(model)
    move(parameters)
    moved = logits(model)
    with torch.enable_grad():
        fresh = model(TOKENS).logits.detach()
    assert not torch.allclose(first, moved, atol=1e-2)
    assert torch.allclose(moved, fresh, atol=1e-5)


def test_adapters_stay_in_float32_on_a_base_of_less(tiny_base, tmp_path):
    from safetensors.torch import load_file

    model = load_base(tiny_base, dtype="bfloat16")
    parameters = attach(model, shape_of("dora"), seed=1)
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16
    save_adapter(model, tmp_path / "adapter", shape=shape_of("dora"), base="tiny")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_misspelt_name_gets_a_suggestion(tiny_base):
    with pytest.raises(UserError) as caught:
        attach(load_base(tiny_base), AdapterShape(rank=2, alpha=4, targets=("qproj",), layers=(0,)), seed=0)
    assert caught.value.fix == "did you mean 'q_proj'?"


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(tiny_base, tmp_path):
    model = load_base(tiny_base)
    shape = shape_of("rslora", targets=("q_proj", "v_proj"))
    move(attach(model, shape, seed=1))
    save_adapter(model, tmp_path / "adapter", shape=shape, base="tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj"]
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    other = load_base(tiny_base)
    plain = logits(other)
    with pytest.raises(UserError, match="that the base does not have"):
        load_adapter(other, tmp_path / "adapter")
    activate(other, "default")
    assert torch.equal(logits(other), plain)


def test_other_kinds_of_adapters_are_refused():
    with pytest.raises(UserError, match="IA3"):
        from_peft({"peft_type": "IA3"}, layers=2, paths=(), where="here")


@given(
    rank=st.integers(1, 64),
    alpha=st.floats(0.5, 64),
    ranks=st.dictionaries(st.sampled_from(ALL), st.integers(1, 64)),
    alphas=st.dictionaries(st.sampled_from(ALL), st.floats(0.5, 64)),
    use_rslora=st.booleans(),
    kind=st.sampled_from(["lora", "dora"]),
    layers=st.sets(st.integers(0, 9), min_size=1).map(sorted).map(tuple),
)
def test_a_shape_comes_back_from_its_peft_config(rank, alpha, ranks, alphas, use_rslora, kind, layers):
    shape = AdapterShape(
        rank=rank,
        alpha=alpha,
        targets=ALL,
        layers=layers,
        ranks=ranks,
        alphas=alphas,
        use_rslora=use_rslora,
        kind=kind,
    )
    config = json.loads(json.dumps(to_peft(shape, "base")))
    assert from_peft(config, layers=10, paths=(), where="") == shape
