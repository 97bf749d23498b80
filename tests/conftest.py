"""Shared fixtures: the real embedded model, and a tiny one of the same family for quick flows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

# Samples of releases and the in-memory index, which tests of all kinds use.
sys.path.insert(0, str(Path(__file__).parent / "unit" / "registry"))
sys.path.insert(0, str(Path(__file__).parent / "unit" / "fleet"))
# What takes the place of parts of the product, in processes of their own too.
sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

import preloaded
from changed import Changed
from skips import AllowedSkips


def pytest_addoption(parser):
    parser.addoption(
        "--real-processes",
        action="store_true",
        help="start every worker as a new interpreter, with its imports",
    )
    parser.addoption(
        "--allowed-skips", action="store_true", help="fail if a skip's reason is not in allowed_skips.txt"
    )

    parser.addoption("--changed", metavar="REVISION", help="only quick unit tests of what differs from it")
    parser.addoption("--kills", type=int, default=50, help="how often slow tests kill a run")
    parser.addoption("--thorough", action="store_true", help="property tests with all of their examples")
    parser.addoption("--update-golden", action="store_true", help="store what the golden tests see")


# How long an example takes says something about the machine, nothing about the property.
hypothesis.settings.register_profile(
    "graftwork", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("graftwork")

QUICK_SHARE = 3
"""Outside `--thorough`, a property test tries this part of its examples, at least ten: always the same."""


def pytest_collection_modifyitems(config, items):
    if config.getoption("--thorough"):
        return
    # New examples are tried by `--thorough`, and by a seed of one's own.
    fixed = {} if config.getoption("--hypothesis-seed") else {"derandomize": True, "database": None}
    for test in {item.obj for item in items if hasattr(getattr(item, "obj", None), "hypothesis")}:
        chosen = getattr(test, "_hypothesis_internal_use_settings", None)
        if chosen is not None:
            fewer = max(10, chosen.max_examples // QUICK_SHARE)
            less = hypothesis.settings(chosen, max_examples=min(fewer, chosen.max_examples), **fixed)
            test._hypothesis_internal_use_settings = less


def pytest_configure(config):
    if config.getoption("--changed"):
        config.pluginmanager.register(Changed(config.getoption("--changed")))
    if not hasattr(config, "workerinput"):
        listed = Path(__file__).parent / "allowed_skips.txt"
        config.pluginmanager.register(AllowedSkips(listed, enforce=config.getoption("--allowed-skips")))


@pytest.fixture(scope="session", autouse=True)
def preloaded_workers(request):
    """Workers come from a process that has imported torch already; see preloaded.py."""
    if request.config.getoption("--real-processes") or not preloaded.is_supported():
        yield
        return
    server = preloaded.Server()
    before = subprocess._fork_exec
    # The product's own would do the imports again for every project.
    os.environ["GRAFT_PRELOAD"] = "0"
    preloaded.Starter(server.clone).install()
    yield
    subprocess._fork_exec = before
    server.stop()


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
