"""Several processes give the losses of one, and any other number of processes can resume the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from free_ports import free_port

sys.path.insert(0, str(Path(__file__).parent))
from distributed_child import FULL, FULL_RATE, SAVED_AFTER, STEPS, STRATEGIES, make_engine, make_rows, train

ALL = ("ddp", "fsdp", "zero2", "zero3")
NOISE = 1e-5
START_SECONDS = 550
"""Two processes import torch and DeepSpeed and try every strategy: minutes on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def alone(tiny_base, folder):
    """The same steps by one process."""
    engine = make_engine(tiny_base)
    before = engine.mean_loss(make_rows(5), batch_size=2)
    figures = train(engine, save_as=folder / "single.safetensors")
    full = train(make_engine(tiny_base, shape=FULL), rate=FULL_RATE)
    after = engine.mean_loss(make_rows(5), batch_size=2)
    return {"figures": figures, "before": before, "mean_loss": after, "full": full}


@pytest.fixture(scope="module")
def together(tiny_base, folder, alone):
    """All strategies in one start of two processes."""
    child = Path(__file__).with_name("distributed_child.py")
    torchrun = ["graftwork.train.distributed.launch", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(child), str(tiny_base), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def group_of_one(tiny_base, folder):
    """The strategies that shard, with one process: what `processes: 1` starts."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    child = Path(__file__).with_name("distributed_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(tiny_base), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
        env={**os.environ, **alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found_alone.json").read_text())


@pytest.fixture(params=ALL)
def strategy(request):
    if request.param not in STRATEGIES:
        pytest.skip("deepspeed is not installed")
    return request.param


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=NOISE)


def test_two_processes_give_the_losses_of_one(together, alone, strategy):
    found = together[strategy]
    assert len(found["figures"]) == len(STEPS)
    close(found["figures"], alone["figures"])
    assert found["mean_loss"] == pytest.approx(alone["mean_loss"], rel=NOISE)


def test_whole_weights_are_trained_by_two_as_by_one(together, alone, strategy):
    close([loss for loss, _ in together[strategy]["full"]], [loss for loss, _ in alone["full"]])
    # The length of three million numbers in float32 is known to fewer digits than the loss.
    for (_, one), (_, other) in zip(together[strategy]["full"], alone["full"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_blocks_that_compute_again_give_two_processes_the_losses_of_one(together, alone, strategy):
    close(together[strategy]["checkpointed"], alone["figures"])


@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "zero3"])
def test_a_group_of_one_gives_the_losses_of_one_process(group_of_one, alone, sharding):
    if sharding not in STRATEGIES:
        pytest.skip("deepspeed is not installed")
    # A sharded model is called through its wrapper also where nobody shares it: outside of it, the weights
    # are shards, which are on the host if they are offloaded.
    assert group_of_one[sharding]["before"] == pytest.approx(alone["before"], rel=NOISE)
    close([loss for loss, _ in group_of_one[sharding]["full"]], [loss for loss, _ in alone["full"]])


def test_a_gradient_over_all_parts_is_shortened(together, alone, strategy):
    # The limit is 0.5: without shortening the losses after it would differ, and some step must exceed it.
    assert max(norm for _, norm in together[strategy]["figures"]) > 0.5


def test_frozen_weights_are_not_sent_in_every_pass(together, strategy):
    """Weights in four bits are buffers of their layers, which DDP would broadcast before each pass."""
    assert not together[strategy]["sends_buffers"]


def test_frozen_weights_stay_what_they_are(together, strategy):
    assert together[strategy]["base_stays"]


def test_a_checkpoint_of_two_is_one_of_one(together, alone, folder, strategy):
    ours, theirs = (load_file(folder / f"{name}.safetensors") for name in (strategy, "single"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, name
        if not name.startswith("random"):
            assert ours[name].float().sub(tensor.float()).abs().max() < 1e-4, name


def test_one_process_resumes_what_two_began(together, alone, tiny_base, folder, strategy):
    engine = make_engine(tiny_base)
    engine.restore(load_file(folder / f"{strategy}.safetensors"))
    close(train(engine, skip=SAVED_AFTER), alone["figures"][SAVED_AFTER:])


def test_two_processes_resume_what_one_began(together, alone, strategy):
    close(together[strategy]["resumed"], alone["figures"][SAVED_AFTER:])


def test_the_processes_hear_the_first_and_agree(together, strategy):
    assert together[strategy]["reported"] == {"from": 0, "word": "grüß"}
    assert together[strategy]["any"] == [True, False]
