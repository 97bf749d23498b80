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
from fleet_samples import trial_bundle, trial_parts, with_vanishing_folder
from trial_worker import TrialJob, _resume

from graftwork.fleet import bootstrap, far_start
from graftwork.fleet.bundle import BUNDLE_FILE, read_bundle
from graftwork.fleet.runner import MOST_CRASHES, LogFollower, RunMirror
from graftwork.process.clock import read_waited
from graftwork.records.errors import Corrupted


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The unpacked wheel, once for all jobs of this file."""
    return tmp_path_factory.mktemp("cache")


def start(bundle, work, *arguments, cache):
    command = [sys.executable, str(bundle / "bootstrap.py"), "--work", str(work), "--cache", str(cache)]
    command += map(str, arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def reason(work):
    return json.loads((work / "exit.json").read_text())["reason"]


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
    with pytest.raises(Corrupted, match=r"job\.json does not match the hash"):
        read_bundle(folder)
    (folder / BUNDLE_FILE).unlink()
    with pytest.raises(Corrupted, match="not the bundle"):
        read_bundle(folder)


def test_the_bootstrap_needs_only_the_standard_library():
    tree = ast.parse(Path(bootstrap.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_a_job_that_is_stopped_goes_on_elsewhere_to_the_same_bytes(tmp_path, cache):
    """Local, then another folder that knows only the bundle; the mirror has what a reader needs."""
    slow = {"steps": 60, "step_seconds": 0.4}
    first, _ = trial_bundle(tmp_path, job=slow, mirror=f"file://{tmp_path}/mirror")
    process = start(first, tmp_path / "first", cache=cache)
    saved = tmp_path / "first" / "run" / "checkpoints"
    pause = threading.Event()
    while len(list(saved.glob("step-*"))) < 2:
        assert process.poll() is None, finish(process)
        pause.wait(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert reason(tmp_path / "first").startswith("stopped by a signal from the place; stopped cleanly")
    assert (tmp_path / "mirror" / "run1" / "run" / "heartbeat.json").exists()
    waited = read_waited(tmp_path / "first" / "run")
    assert waited > 0

    newest = max(saved.iterdir())
    second, bundle = trial_bundle(tmp_path, job={"steps": 60}, checkpoint=newest)
    assert bundle.resume_step == int(newest.name[-6:])
    code, output = finish(start(second, tmp_path / "second", cache=cache))
    assert code == 0, output
    whole = "trial"
    for _ in range(60):
        whole = hashlib.sha256(whole.encode()).hexdigest()
    assert result(tmp_path / "second") == whole
    assert read_waited(tmp_path / "second" / "run") > waited, "the time of both places"
    assert json.loads((tmp_path / "second" / "exit.json").read_text())["code"] == 0
    assert not (tmp_path / "second" / "run" / "checkpoints" / "step-000001").exists()


def test_a_job_ends_in_order_at_its_time_limit(tmp_path, cache):
    folder, _ = trial_bundle(tmp_path, job={"steps": 100_000, "step_seconds": 0.05})
    work = tmp_path / "work"
    code, output = finish(start(folder, work, "--seconds", 5, cache=cache))
    assert code == 75, output
    step, _ = _resume(work / "run" / "checkpoints", "")
    assert step < 100_000
    assert reason(work).startswith("its time limit was reached; ")
    # A restart in the same folder does not get more time.
    assert bootstrap.main(["--bundle", str(folder), "--work", str(work), "--seconds", "1"]) == 75


def test_a_damaged_bundle_is_refused_at_the_place(tmp_path):
    folder, _ = trial_bundle(tmp_path)
    (folder / "job.json").write_text("{}")
    assert bootstrap.main(["--bundle", str(folder), "--work", str(tmp_path / "work")]) == 3
    error = json.loads((tmp_path / "work" / "run" / "error.json").read_text())
    assert "job.json" in error["what"]
    assert error["fix"]


def test_an_older_python_at_the_place_is_explained(tmp_path, monkeypatch):
    folder, _ = trial_bundle(tmp_path)
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4))
    assert bootstrap.main(["--bundle", str(folder), "--work", str(tmp_path / "work")]) == 3
    assert reason(tmp_path / "work") == "the machine has Python 3.10"
    error = json.loads((tmp_path / "work" / "run" / "error.json").read_text())
    assert "3.11" in error["why"]
    assert "`python`" in error["fix"]


@pytest.mark.parametrize("module", [bootstrap, far_start])
def test_an_older_python_reads_what_starts_a_job(module):
    """It must come as far as the message: Python 3.8 knows no `match`, and reads annotations as text."""
    source = Path(module.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert "from __future__ import annotations" in source


def test_a_full_disk_at_the_place_is_explained_and_not_left_full(tmp_path, monkeypatch, capsys):
    folder, _ = trial_bundle(tmp_path)

    def fill(_archive, target):
        Path(target).mkdir()
        (Path(target) / "part").write_text("half a file")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(bootstrap.zipfile.ZipFile, "extractall", fill)
    work, cache = tmp_path / "work", tmp_path / "cache"
    cache.mkdir()
    assert bootstrap.main(["--bundle", str(folder), "--work", str(work), "--cache", str(cache)]) == 3
    error = json.loads((work / "run" / "error.json").read_text())
    assert reason(work) == error["what"] == "the disk of the machine is full"
    assert "free some space" in error["fix"]
    assert not list(cache.iterdir())
    # Where not even the reason can be written, it is in the log.
    monkeypatch.setattr(
        bootstrap, "write", lambda path, _content: raise_error(OSError(28, "full", str(path)))
    )
    assert bootstrap.main(["--bundle", str(folder), "--work", str(work), "--cache", str(cache)]) == 3
    assert "exit.json could not be written" in capsys.readouterr().err


def raise_error(error):
    raise error


def test_a_mirror_that_vanishes_does_not_stop_the_job_or_lose_its_result(tmp_path, cache):
    (tmp_path / "gone").write_text("what was a folder")
    folder, _ = trial_bundle(tmp_path, mirror=f"file://{tmp_path}/gone/mirror")
    code, output = finish(start(folder, tmp_path / "work", cache=cache))
    assert code == 0, output
    assert "the mirror failed" in output
    assert "Traceback" not in output
    assert result(tmp_path / "work")


def test_a_checkpoint_that_goes_while_a_run_is_mirrored_does_not_end_the_job(tmp_path, monkeypatch):
    part = with_vanishing_folder(tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "steps.jsonl").write_text("{}\n")
    RunMirror(f"file://{tmp_path}/mirror", "run1").copy(tmp_path / "run")
    assert not part.exists()
    assert (tmp_path / "mirror" / "run1" / "run" / "steps.jsonl").read_text() == "{}\n"


def test_a_worker_that_fails_gives_its_own_error_as_the_reason(tmp_path, cache):
    """A mirror whose address cannot be used is found before anything is trained."""
    folder, _ = trial_bundle(tmp_path, mirror="nowhere://bucket")
    code, output = finish(start(folder, tmp_path / "work", cache=cache))
    assert code in (2, 3), output
    assert "Traceback" not in output
    assert "nowhere" in reason(tmp_path / "work")


def test_a_worker_that_crashes_leaves_the_last_line_of_its_log_as_the_reason(tmp_path, cache):
    folder, _ = trial_bundle(tmp_path, module="graftwork.fleet.no_such_worker")
    code, output = finish(start(folder, tmp_path / "work", cache=cache))
    assert code == 1, output
    assert "its log ends with" in reason(tmp_path / "work")
    assert "No module named graftwork.fleet.no_such_worker" in reason(tmp_path / "work")
    # One log for all: what the worker wrote is in that of the job, once.
    attempts = (tmp_path / "work" / "run" / "worker.log").read_text()
    assert output.count("No module named") == attempts.count("No module named") == MOST_CRASHES + 1


def test_the_lines_of_a_worker_are_passed_on_whole(tmp_path, capsys):
    path = tmp_path / "worker.log"
    path.write_text("of an earlier attempt\n")
    log = LogFollower(path)
    for added, shown in (("one\ntw", "one\n"), ("", ""), ("o\n", "two\n"), ("no end", "")):
        with path.open("a") as file:
            file.write(added)
        log.print_new()
        assert capsys.readouterr().out == shown
    log.print_new(last=True)
    assert capsys.readouterr().out == "no end\n"


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
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    child, other = subprocess.Popen(words), subprocess.Popen(words, start_new_session=True)
    while b"GRAFT_FLEET_JOB" not in Path(f"/proc/{other.pid}/environ").read_bytes():
        pass
    # This process has it too, as the bootstrap would; it was started without.
    bootstrap.kill_all(child)
    assert other.wait(300) == -signal.SIGKILL


def test_trial_parts_are_a_valid_job():
    assert TrialJob.model_validate({**trial_parts().job, "run_id": "run1"}).steps == 3
