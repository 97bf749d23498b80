"""Results from another machine: what is taken into the folder of the run, and what is not."""

import io
import json
import tarfile

import pytest

from graftwork.fleet.results import take_files, take_results
from graftwork.records.errors import Damaged


def packed(**files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    stream.seek(0)
    return stream


@pytest.mark.parametrize("prefix", ["", "./", ".//"])
def test_files_that_are_kept_here_are_not_replaced_under_any_spelling(tmp_path, prefix):
    (tmp_path / "job.json").write_text("here")
    take_results(packed(**{f"{prefix}{name}": b"there" for name in ("job.json", "lock", "log")}), tmp_path)
    assert (tmp_path / "job.json").read_text() == "here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "log"]


@pytest.mark.parametrize("name", ["outcome.json", "./outcome.json"])
def test_an_outcome_without_its_adapter_is_refused_under_any_spelling(tmp_path, name):
    outcome = json.dumps({"adapter_hash": "0" * 64, "adapter_folder": "/elsewhere"}).encode()
    with pytest.raises(Damaged, match="other bytes"):
        take_results(packed(**{name: outcome}), tmp_path)
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize("keep", [0, 100, 600, 1100])
def test_results_that_end_too_early_or_are_none_are_damaged(tmp_path, keep):
    whole = packed(log=bytes(4000)).read()
    with pytest.raises(Damaged):
        take_results(io.BytesIO(whole[:keep] or b"no archive" * 100), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lock/x", "job.json/x", "outcome.json/x", "a\0b", "a\udcff\ud800"])
def test_names_that_would_stand_in_the_way_of_the_run_are_refused(tmp_path, name):
    with pytest.raises(Damaged):
        take_files([(name, b"there")], tmp_path)
    assert list(tmp_path.iterdir()) == []
