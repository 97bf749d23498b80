"""What a plan counts without loading a model is what the loaded model has, whatever its family."""

import model_families
import pytest

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach, make_trainable
from graftwork.model.parts import block_linears, layer_sizes
from graftwork.model.shape import (
    adapter_parameters,
    count_tensors,
    linear_names,
    linear_sizes,
    read_shape,
    read_sizes,
    total_parameters,
)
from graftwork.records.errors import Corrupted
from graftwork.records.plan import ModelShape


@pytest.fixture(params=model_families.ALL)
def saved(request, tmp_path):
    model = model_families.make(request.param)
    model.save_pretrained(tmp_path)
    return model, read_shape(tmp_path)


def test_names_sizes_and_parameters_are_those_of_the_model(saved):
    model, shape = saved
    assert total_parameters(shape) == sum(p.numel() for p in model.parameters())
    linears = [(path, layer) for block, path, layer in block_linears(model) if block == 1]
    assert set(linear_names(shape)) == {path.rsplit(".", 1)[-1] for path, _ in linears}
    assert sorted(linear_sizes(shape).values()) == sorted(layer_sizes(layer) for _, layer in linears)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_trained_parameters_are_counted_exactly(saved, kind, layers):
    model, shape = saved
    names = linear_names(shape)
    ranks = {names[0]: 5}
    parameters = make_trainable(
        model,
        AdapterShape(rank=3, alpha=6, targets=names, layers=layers, ranks=ranks, kind=kind),
        seed=1,
    )
    counted = adapter_parameters(shape, rank=3, targets=names, layers=len(layers), ranks=ranks, method=kind)
    assert counted == sum(parameter.numel() for parameter in parameters)


def test_all_names_that_a_plan_gives_can_be_attached(saved):
    model, shape = saved
    assert attach(model, AdapterShape(rank=1, alpha=1, targets=linear_names(shape), layers=(0,)), seed=0)


def test_a_shape_survives_json(saved):
    _, shape = saved
    assert ModelShape.from_json(shape.to_json()) == shape


def test_routers_and_experts_are_no_targets():
    block = {
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts.3.up_proj.weight": (16, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "lm_head.weight": (32, 8),
        "model.embed_tokens.weight": (32, 8),
    }
    linears, _, parameters = count_tensors(block, tied=True)
    assert linears == {"q_proj": (8, 8)}
    assert parameters == 64 + 32 + 128 + 8 + 256
    assert count_tensors({"embed.weight": (2, 2)}, tied=False) is None


def test_a_damaged_header_is_reported(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{oops")
    with pytest.raises(Corrupted, match="not a safetensors file"):
        read_sizes(tmp_path)
