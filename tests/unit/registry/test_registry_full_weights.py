"""Weights that were learned as a whole are released like an adapter, and checked as strictly."""

from pathlib import Path

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Corrupted
from graftwork.registry.folder import verify_release


@pytest.fixture
def index() -> InMemoryReleaseIndex:
    return InMemoryReleaseIndex(project=PROJECT)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = write_adapter(tmp_path / "learned")
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_full_weights_are_released_under_their_own_names(tmp_path, weights, index):
    release = publish_parts(folder=tmp_path / "releases", index=index, **parts(weights))
    folder = tmp_path / "releases" / release.id
    assert (folder / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    assert not (folder / "adapter_config.json").exists()
    assert verify_release(folder) == release


def test_a_pickle_in_their_place_is_refused(tmp_path, weights, index):
    (weights / "model.safetensors").write_bytes(b"\x80\x04surprise")
    with pytest.raises(Corrupted, match="not a safetensors file"):
        publish_parts(folder=tmp_path / "releases", index=index, **parts(weights))


def test_a_config_of_no_model_is_refused(tmp_path, weights, index):
    (weights / "config.json").write_text("{}")
    with pytest.raises(Corrupted, match="does not describe a model"):
        publish_parts(folder=tmp_path / "releases", index=index, **parts(weights))


def test_a_folder_with_both_is_neither(tmp_path, weights, index):
    (weights / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(Corrupted, match="nothing else"):
        publish_parts(folder=tmp_path / "releases", index=index, **parts(weights))
