"""Killed with -9 at many moments of one run, inside the writes too: the result is what it would be."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.files.disk import Journal
from graftwork.process.worker import WORKER_ENVIRONMENT
from graftwork.train.run_folder import find_replay, read_journal, read_steps

KILLS = 50


class Server:
    def __init__(self, base):
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("kill_server.py"), str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
        )
        self.steps = self._answer()["steps"]

    def train(self, folder, **order):
        """The exit code of one attempt; negative for a signal."""
        print(json.dumps({"folder": str(folder), **order}), file=self._process.stdin, flush=True)
        return self._answer()["code"]

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=300)

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, "the server died"
        return json.loads(line)


@pytest.fixture
def server(tiny_base):
    server = Server(tiny_base)
    yield server
    server.close()


def learned(folder):
    """All that must be the same: the adapter's bytes, every step, every order."""
    order = {line[0]: line[1:] for line in Journal(folder / "order.jsonl").read()}
    steps = [(s.step, s.loss, s.gradient_norm, s.learning_rate, s.tokens) for s in read_steps(folder)]
    return (folder / "adapter.safetensors").read_bytes(), steps, order


def half_made(folder):
    return len(list((folder / "checkpoints").glob(".step-*.part")))


@pytest.mark.parametrize("kills", [6, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills_over_one_run_leave_no_trace_in_the_result(server, tmp_path, kills):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert server.train(whole) == 0
    chance = random.Random(20)
    inside, killed_at = 0, []
    for number in range(kills):
        target = 1 + number * (server.steps - 2) // kills
        # Every second kill comes from outside at any moment; the others at a touch of the disk.
        when = {"pause": chance.uniform(0, 0.06)} if number % 2 else {"point": chance.randint(1, 90)}
        code = server.train(cut, after_step=target, **when)
        assert code == -signal.SIGKILL, f"kill {number} came too late"
        inside += half_made(cut)
        killed_at.append(max((step.step for step in read_steps(cut)), default=0))
    assert server.train(cut) == 0

    assert inside >= kills // 5, "too few of the kills hit a checkpoint that was being written"
    assert len(set(killed_at)) > kills // 2, "the kills did not spread over the run"
    assert learned(cut) == learned(whole)
    replay = find_replay(read_journal(cut))
    steps, identical = replay
    assert identical
    assert steps == len(read_journal(cut)) - server.steps > kills
    assert half_made(cut) == 0
