"""The files of `graft plan fit --write`, run as they are by transformers with DeepSpeed and accelerate.

Skipped where DeepSpeed is not installed; `make test-deepspeed` installs it and runs these.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.fit.answer import fit, settings_files
from graftwork.plan.fit.question import make_question
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions

CHILD = Path(__file__).with_name("trainer_child.py")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def write_files(folder, *, sharding):
    """A strategy for two cards, with batches that suit a tiny model."""
    machine = Machine(gpu=find_gpu("RTX 4090"), gpus=2, ram_gib=128.0)
    asked = FitOptions(seq=512, engine="hf", method="lora", batch_size=4)
    answer = fit(make_question(find_model("llama-3.2-1b"), asked, machine=machine))
    changes = {"sharding": sharding, "offload": "none", "micro_rows": 1, "accumulation": 2}
    answer = answer.model_copy(update={"strategy": answer.strategy.model_copy(update=changes)})
    for name, text in settings_files(answer).items():
        (folder / name).write_text(text)


def run(folder, *command):
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "FOUND" in line]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].partition("FOUND ")[2])


@pytest.mark.parametrize(("sharding", "stage"), [("zero2", 2), ("zero3", 3)])
def test_transformers_trains_with_the_file_for_deepspeed(tmp_path, sharding, stage):
    write_files(tmp_path, sharding=sharding)
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = run(tmp_path, *launch, str(CHILD), "2", "deepspeed")
    assert (found["engine"], found["stage"], found["processes"]) == ("DeepSpeedEngine", stage, 2)
    assert found["losses"][1] < found["losses"][0]


def test_accelerate_launches_transformers_with_both_files(tmp_path):
    write_files(tmp_path, sharding="zero2")
    launch = ("accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0")
    found = run(tmp_path, *launch, str(CHILD), "2", "accelerate")
    assert (found["engine"], found["stage"], found["processes"]) == ("DeepSpeedEngine", 2, 2)
    assert found["losses"][1] < found["losses"][0]
