"""The start of a job at a provider: results are copied while it runs, whatever happens to the folder."""

import errno
import json

import pytest
from fleet_samples import with_vanishing_folder

from graftwork.fleet import far_start
from graftwork.fleet.far_start import FolderCarrier, report_failure


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work" / "run").mkdir(parents=True)
    (tmp_path / "work" / "run" / "journal.jsonl").write_text("{}\n")
    (tmp_path / "work" / "exit.json").write_text("{}")
    return tmp_path / "work"


def test_a_mounted_folder_that_is_gone_for_a_while_does_not_end_the_job(work, tmp_path, monkeypatch, capsys):
    out = tmp_path / "mount" / "out"
    (tmp_path / "mount").write_text("not a folder")
    carrier = FolderCarrier(out)
    monkeypatch.setattr(carrier, "pause", 0.0)
    carrier.carry(work)
    assert "could not be copied" in capsys.readouterr().out
    assert not carrier.wants_stop()
    carrier.carry(work, last=True)
    assert not out.exists()
    (tmp_path / "mount").unlink()
    carrier.carry(work, last=True)
    assert (out / "run" / "journal.jsonl").read_text() == "{}\n"
    assert (out / "exit.json").exists()


def test_the_last_copy_is_tried_again(work, tmp_path, monkeypatch):
    carrier = FolderCarrier(tmp_path / "out")
    carrier.pause, copy, failures = 0.0, carrier._copy, [OSError(errno.EIO, "gone")] * 2

    def fail_first(*words, **options):
        if failures:
            raise failures.pop()
        copy(*words, **options)

    monkeypatch.setattr(carrier, "_copy", fail_first)
    carrier.carry(work, last=True)
    assert (tmp_path / "out" / "exit.json").exists()


def test_a_file_that_is_removed_while_files_are_copied_is_passed_over(work, tmp_path, monkeypatch):
    gone = work / "run" / "gone"
    monkeypatch.setattr(
        far_start,
        "results",
        lambda _work: iter([("run/gone", gone), ("run/journal.jsonl", work / "run" / "journal.jsonl")]),
    )
    FolderCarrier(tmp_path / "out").carry(work)
    assert (tmp_path / "out" / "run" / "journal.jsonl").exists()


def test_a_folder_that_is_removed_while_files_are_listed_is_passed_over(work, tmp_path, monkeypatch, capsys):
    part = with_vanishing_folder(work / "run", monkeypatch)
    FolderCarrier(tmp_path / "out").carry(work)
    assert not part.exists()
    assert (tmp_path / "out" / "run" / "journal.jsonl").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("failure", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk of the machine is full"),
        (ValueError("job.json of the bundle did not arrive; send it again"), "did not arrive"),
    ],
)
def test_a_start_that_fails_says_what_and_how_to_fix_it(failure, what, tmp_path):
    report_failure(tmp_path, failure)
    ended = json.loads((tmp_path / "exit.json").read_text())
    error = json.loads((tmp_path / "run" / "error.json").read_text())
    assert what in ended["reason"]
    assert error["what"] == ended["reason"]
    assert error["fix"]


def test_a_start_that_fails_on_a_full_disk_writes_what_it_can(tmp_path, capsys):
    (tmp_path / "run").write_text("not a folder")
    report_failure(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert "the disk of the machine is full" in capsys.readouterr().err
