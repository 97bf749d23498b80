"""A checkpoint is whole or is passed over; the last good one is never lost."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from graftwork.files.disk import file_digest
from graftwork.files.safetensors import TYPE_NAMES
from graftwork.records.errors import Corrupted
from graftwork.train import checkpoints
from graftwork.train.checkpoints import (
    JOURNAL,
    MANIFEST,
    STATE,
    TENSORS,
    Checkpoint,
    best_good,
    latest_good,
    remove_partial,
    write_checkpoint,
)


def checkpoint(step):
    return Checkpoint(
        step=step, tensors={"w": torch.full((64,), float(step))}, state={"step": step}, journal=b"{}\n"
    )


def test_the_newest_good_one_is_found(tmp_path):
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, checkpoint(step), keep=2)
    found, complaints = latest_good(tmp_path)
    assert found.step == 30
    assert torch.equal(found.tensors["w"], torch.full((64,), 30.0))
    assert complaints == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000020", "step-000030"]


def test_no_checkpoint_is_no_error(tmp_path):
    assert latest_good(tmp_path / "nothing") == (None, ())


@pytest.mark.parametrize("name", [TENSORS, STATE, JOURNAL, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_one_is_skipped_with_a_warning(tmp_path, name, damage):
    for step in (10, 20):
        write_checkpoint(tmp_path, checkpoint(step), keep=2)
    victim = tmp_path / "step-000020" / name
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[random.Random(name).randrange(len(data))] ^= 0x10
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        victim.write_bytes(b"")
    else:
        victim.unlink()
    found, complaints = latest_good(tmp_path)
    assert found.step == 10
    assert len(complaints) == 1
    assert "step-000020" in complaints[0]


HOSTILE_MANIFESTS = {
    "nested deeply": lambda text: "[" * 100_000,
    "nested deeply in a field": lambda text: text.replace('"step": 2', '"step": ' + "[" * 100_000),
    "an infinite step": lambda text: text.replace('"step": 2', '"step": 1e999'),
    "a step that is no number": lambda text: text.replace('"step": 2', '"step": NaN'),
    "a step of 5,000 digits": lambda text: text.replace('"step": 2', '"step": ' + "9" * 5000),
    "an infinite size": lambda text: text.replace('"sizes": {', '"sizes": {"state.json": 1e999}, "x": {'),
    "a size that is infinite": lambda text: re.sub(r'\d+, "steps', '1e999, "steps', text),
    "a score that is a list": lambda text: text.replace('"score": null', '"score": [1]'),
    "a score of 400 digits": lambda text: text.replace('"score": null', '"score": ' + "9" * 400),
    "a hash that leads elsewhere": lambda text: re.sub('"[0-9a-f]{64}"', '"/../../x"', text, count=1),
    "a list": lambda text: "[]",
    "a number": lambda text: "7",
    "not UTF-8": lambda text: b"\xff" + text.encode(),
}


@pytest.mark.parametrize("kind", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_skipped_with_a_warning(tmp_path, kind):
    write_checkpoint(tmp_path, checkpoint(1), keep=5)
    path = write_checkpoint(tmp_path, checkpoint(2), keep=5) / "manifest.json"
    text = HOSTILE_MANIFESTS[kind](path.read_text())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found, words = latest_good(tmp_path)
    assert found.step == 1
    assert len(words) == 1
    assert "step-000002 is skipped" in words[0]
    assert best_good(tmp_path)[0] is None
    assert [saved.step for saved in checkpoints.list_saved(tmp_path)] in ([1], [1, 2])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"[" * 100_000),
        ("state.json", b"[]"),
        ("state.json", b"\xff"),
        ("tensors.safetensors", b"\x80\x04cos\nsystem\n."),
        ("tensors.safetensors", (2**63).to_bytes(8, "little") + b"{}"),
        ("tensors.safetensors", b""),
    ],
)
def test_content_that_fits_its_hash_but_cannot_be_read_is_passed_over(tmp_path, name, content):
    write_checkpoint(tmp_path, checkpoint(1), keep=5)
    path = write_checkpoint(tmp_path, checkpoint(2), keep=5)
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"][name] = file_digest(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))
    found, words = latest_good(tmp_path)
    assert (found.step, len(words)) == (1, 1)


def test_a_good_one_of_the_same_step_is_left_as_it_is(tmp_path):
    path = write_checkpoint(tmp_path, checkpoint(10), keep=1)
    before = (path / TENSORS).stat().st_ino
    assert write_checkpoint(tmp_path, checkpoint(10), keep=1) == path
    assert (path / TENSORS).stat().st_ino == before


def test_a_damaged_one_of_the_same_step_is_rewritten(tmp_path):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    (tmp_path / "step-000010" / TENSORS).write_bytes(b"broken")
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    found, complaints = latest_good(tmp_path)
    assert (found.step, complaints) == (10, ())


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    half = tmp_path / ".step-000020.abcd1234.part"
    half.mkdir()
    (half / TENSORS).write_bytes(b"half")
    found, complaints = latest_good(tmp_path)
    assert (found.step, complaints) == (10, ())


def test_a_damaged_one_beyond_never_takes_the_place_of_a_good_one(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path, checkpoint(step), keep=2)
    (tmp_path / "step-000020" / TENSORS).write_bytes(b"broken")
    # Resumed after step 10, asked to stop after 12: what was just verified stays, the ruin goes.
    write_checkpoint(tmp_path, checkpoint(12), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000012"]


def test_old_ones_stay_until_the_new_one_was_read_back(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)

    def lying_digest(path):
        """The disk does not match the hash in memory meant."""
        return "0" * 64 if path.name == TENSORS and "20" in path.parent.name else file_digest(path)

    monkeypatch.setattr(checkpoints, "file_digest", lying_digest)
    with pytest.raises(Corrupted, match="differs from what was written"):
        write_checkpoint(tmp_path, checkpoint(20), keep=1)
    monkeypatch.undo()
    (tmp_path / "step-000020" / STATE).write_bytes(b"")
    assert latest_good(tmp_path)[0].step == 10


def test_a_checkpoint_that_is_still_read_is_kept(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path, checkpoint(step), keep=1, spare={10})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000020"]


def test_the_best_is_found_and_a_damaged_best_gives_way_to_the_next(tmp_path):
    for step, score in ((10, 0.5), (20, 0.2), (30, 0.9)):
        write_checkpoint(tmp_path, replace(checkpoint(step), score=score), keep=3)
    assert best_good(tmp_path)[0].step == 20
    (tmp_path / "step-000020" / TENSORS).unlink()
    found, complaints = best_good(tmp_path)
    assert found.step == 10
    assert "step-000020 is skipped" in complaints[0]


def test_leftovers_of_killed_writers_are_swept(tmp_path):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    (tmp_path / ".step-000020.abcd1234.part").mkdir()
    remove_partial(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]


@pytest.mark.parametrize("dtype", list(TYPE_NAMES))
def test_every_type_is_read_back_by_safetensors_as_it_was(tmp_path, dtype):
    named = {
        "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "ours": torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype)),
        "turned": torch.arange(6).reshape(2, 3).to(torch.int32).t(),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    digest, length = checkpoints.write_tensors(tmp_path / "t.safetensors", named)
    assert digest == file_digest(tmp_path / "t.safetensors")
    assert length == (tmp_path / "t.safetensors").stat().st_size
    back = load_file(tmp_path / "t.safetensors")
    assert back.keys() == named.keys()
    for name, tensor in named.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float())
