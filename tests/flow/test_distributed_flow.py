"""One run on several processes: killed, stopped, gone on with by one; and on two machines."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from flows import start_graft

from free_ports import free_port


def start(folder, *arguments):
    return start_graft(folder, "train", "--json", *arguments)


def journal(folder: Path) -> list[dict]:
    found = list((folder / ".graft" / "runs").glob("*/steps.jsonl"))
    lines = found[0].read_text().splitlines() if found else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(what, child):
    while not (found := what()):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.02)
    return found


def ranks(folder: Path, rank: int) -> list[int]:
    """The processes of this project's run that torchrun numbered so."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command and f"\0RANK={rank}\0".encode() in environment:
            found.append(int(path.name))
    return found


def last_losses(folder):
    return [step["loss"] for _, step in sorted({s["step"]: s for s in journal(folder)}.items())]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_rank_is_killed_and_the_run_stopped_and_one_process_ends_it(small_project, change_settings):
    # Killed just behind a checkpoint it would have nothing to repeat: it is killed long before the second.
    train = {"strategy": "ddp", "processes": 2, "epochs": 8, "checkpoint_every": 16}
    change_settings(small_project, train=train)
    child = start(small_project)
    wait_for(lambda: len(journal(small_project)) > 18, child)
    (second,) = ranks(small_project, 1)
    os.kill(second, signal.SIGKILL)
    # The supervisor starts both again; they do some steps a second time.
    wait_for(lambda: len({s["step"] for s in journal(small_project)}) < len(journal(small_project)), child)
    # One process sums in another order than two, so the two go beyond what was done before.
    reached = max(step["step"] for step in journal(small_project))
    wait_for(lambda: journal(small_project)[-1]["step"] > reached, child)
    assert ranks(small_project, 1) not in ([], [second])
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate()
    assert child.returncode == 75, out
    assert not ranks(small_project, 0)
    assert not ranks(small_project, 1)
    (run,) = (small_project / ".graft" / "runs").iterdir()
    stopped_after = journal(small_project)[-1]["step"]
    assert (run / "checkpoints" / f"step-{stopped_after:06d}").is_dir()

    change_settings(small_project, train={"strategy": "single", "processes": 1})
    child = start(small_project)
    out, err = child.communicate()
    assert child.returncode == 0, err
    outcome = json.loads(out)
    assert outcome["restarts"] == 2
    assert outcome["replayed_steps"] > 0
    assert outcome["replay_identical"]
    assert [path.name for path in (small_project / ".graft" / "runs").iterdir()] == [run.name]
    assert len(last_losses(small_project)) == outcome["steps"]
    assert outcome["validation_loss_after"] < outcome["validation_loss_before"]


def test_two_machines_train_one_run(small_project, change_settings):
    change_settings(small_project, train={"strategy": "ddp", "processes": 1, "epochs": 1})
    machines = ("--nodes", "2", "--main-address", f"127.0.0.1:{free_port()}")
    out, _ = start(small_project, *machines).communicate()
    commands = json.loads(out)["commands"]
    assert [command.split(" --node-rank ")[1][0] for command in commands] == ["0", "1"]
    assert all(str(small_project) in command for command in commands)

    second = start(small_project, *machines, "--node-rank", "1")
    first = start(small_project, *machines, "--node-rank", "0")
    out, err = first.communicate()
    assert first.returncode == 0, err
    _, heard = second.communicate()
    assert second.returncode == 0, heard
    assert "machine 1 joins" in heard
    assert json.loads(out)["steps"] == len(last_losses(small_project))
    log = (small_project / ".graft" / "machines" / "1" / "worker.log").read_text()
    assert "Error" not in log, log
