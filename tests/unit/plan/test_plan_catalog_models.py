"""The shapes that the catalog states are those of the models."""

import json
from pathlib import Path

import pytest

from graftwork.model.shape import linear_names, total_parameters
from graftwork.plan.catalog.models import find_model, list_models
from graftwork.records.errors import UserError

PUBLISHED = {
    "deepseek-coder-1.3b": 1.346e9,
    "deepseek-coder-6.7b": 6.740e9,
    "deepseek-coder-33b": 33.34e9,
    "olmo-7b": 6.888e9,
    "olmo2-7b": 7.299e9,
    "qwen2.5-0.5b": 494.0e6,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-coder-7b": 7.616e9,
    "qwen2.5-14b": 14.77e9,
    "qwen2.5-32b": 32.76e9,
    "qwen2.5-72b": 72.71e9,
    "qwen3-0.6b": 596e6,
    "qwen3-4b": 4.022e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.3-70b": 70.55e9,
    "llama-2-7b": 6.738e9,
    "llama-2-13b": 13.02e9,
    "tinyllama-1.1b": 1.100e9,
    "mistral-7b": 7.248e9,
    "mistral-7b-v0.1": 7.242e9,
    "mistral-nemo-12b": 12.25e9,
    "smollm2-135m": 134.5e6,
    "smollm2-360m": 361.8e6,
    "smollm2-1.7b": 1.711e9,
    "gemma-2-2b": 2.614e9,
    "gemma-2-9b": 9.242e9,
    "gemma-2-27b": 27.23e9,
    "gemma-3-1b": 999.9e6,
    "gemma-3-4b": 3.880e9,
    "phi-3-mini": 3.821e9,
    "phi-4": 14.66e9,
}
HIDDEN, LAYERS = 64, 2
SMALL = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
FAMILIES = (
    "llama",
    "mistral",
    "granite",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo",
    "olmo2",
    "starcoder2",
    "stablelm",
    "phi",
    "gpt_neox",
)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_model_has_as_many_parameters_as_was_published(name: str):
    assert total_parameters(find_model(name).shape) == pytest.approx(PUBLISHED[name], rel=0.002)


def test_every_row_has_a_source_and_a_name_that_finds_it():
    for model in list_models():
        assert model.source
        assert find_model(model.name) == model
        assert find_model(model.hf_id) == model
        for alias in model.aliases:
            assert find_model(alias) == model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_alone_counts_what_transformers_builds(family: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SMALL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    written = config.to_dict() | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    found = find_model(tmp_path)
    assert total_parameters(found.shape) == real
    assert found.architecture == family
    names = {
        path.rsplit(".", 1)[-1] for path, part in model.named_modules() if type(part).__name__ == "Linear"
    }
    assert set(linear_names(found.shape)) == names - {"lm_head"}


def test_a_config_file_is_taken_as_its_folder_is(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert find_model(tmp_path) == find_model(str(tmp_path / "config.json")).model_copy(
        update={"source": str(tmp_path / "config.json")}
    )


def test_a_nested_config_of_gemma_3_needs_no_more_than_it_says(tmp_path: Path):
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert total_parameters(find_model(tmp_path).shape) == total_parameters(find_model("gemma-3-4b").shape)


def test_an_unknown_family_is_counted_as_llama_and_says_so(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", **SMALL}))
    found = find_model(tmp_path)
    assert "'novel' is not known" in found.doubt


def test_experts_are_counted_all_and_take_no_adapter(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"model_type": "mixtral"}, default=str)
    )
    shape = find_model(tmp_path).shape
    assert total_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    assert set(linear_names(shape)) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_wrong_name_is_answered_with_near_ones():
    with pytest.raises(UserError) as mistake:
        find_model("deepseek-coder-7b")
    assert "deepseek-coder-6.7b" in mistake.value.fix


@pytest.mark.parametrize("body", ["{", "[]", '{"model_type": "llama"}'])
def test_a_broken_config_is_a_mistake_with_its_place(tmp_path: Path, body: str):
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(UserError) as mistake:
        find_model(tmp_path)
    assert "config.json" in mistake.value.where
