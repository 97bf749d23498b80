import json
import pickle
import stat
from pathlib import Path

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, verdict, write_adapter

from graftwork.files.disk import folder_digest
from graftwork.records.errors import Corrupted, GraftError, UserError
from graftwork.registry.folder import release_folder, verify_release
from graftwork.registry.store import ReleaseStore


@pytest.fixture
def index() -> InMemoryReleaseIndex:
    return InMemoryReleaseIndex(project=PROJECT)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "run" / "adapter")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "releases"


def test_a_release_is_a_read_only_peft_folder_named_by_its_content(root, adapter, index):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    folder = root / release.id
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "dataset.json",
        "manifest.json",
        "outcome.json",
        "plan.json",
        "report.json",
        "verdict.json",
    }
    assert all(
        not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) for path in folder.iterdir()
    )
    assert verify_release(folder) == release == index.get(release.id)
    assert ReleaseStore.open(root).ids() == (release.id,)


def test_the_same_content_is_the_same_release_whenever_it_is_made(root, adapter, index):
    first = publish_parts(folder=root, index=index, **parts(adapter))
    later = {**parts(adapter), "created_at": "2030-01-01T00:00:00Z"}
    assert publish_parts(folder=root, index=index, **later) == first
    assert index.list() == (first,)


@pytest.mark.parametrize(
    "change",
    [
        {"parent": "f" * 64},
        {"settings": {"alias": "other"}},
        {"versions": {"graftwork": "1"}},
        {"verdict": verdict("iterate")},
        {"project": "other"},
    ],
)
def test_any_other_content_is_another_release(root, adapter, index, change):
    first = publish_parts(folder=root, index=index, **parts(adapter))
    project = change.get("project", PROJECT)
    second = publish_parts(
        folder=root, index=InMemoryReleaseIndex(project=project), **{**parts(adapter), **change}
    )
    assert second.id != first.id


def test_the_card_is_written_from_the_records(root, adapter, index):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    card = (root / release.id / "README.md").read_text()
    assert card.startswith('---\nbase_model: "small"\nlibrary_name: peft\n')
    assert "99.0% (94.0% to 100.0%, n = 120)" in card
    assert "JSON-valid rate is 99 %, surely over 95 %." in card
    assert r"base \| worked example" in card
    assert release.adapter_hash in card


def test_changes_to_the_run_do_not_reach_the_release(root, adapter, index):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"overwritten")
    verify_release(root / release.id)


def corrupt_adapter(adapter: Path) -> None:
    with (adapter / "adapter_model.safetensors").open("ab") as handle:
        handle.write(b"\0")


def test_an_adapter_that_is_not_the_one_trained_is_refused(root, adapter, index):
    known = parts(adapter)
    corrupt_adapter(adapter)
    with pytest.raises(Corrupted, match="not the one"):
        publish_parts(folder=root, index=index, **known)
    assert not root.exists()
    assert index.list() == ()


@pytest.mark.parametrize(
    "weights",
    [
        pickle.dumps({"w": [1, 2]}),
        b"",
        b"\xff" * 64,
        (1000).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_weights_that_are_not_safetensors_are_refused_whatever_their_name(root, adapter, index, weights):
    (adapter / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(Corrupted, match="not a safetensors file"):
        publish_parts(folder=root, index=index, **parts(adapter))
    assert not root.exists()


@pytest.mark.parametrize("config", ["no json", "[]", "{}"])
def test_a_config_that_describes_no_adapter_is_refused(root, adapter, index, config):
    (adapter / "adapter_config.json").write_text(config)
    with pytest.raises(Corrupted):
        publish_parts(folder=root, index=index, **parts(adapter))


def test_a_stranger_in_the_adapter_folder_is_refused(root, adapter, index):
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps("surprise"))
    with pytest.raises(Corrupted, match="nothing else"):
        publish_parts(folder=root, index=index, **parts(adapter))


def test_a_missing_adapter_folder_is_a_clear_error(root, adapter, index, tmp_path):
    with pytest.raises(UserError):
        publish_parts(folder=root, index=index, **{**parts(adapter), "adapter_folder": tmp_path / "none"})


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": verdict().model_copy(update={"report_hash": "0" * 64})},
        {"measured_adapter": "0" * 64},
        {"base_fingerprint": "0" * 64},
        {"template_fingerprint": "0" * 64},
    ],
)
def test_parts_that_do_not_belong_together_are_refused(root, adapter, index, change):
    with pytest.raises(Corrupted, match="do not belong together"):
        publish_parts(folder=root, index=index, **{**parts(adapter), **change})
    assert not root.exists()


def test_a_base_that_changed_in_training_is_refused(root, adapter, index):
    known = parts(adapter)
    known["outcome"] = known["outcome"].model_copy(update={"base_hash_after": "0" * 64})
    with pytest.raises(Corrupted, match="base weights"):
        publish_parts(folder=root, index=index, **known)


def test_every_flipped_byte_is_found(root, adapter, index):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    folder = root / release.id
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.chmod(0o644)
        for at in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            if path.name == "manifest.json" and json_equal(path.read_bytes(), whole):
                continue
            with pytest.raises(GraftError):
                verify_release(folder)
        path.write_bytes(whole)
    assert verify_release(folder) == release


def json_equal(one: bytes, other: bytes) -> bool:
    """A flipped bit may turn one white space into another, which changes nothing of the manifest."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["README.md", "adapter_model.safetensors", "manifest.json"])
def test_a_missing_file_is_found(root, adapter, index, name):
    folder = root / publish_parts(folder=root, index=index, **parts(adapter)).id
    (folder / name).unlink()
    with pytest.raises(Corrupted):
        verify_release(folder)


def test_an_added_file_or_link_is_found(root, adapter, index, tmp_path):
    folder = root / publish_parts(folder=root, index=index, **parts(adapter)).id
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Corrupted, match="does not belong"):
        verify_release(folder)
    (folder / "pytorch_model.bin").unlink()
    copy = tmp_path / "copy.json"
    copy.write_bytes((folder / "plan.json").read_bytes())
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to(copy)
    with pytest.raises(Corrupted, match="link"):
        verify_release(folder)


def test_publishing_over_a_damaged_release_says_so_instead_of_hiding_it(root, adapter, index):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    (root / release.id / "plan.json").unlink()
    with pytest.raises(Corrupted):
        publish_parts(folder=root, index=index, **parts(adapter))


def test_a_release_id_cannot_lead_out_of_the_store(root):
    for name in ("..", "../x", "/etc", "a/b", "", "blobs", ".lock", ".leases"):
        with pytest.raises(UserError):
            release_folder(root, name)


def test_the_adapter_hash_can_be_computed_again_from_the_release(root, adapter, index, tmp_path):
    release = publish_parts(folder=root, index=index, **parts(adapter))
    again = tmp_path / "again"
    again.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (again / name).write_bytes((root / release.id / name).read_bytes())
    assert folder_digest(again) == release.adapter_hash
