"""The bundle of a job: named by its content, checked by the place, run with the standard library alone."""

import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fleet_samples import trial_bundle, trial_parts

from graftwork.fleet import bootstrap
from graftwork.fleet.bundle import BUNDLE_FILE, read_bundle
from graftwork.fleet.trial_worker import TrialJob, _resume
from graftwork.records.errors import Damaged


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The unpacked wheel, once for all jobs of this file."""
    return tmp_path_factory.mktemp("cache")


def start(bundle, work, *arguments, cache):
    command = [sys.executable, str(bundle / "bootstrap.py"), "--work", str(work), "--cache", str(cache)]
    command += map(str, arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def result(work):
    return (work / "run" / "adapter" / "trial.txt").read_text()


def test_the_same_parts_make_the_same_bundle_and_other_parts_another(tmp_path):
    first, bundle = trial_bundle(tmp_path)
    again, same = trial_bundle(tmp_path)
    other, _ = trial_bundle(tmp_path, job={"steps": 4})
    assert first == again
    assert bundle == same
    assert other != first
    assert read_bundle(first) == bundle
    assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == sorted((first.name, other.name))


def test_a_changed_or_missing_file_of_a_bundle_is_found(tmp_path):
    folder, _ = trial_bundle(tmp_path)
    (folder / "job.json").write_text("{}")
    with pytest.raises(Damaged, match=r"job\.json has other bytes"):
        read_bundle(folder)
    (folder / BUNDLE_FILE).unlink()
    with pytest.raises(Damaged, match="no bundle"):
        read_bundle(folder)


def test_the_bootstrap_needs_only_the_standard_library():
    tree = ast.parse(Path(bootstrap.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_a_job_that_is_stopped_goes_on_elsewhere_to_the_same_bytes(tmp_path, cache):
    """Local, then another folder that knows only the bundle; the mirror has what a reader needs."""
    slow = {"steps": 6, "step_seconds": 0.4}
    first, _ = trial_bundle(tmp_path, job=slow, mirror=f"file://{tmp_path}/mirror")
    process = start(first, tmp_path / "first", cache=cache)
    saved = tmp_path / "first" / "run" / "checkpoints"
    pause = threading.Event()
    while not (saved / "step-000002").exists():
        assert process.poll() is None, finish(process)
        pause.wait(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert (tmp_path / "mirror" / "run1" / "run" / "heartbeat.json").exists()

    newest = max(saved.iterdir())
    second, bundle = trial_bundle(tmp_path, job={"steps": 6}, checkpoint=newest)
    assert bundle.resume_step == int(newest.name[-6:])
    code, output = finish(start(second, tmp_path / "second", cache=cache))
    assert code == 0, output
    whole = "trial"
    for _ in range(6):
        whole = hashlib.sha256(whole.encode()).hexdigest()
    assert result(tmp_path / "second") == whole
    assert json.loads((tmp_path / "second" / "exit.json").read_text())["code"] == 0
    assert not (tmp_path / "second" / "run" / "checkpoints" / "step-000001").exists()


def test_a_job_ends_in_order_at_its_time_limit(tmp_path, cache):
    folder, _ = trial_bundle(tmp_path, job={"steps": 1000, "step_seconds": 0.05})
    code, output = finish(start(folder, tmp_path / "work", "--seconds", 5, cache=cache))
    assert code == 75, output
    step, _ = _resume(tmp_path / "work" / "run" / "checkpoints", "")
    assert 0 < step < 1000
    # A restart in the same folder does not get more time.
    assert bootstrap.main(["--bundle", str(folder), "--work", str(tmp_path / "work"), "--seconds", "1"]) == 75


def test_a_damaged_bundle_is_refused_at_the_place(tmp_path):
    folder, _ = trial_bundle(tmp_path)
    (folder / "job.json").write_text("{}")
    assert bootstrap.main(["--bundle", str(folder), "--work", str(tmp_path / "work")]) == 3
    error = json.loads((tmp_path / "work" / "run" / "error.json").read_text())
    assert "job.json" in error["what"]
    assert error["fix"]


def test_packages_that_cannot_be_installed_are_named(tmp_path, monkeypatch):
    folder, _ = trial_bundle(tmp_path)
    bundle = json.loads((folder / BUNDLE_FILE).read_text()) | {"base": {"kind": "hub"}}
    monkeypatch.setattr(bootstrap, "NEEDED", ("no_such_package",))
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="No matching distribution")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_words, **_options: failed)
    with pytest.raises(bootstrap.Trouble, match="no_such_package are missing") as caught:
        bootstrap.find_python(folder, bundle, tmp_path)
    assert "No matching distribution" in caught.value.why


def test_jobs_that_start_together_install_their_packages_once(tmp_path, monkeypatch):
    folder, _ = trial_bundle(tmp_path)
    bundle = json.loads((folder / BUNDLE_FILE).read_text()) | {"base": {"kind": "hub"}}
    monkeypatch.setattr(bootstrap, "NEEDED", ("no_such_package",))
    installing, go_on, steps, found = threading.Event(), threading.Event(), [], []

    def run(words, **_options):
        steps.append(words)
        Path(words[-1] if "venv" in words else tmp_path).mkdir(exist_ok=True)
        installing.set()
        assert go_on.wait(60)
        return subprocess.CompletedProcess(words, 0, stdout="", stderr="")

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    jobs = [
        threading.Thread(target=lambda: found.append(bootstrap.find_python(folder, bundle, tmp_path)))
        for _ in range(2)
    ]
    jobs[0].start()
    assert installing.wait(60)
    jobs[1].start()
    jobs[1].join(0.2)
    go_on.set()
    for job in jobs:
        job.join(60)
    assert len(steps) == 2
    assert len(found) == 2
    assert len(set(found)) == 1


def test_a_hard_stop_finds_every_process_of_the_job(tmp_path, monkeypatch):
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found by /proc")
    monkeypatch.setenv(bootstrap.JOB_VARIABLE, f"job-{os.getpid()}")
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    child, other = subprocess.Popen(words), subprocess.Popen(words, start_new_session=True)
    while b"GRAFT_FLEET_JOB" not in Path(f"/proc/{other.pid}/environ").read_bytes():
        pass
    # This process has it too, as the bootstrap would; it was started without.
    bootstrap.kill_all(child)
    assert other.wait(30) == -signal.SIGKILL


def test_trial_parts_are_a_valid_job():
    assert TrialJob.model_validate({**trial_parts().job, "run_id": "run1"}).steps == 3
