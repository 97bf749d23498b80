"""Merged, a model says what base and adapter say, for every kind of adapter; and a false merge is seen."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.merge import compare_logits, merge_into, reply_logits
from graftwork.model.adapters.peft import adapter_tensors, attach, load_adapter, save_adapter
from graftwork.model.gguf import find_converter, read_back
from graftwork.model.load import load_base
from graftwork.records.errors import EnvironmentFailure, NegativeResult, UserError

SHAPES = {
    "lora": AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1)),
    "upper": AdapterShape(rank=4, alpha=8, targets=("q_proj",), layers=(1,)),
    "rslora": AdapterShape(rank=4, alpha=8, targets=("o_proj", "up_proj"), layers=(0, 1), use_rslora=True),
    "ranks": AdapterShape(
        rank=4,
        alpha=8,
        targets=("q_proj", "v_proj"),
        layers=(0, 1),
        ranks={"q_proj": 2},
        alphas={"v_proj": 3.0},
    ),
    "dora": AdapterShape(rank=4, alpha=8, targets=("q_proj", "gate_proj"), layers=(0, 1), kind="dora"),
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def rows():
    chance = random.Random(2)
    return [make_row(str(number), (chance.randrange(100, 9000) for _ in range(12)), 6) for number in range(3)]


def make_adapter(tiny_base, folder, shape):
    """An adapter that has learned something, whatever: every part of it is away from its start."""
    model = load_base(tiny_base)
    attach(model, shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    save_adapter(model, folder, shape=shape, base="tiny")


@pytest.mark.parametrize("kind", SHAPES)
def test_merged_and_unmerged_logits_agree(tiny_base, tmp_path, rows, kind):
    make_adapter(tiny_base, tmp_path / "adapter", SHAPES[kind])
    (tmp_path / "merged").mkdir()
    count = merge_into(tiny_base, tmp_path / "adapter", tmp_path / "merged")
    assert count == len(SHAPES[kind].targets) * len(SHAPES[kind].layers)

    both = load_base(tiny_base)
    load_adapter(both, tmp_path / "adapter")
    wanted, merged = reply_logits(both, rows), reply_logits(load_base(tmp_path / "merged"), rows)
    found = compare_logits(wanted, merged, dtype="float32")
    assert found.holds, found
    assert found.positions == 3 * 6
    # The base alone says something else: so the comparison can fail.
    assert not compare_logits(wanted, reply_logits(load_base(tiny_base), rows), dtype="float32").holds

    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == count
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "merged" / name).read_bytes() == (tiny_base / name).read_bytes()


def test_a_base_in_bfloat16_stays_one_and_the_price_is_within_its_bounds(tiny_base, tmp_path, rows):
    half = tmp_path / "half"
    half.mkdir()
    for path in tiny_base.iterdir():
        if path.suffix in (".json", ".jinja"):
            (half / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_base / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        half / "model.safetensors",
        metadata={"format": "pt"},
    )
    make_adapter(tiny_base, tmp_path / "adapter", SHAPES["lora"])
    (tmp_path / "merged").mkdir()
    merge_into(half, tmp_path / "adapter", tmp_path / "merged")
    assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    both = load_base(half, dtype="bfloat16")
    load_adapter(both, tmp_path / "adapter")
    merged = load_base(tmp_path / "merged", dtype="bfloat16")
    found = compare_logits(reply_logits(both, rows), reply_logits(merged, rows), dtype="bfloat16")
    assert found.largest_difference <= found.allowed_difference * found.largest_logit


def test_an_adapter_of_another_base_is_refused(tiny_base, tmp_path):
    make_adapter(tiny_base, tmp_path / "adapter", SHAPES["upper"])
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    renamed = {name.replace("layers.1.", "layers.7."): t for name, t in load_file(weights).items()}
    save_file(renamed, weights)
    (tmp_path / "merged").mkdir()
    with pytest.raises(UserError, match=r"layers\.7\."):
        merge_into(tiny_base, tmp_path / "adapter", tmp_path / "merged")


def test_a_converter_is_found_where_it_is_named_and_its_lack_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GRAFT_GGUF_CONVERTER", raising=False)
    with pytest.raises(EnvironmentFailure, match="no converter") as caught:
        find_converter(tmp_path)
    assert "GRAFT_GGUF_CONVERTER" in caught.value.fix
    script = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.touch()
    assert find_converter(tmp_path) == script
    monkeypatch.setenv("GRAFT_GGUF_CONVERTER", str(tmp_path / "nowhere.py"))
    with pytest.raises(EnvironmentFailure, match="no converter"):
        find_converter(tmp_path)


def test_a_gguf_file_that_lacks_weights_is_refused(tiny_base, tmp_path):
    gguf = pytest.importorskip("gguf")
    sizes = {name: tensor.shape for name, tensor in load_file(tiny_base / "model.safetensors").items()}
    layers = json.loads((tiny_base / "config.json").read_text())["num_hidden_layers"]
    for leave_out, refused in ((0, False), (1, True)):
        target = tmp_path / f"{leave_out}.gguf"
        writer = gguf.GGUFWriter(str(target), "llama")
        writer.add_block_count(layers)
        for name, shape in list(sizes.items())[leave_out:]:
            writer.add_tensor(name, torch.zeros(shape).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if refused:
            with pytest.raises(NegativeResult, match="does not hold the model"):
                read_back(target, tiny_base)
        else:
            assert read_back(target, tiny_base)["tensors"] == len(sizes)
