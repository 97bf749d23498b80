"""The second home of checkpoints, the same promises on every kind of place."""

import uuid

import pytest
import torch

from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.text.redact import redact_login
from graftwork.train.checkpoints import (
    MANIFEST,
    TENSORS,
    Checkpoint,
    CheckpointStore,
    FsspecMirror,
    latest_good,
    list_saved,
    write_checkpoint,
)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/copies"
    return f"file://{tmp_path}/far away/copies"


def checkpoint(step, score=None):
    tensors = {"w": torch.full((256,), float(step)), "bits": torch.ones(3, dtype=torch.bfloat16)}
    return Checkpoint(step, tensors, {"step": step}, score=score, journal=b'{"step":1}\n')


def mirror_of(url, *, keep=2):
    return FsspecMirror(url, run_id="run", keep=keep, first_pause=0.001)


def save(store, *checkpoints):
    for checkpoint in checkpoints:
        store.save(checkpoint)
    store.settle()


def names(mirror):
    return {f"step-{step:06d}" for step in mirror._steps()}


def test_in_an_empty_folder_the_newest_good_one_is_fetched_and_used(url, tmp_path):
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url)), checkpoint(10), checkpoint(20))
    store = CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url))
    found = store.open()
    assert found.step == 20
    assert torch.equal(found.tensors["w"], torch.full((256,), 20.0))
    assert found.journal == b'{"step":1}\n'
    assert any("step 20 was fetched from the mirror" in word for word in store.messages())


def test_an_empty_mirror_is_an_empty_start(url, tmp_path):
    store = CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url))
    assert store.open() is None
    assert list(store.messages()) == []


def deaf(mirror, monkeypatch, *, times, error=PermissionError):
    """The mirror's place is not responding so many times."""
    asked = []

    def ls(*arguments, **more):
        asked.append(arguments)
        if len(asked) <= times:
            raise error("https://someone:hunter2@host/x is down")
        return listing(*arguments, **more)

    listing = mirror._files.system.ls
    monkeypatch.setattr(mirror._files.system, "ls", ls)
    return asked


@pytest.mark.parametrize("error", [PermissionError, ConnectionError, RuntimeError])
def test_a_mirror_that_cannot_be_read_does_not_let_the_run_start_over(url, tmp_path, monkeypatch, error):
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url)), checkpoint(10))
    mirror = mirror_of(url)
    asked = deaf(mirror, monkeypatch, times=10**6, error=error)
    with pytest.raises(EnvironmentFailure, match="the mirror cannot be read") as caught:
        CheckpointStore(tmp_path / "there", keep=2, mirror=mirror).open()
    assert len(asked) == 3
    assert "start over" in caught.value.why
    assert "train.run.mirror" in caught.value.fix
    assert "hunter2" not in str(caught.value.as_json())


def test_a_mirror_that_answers_at_the_last_try_is_used(url, tmp_path, monkeypatch):
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url)), checkpoint(10))
    mirror = mirror_of(url)
    deaf(mirror, monkeypatch, times=2)
    assert CheckpointStore(tmp_path / "there", keep=2, mirror=mirror).open().step == 10


def test_with_a_good_checkpoint_here_the_mirror_need_not_answer(url, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "there", checkpoint(10), keep=1)
    mirror = mirror_of(url)
    asked = deaf(mirror, monkeypatch, times=10**6)
    assert CheckpointStore(tmp_path / "there", keep=2, mirror=mirror).open().step == 10
    assert not asked


def test_intact_local_files_are_not_fetched(url, tmp_path):
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url)), checkpoint(30))
    write_checkpoint(tmp_path / "there", checkpoint(10), keep=1)
    assert CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url)).open().step == 10


@pytest.mark.parametrize("victims", [(20,), (10, 20)])
def test_the_intact_copy_of_a_checkpoint_that_is_damaged_here_is_used(url, tmp_path, victims):
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url, keep=2)), checkpoint(10))
    save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url, keep=2)), checkpoint(20, 0.1))
    for step in victims:
        (tmp_path / "here" / f"step-{step:06d}" / TENSORS).write_bytes(b"damaged")
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror_of(url))
    assert store.open().step == 20
    assert any("step 20 was replaced by that of the mirror" in message for message in store.messages())
    (tmp_path / "here" / "step-000020" / TENSORS).write_bytes(b"damaged again")
    assert store.best().step == 20


def test_a_damaged_checkpoint_whose_mirror_does_not_answer_leaves_the_older_one(url, tmp_path, monkeypatch):
    for step in (10, 20):
        write_checkpoint(tmp_path / "here", checkpoint(step), keep=2)
    (tmp_path / "here" / "step-000020" / TENSORS).write_bytes(b"damaged")
    mirror = mirror_of(url)
    deaf(mirror, monkeypatch, times=10**6)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    assert store.open().step == 10
    assert any("cannot be read" in message for message in store.messages())


@pytest.mark.parametrize("victim", [TENSORS, MANIFEST])
def test_a_damaged_copy_is_passed_over_and_sent_again_later(url, tmp_path, victim):
    mirror = mirror_of(url)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    for step in (10, 20):
        save(store, checkpoint(step))
    (place,) = [
        name for name in mirror._files.system.find(f"{mirror._files.root}/step-000020") if victim in name
    ]
    data = bytearray(mirror._files.system.cat_file(place))
    data[len(data) // 2] ^= 0x10 if victim == TENSORS else 0xFF
    mirror._files.system.pipe_file(place, bytes(data))

    again = mirror_of(url)
    there = CheckpointStore(tmp_path / "there", keep=2, mirror=again)
    assert there.open().step == 10
    assert any("step-000020 of the mirror is skipped" in word for word in there.messages())
    save(there, checkpoint(20))
    assert CheckpointStore(tmp_path / "third", keep=2, mirror=mirror_of(url)).open().step == 20


def test_a_copy_without_its_manifest_does_not_count(url, tmp_path):
    mirror = mirror_of(url)
    for step in (10, 20):
        save(CheckpointStore(tmp_path / "here", keep=2, mirror=mirror), checkpoint(step))
    mirror._files.system.rm_file(f"{mirror._files.root}/step-000020/{MANIFEST}")
    assert CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url)).open().step == 10


def test_the_same_policy_holds_there(url, tmp_path):
    mirror = mirror_of(url)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    for step, score in ((10, None), (20, 0.1), (30, 0.5), (40, None), (50, None)):
        save(store, checkpoint(step, score))
    assert names(mirror) == {"step-000020", "step-000040", "step-000050"}
    assert {saved.step for saved in list_saved(tmp_path / "here")} == {20, 40, 50}
    # And the best comes along into a new place.
    there = CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url))
    assert there.open().step == 50
    assert there.best().step == 20


def test_newer_checkpoints_at_the_mirror_are_never_removed(url, tmp_path):
    """The run restarted, without what is at its mirror: the copies are still good."""
    mirror = mirror_of(url)
    save(CheckpointStore(tmp_path / "here", keep=1, mirror=mirror), checkpoint(40))
    restarted = mirror_of(url, keep=1)
    store = CheckpointStore(tmp_path / "restarted", keep=1, mirror=restarted)
    for step in (10, 20):
        save(store, checkpoint(step))
    assert names(restarted) == {"step-000020", "step-000040"}


class Wire:
    """Counts what is sent, and breaks when asked to."""

    def __init__(self, mirror, *, fails=0, partial=False):
        self.sent = []
        self._put, self._files = mirror._files.system.put_file, mirror._files.system
        self._fails, self._partial = fails, partial

    def put_file(self, here, there, **more):
        self.sent.append(there.rpartition("/")[2].split(".")[0])
        if self._fails and len(self.sent) >= 2:
            self._fails -= 1
            if self._partial:
                self._files.pipe_file(there, b"half of i")
            raise ConnectionError("https://someone:hunter2@host/x?X-Amz-Signature=abc is down")
        return self._put(here, there, **more)


@pytest.mark.parametrize("partial", [False, True])
def test_a_broken_wire_is_a_warning_and_only_what_is_missing_is_sent_again(
    url, tmp_path, monkeypatch, partial
):
    mirror = mirror_of(url)
    wire = Wire(mirror, fails=1, partial=partial)
    monkeypatch.setattr(mirror._files.system, "put_file", wire.put_file)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    save(store, checkpoint(10))
    assert wire.sent == ["tensors", "state", "state", "steps"]
    (word,) = store.messages()
    assert "the mirror failed 1 time(s)" in word
    assert "hunter2" not in word
    assert "abc" not in word
    monkeypatch.undo()
    assert CheckpointStore(tmp_path / "there", keep=2, mirror=mirror_of(url)).open().step == 10


def test_a_copy_that_failed_is_tried_again_before_anyone_waits_for_it(url, tmp_path, monkeypatch):
    mirror = mirror_of(url)
    monkeypatch.setattr(mirror._files.system, "put_file", Wire(mirror, fails=3).put_file)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    store.save(checkpoint(10))
    store.wait()
    with mirror._change:
        assert mirror._change.wait_for(mirror._is_done, timeout=60)
    assert names(mirror) == {"step-000010"}


def test_the_time_of_a_checkpoint_includes_its_copy(url, tmp_path):
    mirror = mirror_of(url)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    assert store.seconds is None
    save(store, checkpoint(10))
    assert store.seconds > mirror.seconds > 0
    mirror._seconds = 100.0
    assert 100 < store.seconds < 200


def test_a_mirror_that_is_gone_never_stops_the_run(url, tmp_path, monkeypatch):
    mirror = mirror_of(url)
    monkeypatch.setattr(mirror._files.system, "put_file", Wire(mirror, fails=10**6).put_file)
    monkeypatch.setattr(mirror._files.system, "makedirs", Wire(mirror, fails=10**6).put_file, raising=False)
    store = CheckpointStore(tmp_path / "here", keep=2, mirror=mirror)
    save(store, checkpoint(10), checkpoint(20))
    words = list(store.messages())
    assert "the mirror does not have the last checkpoint; the one here is good" in words
    assert latest_good(tmp_path / "here")[0].step == 20


def test_an_address_that_cannot_be_used_is_reported_at_once():
    with pytest.raises((UserError, EnvironmentFailure)) as caught:
        FsspecMirror("nosuch://someone:hunter2@host/copies", run_id="run", keep=1)
    assert "hunter2" not in str(caught.value.as_json())


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:hunter2@bucket/x failed",
        "GET https://host/x?X-Amz-Signature=hunter2",
        ValueError("ftp://me:hunter2@host: refused"),
        PermissionError("530 hunter2 is not the password of me"),
    ],
)
def test_no_secret_is_shown(text):
    assert "hunter2" not in redact_login(text, "ftp://me:hunter2@host/copies")
