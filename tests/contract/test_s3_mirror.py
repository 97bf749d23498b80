"""Checkpoints mirrored to an S3 that the tests start: there, back, and a bucket that nobody made."""

import pytest
import torch
from s3_server import new_url

from graftwork.records.errors import EnvironmentFailure
from graftwork.train.checkpoints import Checkpoint, CheckpointStore, FsspecMirror


def mirror_of(url):
    return FsspecMirror(url, run_id="run", keep=2, first_pause=0.001)


def checkpoint(step):
    return Checkpoint(step, {"w": torch.full((256,), float(step))}, {"step": step}, journal=b"{}\n")


def test_checkpoints_go_to_the_bucket_and_the_newest_comes_back(s3_server, tmp_path):
    url = new_url()
    assert CheckpointStore(tmp_path / "none", keep=2, mirror=mirror_of(url)).open() is None
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url))
    for step in (10, 20, 30, 40):
        store.save(checkpoint(step))
        store.settle()
    assert not [word for word in store.messages() if "failed" in word]
    assert max(mirror_of(url)._steps()) == 40
    assert len(mirror_of(url)._steps()) == 2
    found = CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url)).open()
    assert found.step == 40
    assert torch.equal(found.tensors["w"], torch.full((256,), 40.0))


def test_a_bucket_that_does_not_exist_is_no_empty_mirror(s3_server, tmp_path):
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of("s3://nowhere/copies"))
    with pytest.raises(EnvironmentFailure, match="no bucket 'nowhere'") as reported:
        store.open()
    assert reported.value.fix
