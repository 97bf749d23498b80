"""An evaluation on a cluster that is stopped leaves nothing running there."""

import os
from types import SimpleNamespace

from graftwork.evaluate.ask import cluster_shards
from graftwork.process.cluster.slurm_array import SlurmArray

COMMANDS = {
    "sbatch": "echo 4711",
    "squeue": "echo '0 RUNNING'",
    "scancel": 'echo "$@" >> "$CANCELED"',
}


def test_a_stopped_evaluation_cancels_its_array(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in COMMANDS.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CANCELED", str(tmp_path / "canceled"))
    folders = [tmp_path / "shards" / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    shards = [SimpleNamespace(folder=str(folder), to_json=lambda: "{}") for folder in folders]
    copied, polls = [], []
    book = SimpleNamespace(copy_from=copied.extend)
    cluster_shards.ask_on_cluster(
        shards,
        SlurmArray(tasks=2),
        book,
        on_poll=lambda: polls.append(1),
        # Once the array is there.
        stop_asked=lambda: any((tmp_path / "shards" / "engine").glob("*/todo/*")),
    )
    assert (tmp_path / "canceled").read_text() == "4711\n"
    assert copied == folders
