"""The true training worker: asked to stop, killed, moved to another place; the adapter is the same."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flows import ONE_THREAD, opened

from graftwork.files.disk import Journal
from graftwork.pipeline.steps.train import make_job
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import WORKER_ENVIRONMENT
from graftwork.records.errors import EXIT_RESUME
from graftwork.records.run import TrainOutcome


@pytest.fixture
def job(released_project, change_settings):
    """A run of some 50 steps on a tiny model."""
    change_settings(released_project, train={"epochs": 5, "checkpoint_every": 7, "validation_rows": 2})
    with opened(released_project) as work:
        return make_job(work, run_pipeline(work, upto="plan"))


def start(job, folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(job.model_copy(update={"folder": str(folder), **changes}).to_json())
    command = [sys.executable, "-m", "graftwork.train.worker", str(path)]
    return subprocess.Popen(command, env={**ONE_THREAD, **WORKER_ENVIRONMENT})


def steps_of(folder):
    return Journal(folder / "steps.jsonl").read()


def signal_after(worker, folder, steps, number):
    """Once so many lines are in the journal."""
    while len(steps_of(folder)) < steps:
        assert worker.poll() is None, "the worker ended before its time"
        time.sleep(0.01)
    worker.send_signal(number)
    return worker.wait()


def test_stopped_killed_and_moved_it_comes_to_the_same_adapter(job, tmp_path):
    whole, here, there = tmp_path / "whole", tmp_path / "here", tmp_path / "there"
    mirror = {"run": {**job.run, "mirror": f"file://{tmp_path}/mirror"}}
    assert start(job, whole).wait() == 0

    assert signal_after(start(job, here, **mirror), here, 9, signal.SIGTERM) == EXIT_RESUME
    error = json.loads((here / "error.json").read_text())
    assert error["error"] == "GracefulStop"
    assert "stopped cleanly after step" in error["what"]
    after = len(steps_of(here))

    assert signal_after(start(job, here, **mirror), here, after + 9, signal.SIGKILL) == -signal.SIGKILL
    # The place is gone; another one knows only the mirror.
    shutil.rmtree(here)
    assert start(job, there, **mirror).wait() == 0
    adapters = [folder / "adapter" / "adapter_model.safetensors" for folder in (there, whole)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    # What a step ended with, the last time that it was done.
    losses = {line["step"]: line["loss"] for line in steps_of(there)}
    assert sorted(losses.items()) == [(line["step"], line["loss"]) for line in steps_of(whole)]
    messages = [line["message"] for line in Journal(there / "messages.jsonl").read()]
    assert any("was fetched from the mirror" in message for message in messages)
    outcome = TrainOutcome.from_json((there / "outcome.json").read_bytes())
    assert outcome.replay_identical is not False
    assert Path(outcome.adapter_folder) == there / "adapter"


def test_with_a_deadline_that_leaves_no_time_it_does_not_begin_a_step(job, tmp_path):
    worker = start(job, tmp_path / "late", deadline=time.time() + 1)
    assert worker.wait() == EXIT_RESUME
    error = json.loads((tmp_path / "late" / "error.json").read_text())
    assert "after step 0 of" in error["what"]
    assert "the deadline is near" in error["what"]
