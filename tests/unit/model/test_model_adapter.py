"""Adapters are plain PEFT folders: PEFT loads ours and gives the same logits."""

import json
from pathlib import Path

import pytest
import torch

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import activate, attach, load_adapter, save_adapter
from graftwork.model.load import base_digest, load_base
from graftwork.records.errors import UserError

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.arange(3, 40).reshape(1, -1)


def trained_like(model, shape):
    """An adapter that does something: random B in place of zero."""
    torch.manual_seed(3)
    parameters = attach(model, shape, seed=1)
    with torch.no_grad():
        for parameter in parameters[1::2]:
            parameter.normal_(std=0.05)


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_peft_gives_the_same_logits(tiny_base, tmp_path, layers):
    from peft import PeftModel

    shape = AdapterShape(rank=4, alpha=12, targets=ALL, layers=layers)
    ours = load_base(tiny_base)
    plain = logits(ours)
    trained_like(ours, shape)
    save_adapter(ours, tmp_path / "adapter", shape=shape, base="tiny")
    theirs = PeftModel.from_pretrained(load_base(tiny_base), tmp_path / "adapter")
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5)
    assert not torch.allclose(logits(ours), plain, atol=1e-2)


def test_peft_gives_the_same_logits_on_the_real_model(embedded_base, tmp_path):
    from peft import PeftModel

    folder = Path(embedded_base.folder)
    shape = AdapterShape(rank=8, alpha=16, targets=ALL, layers=tuple(range(15, 30)))
    ours = load_base(folder)
    trained_like(ours, shape)
    save_adapter(ours, tmp_path / "adapter", shape=shape, base="smollm2")
    theirs = PeftModel.from_pretrained(load_base(folder), tmp_path / "adapter")
    mine, peers = logits(ours), logits(theirs)
    assert (mine - peers).abs().max() <= 1e-4 * peers.abs().max()


def test_an_adapter_comes_back_as_it_was_saved(tiny_base, tmp_path):
    shape = AdapterShape(rank=4, alpha=8, targets=("q_proj", "down_proj"), layers=(0, 1))
    first = load_base(tiny_base)
    trained_like(first, shape)
    save_adapter(first, tmp_path / "adapter", shape=shape, base="tiny")
    second = load_base(tiny_base)
    assert load_adapter(second, tmp_path / "adapter") == shape
    assert torch.equal(logits(first), logits(second))


def test_a_fresh_adapter_changes_nothing_and_none_is_the_base(tiny_base):
    model = load_base(tiny_base)
    plain, before = logits(model), base_digest(model)
    attach(model, AdapterShape(rank=4, alpha=8, targets=ALL, layers=(0, 1)), seed=5)
    assert torch.equal(logits(model), plain)
    activate(model, None)
    assert torch.equal(logits(model), plain)
    assert base_digest(model) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.base_layer.weight[0, 0] += 1e-6
    assert base_digest(model) != before


def test_two_adapters_live_side_by_side(tiny_base, tmp_path):
    shape = AdapterShape(rank=4, alpha=8, targets=("q_proj",), layers=(0, 1))
    source = load_base(tiny_base)
    plain = logits(source)
    trained_like(source, shape)
    alone = logits(source)
    save_adapter(source, tmp_path / "adapter", shape=shape, base="tiny")
    model = load_base(tiny_base)
    load_adapter(model, tmp_path / "adapter", name="one")
    attach(model, shape, name="two", seed=9)
    activate(model, "one")
    assert torch.equal(logits(model), alone)
    activate(model, None)
    assert torch.equal(logits(model), plain)


def test_an_adapter_of_another_base_is_refused(tiny_base, tmp_path):
    shape = AdapterShape(rank=4, alpha=8, targets=("q_proj",), layers=(0, 1))
    model = load_base(tiny_base)
    trained_like(model, shape)
    save_adapter(model, tmp_path / "adapter", shape=shape, base="tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "k_proj"]
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no tensor"):
        load_adapter(load_base(tiny_base), tmp_path / "adapter")


def test_unknown_targets_are_refused(tiny_base):
    with pytest.raises(UserError, match="no layer of the model"):
        attach(load_base(tiny_base), AdapterShape(rank=2, alpha=4, targets=("nothing",), layers=(0,)), seed=0)
