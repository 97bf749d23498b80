"""The embedded base says what its weights are, and adapters name a base that PEFT can load."""

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graftwork.files.disk import file_digest
from graftwork.model import base as base_module
from graftwork.model.base import (
    EMBEDDED,
    HUB_ID,
    README,
    copy_base,
    find_base,
    loadable_name,
    note_on_weights,
)
from graftwork.records.errors import EnvironmentFailure, UserError


def test_the_embedded_base_is_named_by_an_id_that_the_hub_knows():
    assert loadable_name(EMBEDDED) == HUB_ID == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert loadable_name("models/own") == "models/own"


def test_the_note_says_that_the_weights_are_expanded_and_not_the_official_ones():
    note = note_on_weights(EMBEDDED)
    for word in ("4-bit", "float32", HUB_ID, "other logits", "graft release export --base"):
        assert word in note
    assert note_on_weights("models/own") == ""


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_the_embedded_base_has_the_same_bytes_offline_and_online(
    embedded_base, tmp_path, monkeypatch, offline
):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    subprocess.run([sys.executable, "-m", "graftwork.model.base", str(tmp_path / "base")], check=True)
    converted = {name: file_digest(tmp_path / "base" / name) for name in embedded_base.files}
    assert converted == embedded_base.files


def test_the_file_that_the_note_names_is_the_one_of_the_package():
    from graftwork.model.base import gguf_file

    assert "Q4_1" in gguf_file().name
    assert "Q4_1" in note_on_weights(EMBEDDED)


def test_of_two_processes_that_need_the_embedded_base_first_one_converts_and_one_waits(
    tiny_base, tmp_path, monkeypatch
):
    """Two on one machine: locks are held by open files, also within one process."""
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path))
    asked, go_on, converted = threading.Event(), threading.Event(), []
    hold = base_module.hold_lock

    def convert(folder):
        converted.append(folder)
        assert go_on.wait(300)
        shutil.copytree(tiny_base, folder)

    def hold_and_note(folder):
        if converted:
            asked.set()
        return hold(folder)

    monkeypatch.setattr(base_module, "_convert_in_child", convert)
    monkeypatch.setattr(base_module, "hold_lock", hold_and_note)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(find_base, EMBEDDED, project_folder=tmp_path) for _ in range(2)]
        assert asked.wait(300)
        go_on.set()
        first, second = (future.result() for future in found)
    assert first == second
    assert len(converted) == 1


def test_the_exported_base_is_the_very_base(tiny_base, tmp_path):
    base = find_base(str(tiny_base), project_folder=tmp_path)
    size = copy_base(base, tmp_path / "copy")
    copied = find_base(str(tmp_path / "copy"), project_folder=tmp_path)
    assert copied.revision == base.revision
    assert size == sum((Path(base.folder) / name).stat().st_size for name in base.files)
    assert base.revision in (tmp_path / "copy" / README).read_text()


def test_the_exported_base_overwrites_nothing(tiny_base, tmp_path):
    base = find_base(str(tiny_base), project_folder=tmp_path)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        copy_base(base, tmp_path / "copy")


def test_a_base_that_changed_is_not_exported(tiny_base, tmp_path):
    base = find_base(str(tiny_base), project_folder=tmp_path)
    wrong = base.model_copy(update={"files": {**base.files, "config.json": "0" * 64}})
    with pytest.raises(EnvironmentFailure, match="changed"):
        copy_base(wrong, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
