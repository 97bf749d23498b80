"""The fleet on the terminal."""

import io
import json
import sys

import pytest
from rich.console import Console

from graftwork.cli.main import main
from graftwork.cli.show import show
from graftwork.fleet.control import Controller
from graftwork.records.fleet import Reconciled


def test_machines_that_are_not_in_the_ledger_are_shown():
    out = io.StringIO()
    show(Console(file=out, width=100), Reconciled(unknown=("graft-0-1: not in this ledger",)))
    assert "unknown   graft-0-1: not in this ledger" in out.getvalue()


@pytest.fixture
def drill(tmp_path, monkeypatch, capsys):
    (tmp_path / "graft.yaml").write_text("project: p\ndata:\n  logs: [log.jsonl]\n")

    def run(*arguments):
        words = ["graft", "fleet", "drill", "--schedules", "4", "--project", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr().out

    return run


def test_a_drill_counts_the_runs_that_are_done(drill):
    code, text = drill()
    assert code == 0
    assert "12 runs, 12 of them done" in text
    code, text = drill("--json")
    assert json.loads(text)["runs"] == {"done": 12}


def test_a_drill_fails_and_names_a_run_that_neither_ends_nor_says_why(drill, monkeypatch):
    monkeypatch.setattr(Controller, "_judge", lambda _controller, job, *_arguments: job)
    code, text = drill()
    assert code == 1
    assert "seed 0: run0: its job" in text
    assert "never ended" in text
