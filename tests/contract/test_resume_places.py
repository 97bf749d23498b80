"""A training run that is killed again and again, and goes on at another place each time, keeps its bytes.

`python benchmarks/resume_places.py` runs it with 20 kills; `make test-ray` and `make test-slurm` with six.
"""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from ray_cluster import running_ray
from slurm_cluster import PATH, running_slurm
from ssh_server import running_sshd

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from place_contract import processes_with

from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import FleetRequest, follow, get_job, start_run
from graftwork.fleet.project import open_place
from graftwork.pipeline.table import run_pipeline
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.run import TrainOutcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("GRAFT_RESUME_KILLS", "6"))
SEED = int(os.environ.get("GRAFT_RESUME_SEED", "0"))
REPORT = os.environ.get("GRAFT_RESUME_REPORT", "")
"""Where to write what happened, as JSON."""
PAUSE = threading.Event()


def write_project(folder, base):
    settings = {
        "project": "moving",
        "base": str(base),
        "data": {"logs": ["logs/*.jsonl"], "test": 0.3, "validation": 0.1, "question_similarity": 0.95},
        "train": {"rank": 2, "epochs": 40, "batch_size": 4, "checkpoint_every": 5, "threads": 1},
    }
    (folder / "logs").mkdir(parents=True)
    rows = [
        {
            "id": str(number),
            "messages": [
                {"role": "user", "content": f"Where is the {name} number {number} of row {number % 7}?"},
                {"role": "assistant", "content": f"The {name} stands by gate {number % 11}."},
            ],
        }
        for number, name in enumerate(("fern", "moss", "ivy", "lotus", "maple", "willow", "cedar") * 9)
    ]
    (folder / "logs" / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The `fleet` settings with every place that this machine can have, and their names."""
    with ExitStack() as stack:
        settings, names = {}, ["local"]
        (tmp_path / "sshd").mkdir()
        monkeypatch.setenv("GRAFT_SSH", stack.enter_context(running_sshd(tmp_path / "sshd")))
        far = {"address": "127.0.0.1", "python": sys.executable, "folder": str(tmp_path / "far")}
        settings["hosts"] = {"far": far}
        names.append("ssh")
        if shutil.which("slurmctld", path=PATH) and os.geteuid() == 0:
            (tmp_path / "slurm").mkdir()
            conf = stack.enter_context(running_slurm(tmp_path / "slurm"))
            monkeypatch.setenv("SLURM_CONF", str(conf))
            settings["slurm"] = {"folder": str(tmp_path / "shared")}
            names.append("slurm")
        if importlib.util.find_spec("ray"):
            (tmp_path / "ray").mkdir()
            cluster = stack.enter_context(running_ray(tmp_path / "ray", nodes=0, dashboard=True))
            settings["ray"] = {
                "jobs": f"http://{cluster.head_node.webui_url}",
                "folder": str(tmp_path / "shared"),
                "token": str(tmp_path / "ray" / "token"),
            }
            names.append("ray")
        yield settings, names


def kill_processes(label):
    """Kill -9, as the kernel or a lost node would: the worker, its runner and its bootstrap."""
    for process in processes_with(f"GRAFT_FLEET_JOB={label}"):
        subprocess.run(["kill", "-9", process.name], check=False, capture_output=True)


def wait_for_step(place, job, step, seconds=300.0):
    """Whether the job has come so far; False if it ended before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = place.poll(job.placed)
        if found.beat is not None and found.beat.phase == "training" and found.beat.done >= step:
            return True
        if found.phase == "ended":
            return False
        PAUSE.wait(0.05)
    pytest.fail(f"the job did not come to step {step}: {place.log(job.placed)[-2000:]}")
    return False


def test_a_run_that_is_killed_at_random_and_moved_keeps_its_bytes(tmp_path, tiny_base, places):
    settings, names = places
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    write_project(whole, tiny_base)
    shutil.copytree(whole, moved)
    with use_project(open_project(whole), NullReporter()) as work:
        expected = run_pipeline(work, upto="train").get("train", TrainOutcome)
    content = yaml.safe_load((moved / "graft.yaml").read_text())
    (moved / "graft.yaml").write_text(yaml.safe_dump({**content, "fleet": settings}))
    chance, went, killed_at, step = random.Random(SEED), [], [], 0.0
    with use_project(open_project(moved), NullReporter()) as work:
        while len(went) < KILLS:
            name = chance.choice([name for name in names if name != (went or [""])[-1]])
            job = start_run(work, FleetRequest(name), confirm=lambda _quote: True)
            place = open_place(work, name)
            target = step + chance.randint(1, 12)
            if not wait_for_step(place, job, target):
                follow(work, job, poll_seconds=0.1)
                break
            kill_processes(job.label)
            place.stop(job.placed, at_once=True)
            ended = follow(work, job, poll_seconds=0.2)
            assert ended.state != "done"
            went.append(name)
            killed_at.append(int(target))
            steps = [
                int(path.name[-6:]) for path in (work.project.runs / job.run_id).glob("checkpoints/step-*")
            ]
            step = float(max(steps, default=0))
        name = chance.choice(names)
        last = start_run(work, FleetRequest(name), confirm=lambda _quote: True)
        assert follow(work, last, poll_seconds=0.2).state == "done", fleet_jobs.read_log(work, last)
        outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
        assert get_job(work, last.id).state == "done"
    same = outcome.adapter_hash == expected.adapter_hash
    if REPORT:
        steps = {"killed_after_step": killed_at, "steps": outcome.steps}
        found = {"places": names, "kills": len(went), "killed_at": went, "finished_at": name}
        Path(REPORT).write_text(json.dumps({**found, **steps, "same_adapter_bytes": same}))
    assert len(went) == KILLS
    assert same
