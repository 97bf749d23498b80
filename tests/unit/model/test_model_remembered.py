"""What layers remember, by their config alone: as transformers' cache of the same config has it."""

import sys
from pathlib import Path

import pytest
from transformers import DynamicCache, Qwen2Config
from transformers.cache_utils import DynamicLayer

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from family_samples import ALL, FAMILIES

from graftwork.model.families import complete_config
from graftwork.model.shape import remembered_positions


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
