"""A checkpoint is whole or is passed over; the last good one is never lost."""

import random

import pytest
import torch

from graftwork.train.checkpoint import MANIFEST, STATE, TENSORS, Checkpoint, latest_good, write_checkpoint


def checkpoint(step):
    return Checkpoint(step=step, tensors={"w": torch.full((64,), float(step))}, state={"step": step})


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


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_one_is_passed_over_with_a_word(tmp_path, name, damage):
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


def test_a_good_one_of_the_same_step_is_left_as_it_is(tmp_path):
    path = write_checkpoint(tmp_path, checkpoint(10), keep=1)
    before = (path / TENSORS).stat().st_ino
    assert write_checkpoint(tmp_path, checkpoint(10), keep=1) == path
    assert (path / TENSORS).stat().st_ino == before


def test_a_damaged_one_of_the_same_step_is_written_anew(tmp_path):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    (tmp_path / "step-000010" / TENSORS).write_bytes(b"broken")
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    found, complaints = latest_good(tmp_path)
    assert (found.step, complaints) == (10, ())


def test_what_a_kill_left_half_written_does_not_count(tmp_path):
    write_checkpoint(tmp_path, checkpoint(10), keep=1)
    half = tmp_path / ".step-000020.abcd1234.part"
    half.mkdir()
    (half / TENSORS).write_bytes(b"half")
    found, complaints = latest_good(tmp_path)
    assert (found.step, complaints) == (10, ())
