"""`graft train merge`: which adapters can be merged, and what is written."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from graftwork.api.project import open_project
from graftwork.model.adapter_shape import AdapterShape, to_peft
from graftwork.records.errors import UserError
from graftwork.registry.export import MergeRequest, merge_adapters

PATH = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def work(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    (root / "graft.yaml").write_text("project: p\nbase: smollm2-135m-instruct\ndata:\n  logs: [log.jsonl]\n")
    (root / "log.jsonl").write_text("")
    with open_project(root).open() as opened:
        yield opened


def make_adapter(folder, *, rank=4, seed=0, more=None):
    chance = np.random.default_rng(seed)
    tensors = {
        f"{PATH}.lora_A.weight": chance.normal(size=(rank, 576)).astype(np.float32),
        f"{PATH}.lora_B.weight": chance.normal(size=(576, rank)).astype(np.float32),
    }
    folder.mkdir()
    save_file({**tensors, **(more or {})}, folder / "adapter_model.safetensors")
    shape = AdapterShape(rank=rank, alpha=8, targets=("q_proj",), layers=(0,))
    (folder / "adapter_config.json").write_text(json.dumps(to_peft(shape, "smollm2-135m-instruct")))
    return f"adapter:{folder}", tensors


def test_the_average_of_two_adapters_changes_as_much_as_both_together(work, tmp_path):
    one, first = make_adapter(tmp_path / "one", seed=1)
    two, second = make_adapter(tmp_path / "two", seed=2)
    merged = merge_adapters(work, MergeRequest((one, two), tmp_path / "out", rank=8))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    change = found[f"{PATH}.lora_B.weight"] @ found[f"{PATH}.lora_A.weight"]
    parts = [2.0 * part[f"{PATH}.lora_B.weight"] @ part[f"{PATH}.lora_A.weight"] for part in (first, second)]
    assert change == pytest.approx(sum(parts) / 2, abs=1e-3)
    assert merged.kept == pytest.approx(1.0)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8.0)


def test_factors_of_different_ranks_are_refused_where_the_method_needs_one(work, tmp_path):
    one, _ = make_adapter(tmp_path / "one", rank=4)
    two, _ = make_adapter(tmp_path / "two", rank=8)
    with pytest.raises(UserError, match="rank"):
        merge_adapters(work, MergeRequest((one, two), tmp_path / "out", method="ties"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["nan,1", "inf,1", "1", "0,1", "-1,2", "a,b"])
def test_weights_that_are_no_positive_numbers_are_refused(work, tmp_path, weights):
    names = tuple(make_adapter(tmp_path / str(at), seed=at)[0] for at in range(2))
    with pytest.raises(UserError, match="positive weights"):
        merge_adapters(work, MergeRequest(names, tmp_path / "out", weights=weights))


def test_an_adapter_with_other_trained_weights_is_refused_by_name(work, tmp_path):
    one, _ = make_adapter(tmp_path / "one")
    two, _ = make_adapter(
        tmp_path / "two", more={"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}
    )
    with pytest.raises(UserError, match="weights other than its LoRA factors"):
        merge_adapters(work, MergeRequest((one, two), tmp_path / "out"))


def test_a_merge_in_a_given_shape_changes_the_same_and_states_that_shape(work, tmp_path):
    one, _ = make_adapter(tmp_path / "one", seed=1)
    two, _ = make_adapter(tmp_path / "two", seed=2)
    shape = AdapterShape(rank=8, alpha=32, targets=("q_proj",), layers=(0,))
    merge_adapters(work, MergeRequest((one, two), tmp_path / "plain", rank=8))
    merge_adapters(work, MergeRequest((one, two), tmp_path / "shaped", shape=shape))
    changes = []
    for name, scale in (("plain", 1.0), ("shaped", 4.0)):
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        changes.append(scale * found[f"{PATH}.lora_B.weight"] @ found[f"{PATH}.lora_A.weight"])
    assert changes[1] == pytest.approx(changes[0], abs=1e-4)
    config = json.loads((tmp_path / "shaped" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 32.0)
