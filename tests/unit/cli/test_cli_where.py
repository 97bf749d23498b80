"""Which project a command means, and what is said when it is interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from graftwork.cli.main import main

ROW = {"ask": "Where is the fern?", "say": "By the pond."}
PROJECT = "project: p\ndata:\n  logs: log.jsonl\n  mapping: {question: ask, reply: say}\n"


@pytest.fixture
def graft(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.fixture
def project(tmp_path, monkeypatch):
    inside = tmp_path / "project"
    (inside / "a" / "b").mkdir(parents=True)
    (inside / "graft.yaml").write_text(PROJECT)
    (tmp_path / "other.jsonl").write_text(json.dumps(ROW) + "\n")
    (inside / "log.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(inside)
    return inside


def test_named_files_are_audited_with_the_settings_of_the_project(graft, project):
    _, out, err = graft("data", "audit", "../other.jsonl", "--json")
    assert json.loads(out)["readable"] == 1
    assert f"using the data settings of {project / 'graft.yaml'}" in err.replace("\n", "")
    _, out, err = graft("data", "audit", "log.jsonl", "-C", project, "--json")
    assert json.loads(out)["readable"] == 1
    assert "data settings" in err


def test_outside_of_a_project_named_files_are_audited_with_the_defaults(graft, project, monkeypatch):
    monkeypatch.chdir(project.parent)
    _, out, err = graft("data", "audit", "other.jsonl", "--json")
    assert json.loads(out)["readable"] == 0
    assert "data settings" not in err


def test_a_project_is_searched_for_upwards_and_named_once(graft, project, monkeypatch):
    monkeypatch.chdir(project / "a" / "b")
    code, out, err = graft("status", "--json")
    assert code == 0
    assert json.loads(out)["steps"]
    assert err.replace("\n", "").count(f"project: {project / 'graft.yaml'}") == 1
    _, out, _ = graft("data", "audit", "--json")
    assert json.loads(out)["files"] == ["log.jsonl"]


def test_the_project_of_the_working_folder_needs_no_words(graft, project):
    assert "project:" not in graft("status", "--json")[2]
    assert "project:" not in graft("status", "--json", "-C", project)[2]


def test_without_a_project_the_working_folder_is_named(graft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = graft("status", "--json")
    assert code == 2
    assert json.loads(out)["where"] == str(tmp_path)


def test_ctrl_c_explains_how_to_continue(graft, project, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("graftwork.data.prepare.audit_logs", interrupt)
    try:
        code, out, err = graft("data", "audit", "log.jsonl")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert out == ""
    assert "interrupted; finished work is kept: run the same command again" in " ".join(err.split())


@contextmanager
def children_take_ctrl_c():
    """A shell starts background jobs with SIGINT ignored, and children inherit that."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_during_an_audit_explains_how_to_continue(project):
    """The audit waits for standard input, which nobody closes."""
    with children_take_ctrl_c():
        message = subprocess.Popen(
            [sys.executable, "-m", "graftwork.cli.main", "data", "audit", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=project,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    # A process that says nothing must not keep the tests waiting; its imports may take a minute.
    guard = threading.Timer(600, message.kill)
    guard.start()
    with message:
        assert message.stderr is not None
        # It has begun once it says whose settings it uses.
        first = message.stderr.readline()
        message.send_signal(signal.SIGINT)
        rest = message.stderr.read()
    guard.cancel()
    assert "data settings" in first
    assert message.returncode == 130
    assert "finished work is kept" in rest
    assert "Traceback" not in rest


def test_ctrl_c_that_python_drops_in_a_callback_is_sent_again():
    """Imports end with a callback in which Python drops exceptions."""
    program = """
import signal, threading, weakref
from graftwork.cli.main import repeat_lost_interrupts

class Thing: pass

repeat_lost_interrupts()
thing = Thing()
mark = weakref.ref(thing, lambda _mark: signal.raise_signal(signal.SIGINT))
try:
    del thing
    threading.Event().wait(600)
except KeyboardInterrupt:
    print("interrupted")
"""
    with children_take_ctrl_c():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""
