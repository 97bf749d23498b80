"""Shared fixtures: the real embedded model, and a tiny one of the same family for quick flows."""

import json
import shutil
from pathlib import Path

import pytest

from skips import AllowedSkips


def pytest_addoption(parser):
    parser.addoption(
        "--allowed-skips", type=Path, help="fail where a test is skipped for no reason of this file"
    )


def pytest_configure(config):
    path = config.getoption("--allowed-skips")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AllowedSkips(path))


@pytest.fixture(scope="session")
def embedded_base():
    """SmolLM2-135M-Instruct, converted once a machine."""
    from graftwork.model.base import EMBEDDED, find_base

    return find_base(EMBEDDED, project_folder=Path())


@pytest.fixture(scope="session")
def tiny_base(embedded_base, tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama and the real tokenizer and template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(embedded_base.folder) / name, folder / name)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    return folder
