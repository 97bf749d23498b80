"""`graft train` with streamed layers writes the bytes of the plain run."""

import shutil
import subprocess
import sys

import pytest


def trained_weights(folder):
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.cli.main", "train", "-C", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (weights,) = (folder / ".graft" / "runs").glob("*/adapter/model.safetensors")
    return weights.read_bytes()


@pytest.mark.slow
def test_a_streamed_run_writes_the_bytes_of_one_that_recomputes_its_layers(
    small_project, change_settings, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(small_project, other)
    full = {"method": "full", "learning_rate": 1e-3, "epochs": 1}
    change_settings(small_project, train={**full, "offload": True})
    change_settings(other, train={**full, "gradient_checkpointing": "on"})
    assert trained_weights(small_project) == trained_weights(other)
