"""The true training worker: asked to stop, killed, moved to another place; the adapter is the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graftwork.files.disk import Journal
from graftwork.pipeline.steps.train import make_job
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import WORKER_ENVIRONMENT
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.records.errors import EXIT_RESUME
from graftwork.records.run import TrainOutcome

WAIT = 300


@pytest.fixture
def job(small_project, listener, change_settings):
    """A run of some 100 steps on a tiny model."""
    change_settings(small_project, train={"epochs": 10, "checkpoint_every": 7, "validation_rows": 2})
    with use_project(open_project(small_project), listener) as work:
        return make_job(work, run_pipeline(work, upto="plan"))


def start(job, folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(job.model_copy(update={"folder": str(folder), **changes}).to_json())
    return subprocess.Popen(
        [sys.executable, "-m", "graftwork.train.worker", str(path)],
        env={**os.environ, **WORKER_ENVIRONMENT, "OMP_NUM_THREADS": "1"},
    )


def signal_after(worker, folder, steps, number):
    """Once so many lines are in the journal."""
    until = time.monotonic() + WAIT
    while len(Journal(folder / "steps.jsonl").read()) < steps:
        assert worker.poll() is None, "the worker ended before its time"
        assert time.monotonic() < until
        time.sleep(0.01)
    worker.send_signal(number)
    return worker.wait(WAIT)


def adapter(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_stopped_killed_and_moved_it_comes_to_the_same_adapter(job, tmp_path):
    whole, here, there = tmp_path / "whole", tmp_path / "here", tmp_path / "there"
    mirror = {"run": {**job.run, "mirror": f"file://{tmp_path}/mirror"}}
    assert start(job, whole).wait(WAIT) == 0

    stopped = signal_after(start(job, here, **mirror), here, 10, signal.SIGTERM)
    assert stopped == EXIT_RESUME
    output = json.loads((here / "error.json").read_text())
    assert output["error"] == "GracefulStop"
    assert "stopped cleanly after step" in output["what"]
    after = len(Journal(here / "steps.jsonl").read())

    assert signal_after(start(job, here, **mirror), here, after + 20, signal.SIGKILL) == -signal.SIGKILL
    # The place is gone; another one knows only the mirror.
    assert start(job, there, **mirror).wait(WAIT) == 0
    assert adapter(there) == adapter(whole)
    steps = [[line["step"], line["loss"]] for line in Journal(whole / "steps.jsonl").read()]
    last_word = {line["step"]: line["loss"] for line in Journal(there / "steps.jsonl").read()}
    assert [[step, last_word[step]] for step in sorted(last_word)] == steps
    words = [line["message"] for line in Journal(there / "messages.jsonl").read()]
    assert any("was fetched from the mirror" in word for word in words)
    outcome = TrainOutcome.from_json((there / "outcome.json").read_bytes())
    assert outcome.replay_identical is not False
    assert Path(outcome.adapter_folder) == there / "adapter"


def test_with_a_deadline_that_leaves_no_time_it_does_not_begin_a_step(job, tmp_path):
    worker = start(job, tmp_path / "late", deadline=time.time() + 1)
    assert worker.wait(WAIT) == EXIT_RESUME
    output = json.loads((tmp_path / "late" / "error.json").read_text())
    assert "after step 0 of" in output["what"]
    assert "the deadline is near" in output["what"]
