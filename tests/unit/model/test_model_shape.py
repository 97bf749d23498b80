"""The shape of a model, what it remembers, the device it is on, and how many rows fit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import sys
from pathlib import Path
from types import SimpleNamespace

import model_families
import pytest
from family_samples import ALL, FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, Qwen2Config
from transformers.cache_utils import DynamicLayer

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach, make_trainable
from graftwork.model.families import complete_config
from graftwork.model.generate.scheduler import MOST_ROWS, rows_that_fit
from graftwork.model.parts import block_linears, layer_sizes
from graftwork.model.probe import name_device, read_driver, read_facts, read_model
from graftwork.model.shape import (
    adapter_parameters,
    count_tensors,
    joined_sizes,
    linear_names,
    linear_sizes,
    read_shape,
    read_sizes,
    remembered_positions,
    total_parameters,
)
from graftwork.records.base import GIB
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
        model, AdapterShape(rank=3, alpha=6, targets=names, layers=layers, ranks=ranks, kind=kind), seed=1
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


def read(config):
    whole = complete_config(config.to_dict())
    return remembered_positions(whole, layers=config.num_hidden_layers, position_values=64)


def cached(config):
    layers = DynamicCache(config=config).layers
    if all(type(layer) is DynamicLayer for layer in layers):
        return ()
    return tuple(getattr(layer, "sliding_window", None) or 0 for layer in layers)


@pytest.mark.parametrize("family", ALL)
def test_windows_are_those_of_the_cache(family):
    config = FAMILIES[family]()
    assert read(config) == cached(config)


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "cohere2", "olmo3", "qwen2", "smollm3", "mistral"]
)
def test_windows_of_a_config_without_types_of_layers_follow_from_its_family(family):
    config = FAMILIES[family](num_hidden_layers=12, layer_types=None)
    stated = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    if family == "gemma3_text":
        stated.setdefault("sliding_window_pattern", 6)
    found = remembered_positions(complete_config(stated), layers=12, position_values=64)
    assert found == cached(config)


def test_a_window_that_is_switched_on_begins_at_a_layer():
    config = Qwen2Config(num_hidden_layers=6, use_sliding_window=True, sliding_window=9, max_window_layers=4)
    stated = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    found = remembered_positions(complete_config(stated), layers=6, position_values=64)
    assert found == cached(config) == (0, 0, 0, 0, 9, 9)


def test_a_state_counts_as_positions_that_take_as_much():
    config = {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "mlp"],
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "hidden_size": 32,
    }
    assert remembered_positions(config, layers=4, position_values=64) == (4, 4, 0, 1)


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 42
GPU UUID: \t GPU-0
"""
VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build
GCC version:  gcc version 12.2.0
"""


def test_the_cards_name_and_driver_are_read():
    assert read_model(INFORMATION) == "NVIDIA H200"
    assert read_driver(VERSION) == "580.95.05"
    assert read_model("") == read_driver("") == ""


def test_measured_facts_are_read_among_warnings():
    printed = 'UserWarning: old driver\n{"kind": "cuda", "gflops": 7.0}\n3\nleaked semaphore objects: {1}\n'
    assert read_facts(printed) == {"kind": "cuda", "gflops": 7.0}
    assert read_facts("nothing\n") is None


def test_a_hidden_card_leaves_the_processor(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device = name_device()
    assert device.kind == "cpu"
    assert device.name
    assert device.driver == ""


def test_products_are_joined_as_our_step_does_them():
    shape = ModelShape(
        name="seven",
        hidden_size=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152_064,
        tied_embeddings=False,
        max_positions=32_768,
    )
    assert joined_sizes(shape) == {
        "qkv": (3584, 3584 + 2 * 512),
        "gate_up": (3584, 2 * 18944),
        "o_proj": (3584, 3584),
        "down_proj": (18944, 3584),
    }


SEVEN = SimpleNamespace(
    num_attention_heads=28,
    num_key_value_heads=4,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    vocab_size=152_064,
)


def rows(free: float, *, prompt: int = 512, new: int = 256) -> int:
    return rows_that_fit(SEVEN, prompt_tokens=prompt, new_tokens=new, free_bytes=int(free * GIB))


def test_a_large_card_gets_the_most() -> None:
    assert rows(120) == MOST_ROWS


def test_next_to_a_7b_model_a_16_gb_card_has_room_for_a_few() -> None:
    assert 1 <= rows(1) < 16


def test_a_full_card_still_tries_one() -> None:
    assert rows(0) == 1


@given(st.floats(0, 200), st.floats(0, 200), st.integers(1, 4000), st.integers(1, 4000))
def test_more_room_or_shorter_rows_never_mean_fewer(a: float, b: float, p: int, q: int) -> None:
    assert rows(min(a, b)) <= rows(max(a, b))
    assert rows(a, prompt=max(p, q)) <= rows(a, prompt=min(p, q))


@given(st.floats(0.1, 200), st.integers(1, 4000), st.integers(1, 2000))
def test_a_batch_never_needs_more_than_the_free_memory(free: float, prompt: int, new: int) -> None:
    found = rows(free, prompt=prompt, new=new)
    keys = 2 * 28 * 4 * 128 * 2 * (prompt + new)
    reading = 2 * (4 * 3584 + 3 * 18944) * prompt
    assert found == 1 or found * (2 * keys + reading) < free * GIB


def configurations() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("kind", configurations())
def test_every_decoder_of_transformers_gets_some_rows(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    except Exception as error:
        pytest.skip(f"no configuration without arguments: {type(error).__name__}")
    found = rows_that_fit(config, prompt_tokens=512, new_tokens=64, free_bytes=24 * GIB)
    assert 1 <= found <= MOST_ROWS
