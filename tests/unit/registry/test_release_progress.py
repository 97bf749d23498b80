"""Transfers say how far they are: bytes done of bytes in all, the time left; standard output stays clean."""

import json
from dataclasses import replace

import pytest
import yaml
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.cli import main as cli
from graftwork.cli import progress
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.base import MIB
from graftwork.registry import deploy, ssh
from graftwork.registry.deploy import (
    export_release,
    import_release,
    pull_from_url,
    push_to_machine,
    push_to_url,
    report_bytes,
)
from graftwork.registry.project import open_store

WEIGHTS = 3 * MIB


class Recorder(NullReporter):
    def __init__(self) -> None:
        self.heard: list[tuple[str, float, float, float | None]] = []

    def progress(self, phase, done, total, *, seconds_left, detail):
        self.heard.append((phase, done, total, seconds_left))

    def of(self, phase: str) -> list[float]:
        return [done for one, done, _, _ in self.heard if one == phase]

    def total(self, phase: str) -> float:
        (total,) = {total for one, _, total, _ in self.heard if one == phase}
        return total


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(deploy, "BETWEEN_SECONDS", 0.0)
    root = tmp_path / "project"
    root.mkdir()
    settings = {"project": PROJECT, "data": {"logs": ["l"]}}
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(root), Recorder()) as opened:
        yield opened


@pytest.fixture
def release(work, tmp_path) -> str:
    adapter = write_adapter(tmp_path / "adapter", weights=bytes(WEIGHTS))
    return publish_parts(folder=open_store(work), index=work.releases, **parts(adapter)).id


@pytest.fixture
def other(work, tmp_path):
    """The same project on another machine."""
    root = tmp_path / "other"
    root.mkdir()
    (root / "graft.yaml").write_text((work.project.root / "graft.yaml").read_text())
    with use_project(open_project(root), Recorder()) as opened:
        yield opened


def require_told(reporter, *phases, times=1):
    for phase in phases:
        done = reporter.of(phase)
        assert done[-1] == reporter.total(phase) >= times * WEIGHTS / MIB, phase
        assert len(set(done)) > 3, phase


def test_an_archive_reports_progress_on_its_way_out_and_in(work, other, release, tmp_path):
    export_release(work, release, target=tmp_path / "a.tar")
    require_told(work.reporter, "check", "write", "read back")
    import_release(other, tmp_path / "a.tar")
    require_told(other.reporter, "unpack", "store", "check")


def test_a_store_at_a_url_reports_progress_on_the_way_there_and_back(work, other, release, tmp_path):
    url = f"file://{tmp_path}/far"
    push_to_url(work, release, url=url)
    require_told(work.reporter, "send and read back", times=2)
    pull_from_url(other, release, url=url)
    require_told(other.reporter, "store", "check")
    assert other.reporter.of("fetch")[-1] == other.reporter.total("fetch")
    again = Recorder()
    push_to_url(replace(work, reporter=again), release, url=url)
    require_told(again, "send and read back", times=2)


def test_a_push_over_ssh_reports_progress(work, release, tmp_path, monkeypatch):
    """Through a program in place of ssh that runs the command here."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("GRAFT_SSH", str(program))
    monkeypatch.setattr(ssh, "POLL_SECONDS", 0.001)
    assert push_to_machine(work, release, target=f"host:{tmp_path}/far", alias=None).sent
    assert work.reporter.of("send")[-1] == work.reporter.total("send") >= WEIGHTS / MIB
    assert (tmp_path / "far" / release / "manifest.json").is_file()


def test_the_time_left_is_what_remains_at_the_rate_so_far():
    now, heard = [0.0], Recorder()
    report = report_bytes(heard, clock=lambda: now[0])
    report("send", 0, 100 * MIB)
    now[0] = 0.05
    report("send", 1 * MIB, 100 * MIB)
    now[0] = 5.0
    report("send", 25 * MIB, 100 * MIB)
    now[0] = 6.0
    report("check", 0, 10 * MIB)
    report("check", 10 * MIB, 10 * MIB)
    assert heard.heard == [
        ("send", 0, 100, None),
        ("send", 25, 100, 15.0),
        ("check", 0, 10, None),
        ("check", 10, 10, None),
    ]


@pytest.mark.parametrize("way", ["export", "import", "push", "pull", "verify"])
def test_progress_goes_to_standard_error_and_json_stays_alone_on_standard_output(
    work, other, release, tmp_path, monkeypatch, capsys, way
):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    url = f"file://{tmp_path}/far"
    export_release(work, release, target=tmp_path / "a.tar")
    push_to_url(work, release, url=url)
    words = {
        "export": ["export", release, "--to", str(tmp_path / "b.tar"), "-C", str(work.project.root)],
        "import": ["import", str(tmp_path / "a.tar"), "-C", str(other.project.root)],
        "push": ["push", release, "--to", url, "-C", str(work.project.root)],
        "verify": ["verify", release, "-C", str(work.project.root)],
        "pull": ["pull", release, "--from", url, "-C", str(other.project.root)],
    }[way]
    monkeypatch.setattr("sys.argv", ["graft", "release", *words, "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    output = capsys.readouterr()
    assert left.value.code == 0, output
    assert json.loads(output.out)["id"] == release
    assert "check" in output.err
