"""Weights learned as a whole are a folder like any model's, and act like an adapter next to the base."""

import pytest
import torch

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.full_weights import unfreeze_weights
from graftwork.model.adapters.peft import (
    acting,
    activate,
    attach,
    load_adapter,
    make_trainable,
    save_adapter,
    save_trained,
    trained_digest,
    trained_tensors,
)
from graftwork.model.load import base_digest, base_files_digest, load_base
from graftwork.records.errors import UserError

TOKENS = torch.arange(3, 40).reshape(1, -1)
FULL = AdapterShape(rank=1, alpha=1, targets=(), layers=(0, 1), kind="full")
LORA = AdapterShape(rank=4, alpha=8, targets=("q_proj", "up_proj"), layers=(0, 1))


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits


def move(parameters, size=0.02):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * size)


@pytest.fixture
def learned(tiny_base, tmp_path):
    """A folder of full weights, and the logits that they give."""
    model = load_base(tiny_base)
    move(make_trainable(model, FULL, seed=1))
    save_trained(model, tmp_path / "full", shape=FULL, base="tiny")
    return tmp_path / "full", logits(model)


def test_transformers_loads_the_folder_as_a_model(learned):
    from transformers import AutoModelForCausalLM

    folder, right = learned
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).eval()), right)


def test_base_adapter_and_full_weights_take_turns(tiny_base, tmp_path, learned):
    folder, right = learned
    source = load_base(tiny_base)
    move(attach(source, LORA, seed=1), 0.1)
    save_adapter(source, tmp_path / "adapter", shape=LORA, base="tiny")
    adapted = logits(source)
    model = load_base(tiny_base)
    plain, before = logits(model), base_digest(model)
    assert load_adapter(model, folder, name="full") is None
    assert torch.equal(logits(model), right)
    assert load_adapter(model, tmp_path / "adapter", name="lora") == LORA
    for name, expected in (("lora", adapted), ("full", right), (None, plain), ("full", right)):
        with acting(model, name):
            assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), plain)
    assert base_digest(model) == before


def test_a_set_that_is_loaded_again_is_exchanged(tiny_base, tmp_path, learned):
    folder, right = learned
    other = load_base(tiny_base)
    move(unfreeze_weights(other, (0, 1)), 0.05)
    save_trained(other, tmp_path / "other", shape=FULL, base="tiny")
    model = load_base(tiny_base)
    load_adapter(model, folder, name="one")
    assert torch.equal(logits(model), right)
    load_adapter(model, tmp_path / "other", name="one")
    assert torch.equal(logits(model), logits(other))
    activate(model, None)
    assert torch.equal(logits(model), logits(load_base(tiny_base)))


def test_with_upper_layers_only_their_blocks_are_learned(tiny_base):
    model = load_base(tiny_base)
    parameters = make_trainable(model, FULL.model_copy(update={"layers": (1,)}), seed=1)
    assert all(".layers.1." in name for name in trained_tensors(model))
    assert sum(p.numel() for p in parameters) == sum(t.numel() for t in trained_tensors(model).values())


def test_the_digest_sees_what_moved_and_what_changed_places(tiny_base):
    model = load_base(tiny_base)
    make_trainable(model, FULL, seed=1)
    first = trained_digest(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]].clone()
    swapped = trained_digest(model)
    with torch.no_grad():
        weight[0, 0] += 1e-6
    assert len({first, swapped, trained_digest(model)}) == 3


def test_training_goes_on_from_full_weights(tiny_base, learned):
    folder, right = learned
    model = load_base(tiny_base)
    make_trainable(model, FULL, seed=1, start=folder)
    assert torch.equal(logits(model), right)


def test_full_weights_do_not_start_from_an_adapter(tiny_base, tmp_path):
    source = load_base(tiny_base)
    attach(source, LORA, seed=1)
    save_adapter(source, tmp_path / "adapter", shape=LORA, base="tiny")
    with pytest.raises(UserError, match="no full weights"):
        make_trainable(load_base(tiny_base), FULL, seed=1, start=tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_training_goes_on_from_an_adapter_of_the_same_shape(tiny_base, tmp_path, kind):
    shape = LORA.model_copy(update={"kind": kind, "ranks": {"q_proj": 2}})
    source = load_base(tiny_base)
    move(attach(source, shape, seed=1), 0.1)
    save_adapter(source, tmp_path / "adapter", shape=shape, base="tiny")
    model = load_base(tiny_base)
    parameters = make_trainable(model, shape, seed=9, start=tmp_path / "adapter")
    assert torch.equal(logits(model), logits(source))
    assert all(parameter.requires_grad for parameter in parameters)
    assert trained_digest(model) == trained_digest(source)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 8}, "train.rank"),
        ({"alpha": 9.0}, "train.alpha"),
        ({"targets": ("q_proj",)}, "train.target_modules"),
        ({"layers": (1,)}, "train.upper_layers"),
        ({"use_rslora": True}, "train.use_rslora"),
        ({"kind": "dora"}, "train.method"),
        ({"ranks": {"q_proj": 2}}, "train.modules"),
    ],
)
def test_an_adapter_of_another_shape_is_no_start_and_the_setting_is_named(tiny_base, tmp_path, change, named):
    source = load_base(tiny_base)
    attach(source, LORA, seed=1)
    save_adapter(source, tmp_path / "adapter", shape=LORA, base="tiny")
    with pytest.raises(UserError, match="a different shape") as caught:
        make_trainable(
            load_base(tiny_base), LORA.model_copy(update=change), seed=1, start=tmp_path / "adapter"
        )
    assert named in caught.value.fix


def test_a_folder_that_is_no_adapter_is_no_start(tiny_base, tmp_path):
    with pytest.raises(UserError, match="not a PEFT folder"):
        make_trainable(load_base(tiny_base), LORA, seed=1, start=tmp_path)


def test_weights_of_another_base_are_refused(tiny_base, learned):
    from safetensors.torch import load_file, save_file

    folder, _ = learned
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    model = load_base(tiny_base)
    with pytest.raises(UserError, match=r"do not fit model\.norm\.weight"):
        load_adapter(model, folder)
    with pytest.raises(UserError, match="do not fit"):
        load_adapter(load_base(tiny_base, four_bits=True), folder)


def test_the_files_of_the_base_are_proven_by_their_bytes(tiny_base, tmp_path):
    import shutil

    copy = tmp_path / "base"
    shutil.copytree(tiny_base, copy)
    assert base_files_digest(copy) == base_files_digest(tiny_base)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert base_files_digest(copy) != base_files_digest(tiny_base)
