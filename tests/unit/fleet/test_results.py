"""Results from another machine: what is taken into the folder of the run, and what is not."""

import io
import json
import tarfile

import pytest

from graftwork.fleet.results import take_results
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
