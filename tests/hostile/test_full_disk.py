"""A disk that fills up under a dataset or a download: a clear error, nothing half, the same result later."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from hub_server import running_hub

from graftwork.api.project import open_project
from graftwork.files.dataset import read_rows
from graftwork.model.base import find_base, verify_base
from graftwork.model.hub import HubStore
from graftwork.records.errors import EnvironmentFailure


def write_project(folder, base, *, rows=200):
    chance = random.Random(3)
    lines = []
    for number in range(rows):
        question, answer = (_words(chance, count) for count in (60, 40))
        turns = [
            {"role": "user", "content": f"{number} {question}?"},
            {"role": "assistant", "content": f"{answer}."},
        ]
        lines.append(json.dumps({"id": str(number), "messages": turns}))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "graft.yaml").write_text(f"project: p\nbase: {base}\ndata: {{logs: [log.jsonl]}}\n")


def test_a_dataset_on_a_full_disk_is_whole_or_not_there_and_the_same_once_there_is_room(
    small_disk, tmp_path, tiny_base
):
    write_project(small_disk, tiny_base)
    project = open_project(small_disk)
    with project.open():
        pass  # the state database is made while there is room
    ballast = small_disk / "ballast"
    errors = []
    # More room each time: writing fails at another place.
    for room in (8, 40, 120, 300, 600):
        free = _free(small_disk) + (ballast.stat().st_size if ballast.exists() else 0)
        ballast.write_bytes(bytes(max(free - room * 1024, 0)))
        try:
            project.prepare()
        except EnvironmentFailure as error:
            errors.append(error)
        for folder in (small_disk / ".graft" / "datasets").glob("*"):
            assert not (folder / "manifest.json").exists() or read_rows(folder, "train")
    assert len(errors) >= 2
    for error in errors:
        assert "disk" in error.what, error
        assert error.fix
    ballast.unlink()
    made = project.prepare().dataset
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    write_project(roomy, tiny_base)
    assert made.content_hash == open_project(roomy).prepare().dataset.content_hash
    assert not [path for path in (small_disk / ".graft").rglob("*") if path.name.endswith(".tmp")]


def _words(chance, count):
    return " ".join("".join(chance.choices("abcdefghijklmnop", k=6)) for _ in range(count))


def _free(folder):
    return shutil.disk_usage(folder).free


def test_a_download_onto_a_disk_that_fills_up_ends_with_a_clear_error_and_goes_on_later(
    small_disk, tmp_path, monkeypatch
):
    weights = random.Random(1).randbytes(900_000)
    files = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
    files |= {"tokenizer_config.json": b"{}", "model.safetensors": weights}
    with running_hub() as server:
        server.public = True
        server.repositories["acme/small"] = {}
        server.commit("acme/small", files)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(small_disk / "hf"))
        monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        # Free when the download begins; somebody else fills the disk meanwhile.
        store = HubStore(tmp_path / "cache" / "hub", free_bytes=lambda _path: 1 << 40)
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(_free(small_disk) - 400_000))
        with pytest.raises(EnvironmentFailure, match="the disk is full") as caught:
            find_base("acme/small", project_folder=tmp_path, weights=True, store=store)
        assert "free some space" in caught.value.fix
        ballast.unlink()
        verify_base(find_base("acme/small", project_folder=tmp_path, weights=True, store=store))
