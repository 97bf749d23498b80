"""Run by torchrun on two processes, or started as the only one of a group: each strategy trains the same few
steps; the first process writes the results."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import make_trainable
from graftwork.model.load import base_digest, load_base
from graftwork.train.distributed.launch import leave
from graftwork.train.distributed.strategies import SingleProcess
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.settings import TrainSettings

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
FULL = AdapterShape(kind="full", rank=1, alpha=1, targets=(), layers=(0, 1))
STRATEGIES = ("ddp", "fsdp", *(("zero2", "zero3") if find_spec("deepspeed") else ()))
SAVED_AFTER = 3
RATE = 2e-2
FULL_RATE = 1e-4
# The last step has one row only: the other process has nothing to do in it.
STEPS = ((0, 1, 2, 3, 4), (5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15), (6,))


def make_rows(count=16):
    rows = []
    for number in range(count):
        prompt = [100 + (37 * number + 11 * at) % 300 for at in range(5 + number % 7)]
        rows.append(make_row(str(number), (*prompt, 7, 8, 9, 10 + number % 3, 2), len(prompt)))
    return rows


def make_engine(base, *, processes=None, strategy="single", shape=SHAPE, **options):
    torch.set_num_threads(1)
    settings = TrainSettings(rank=4, alpha=8, strategy=strategy, weight_decay=0.01, max_grad_norm=0.5)
    model = load_base(Path(base))
    learned = make_trainable(model, shape, seed=settings.seed)
    step = StepOptions(micro_rows=2, **options)
    return TrainingEngine(model, learned, settings=settings, strategy=processes or SingleProcess(), step=step)


def train(engine, *, skip=0, save_as=None, rate=RATE):
    """Each step's loss and gradient norm; one gradient is refused on the way, and must leave no trace."""
    rows, figures = make_rows(), []
    for number, step in enumerate(STEPS[skip:], start=skip + 1):
        if number == 2:
            engine.backward([rows[0], rows[15]])
            engine.forget()
        measured = engine.backward([rows[at] for at in step])
        engine.apply(rate)
        figures.append((measured.loss, measured.gradient_norm))
        if save_as is not None and number == SAVED_AFTER:
            state = engine.state()
            if engine.strategy.rank == 0:
                save_file(state, save_as)
    return figures


def meet(strategy):
    """A strategy as in a fresh process: accelerate remembers the last one."""
    from accelerate.state import AcceleratorState

    from graftwork.train.distributed.launch import make_strategy

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    processes = int(os.environ["WORLD_SIZE"])
    settings = TrainSettings(strategy=strategy, processes=processes, offload=True, max_grad_norm=0.5)
    return make_strategy(settings, device="cpu", dtype="float32")


def main(base, folder):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for strategy in STRATEGIES:
        engine = make_engine(base, processes=meet(strategy), strategy=strategy)
        base_before = base_digest(load_base(Path(base)))
        output = engine.strategy.broadcast({"from": engine.strategy.rank, "word": "grüß"})
        figures = train(engine, save_as=folder / f"{strategy}.safetensors")
        whole = {
            "figures": figures,
            "mean_loss": engine.mean_loss(make_rows(5), batch_size=2),
            "digest": engine.digest(),
            "base_stays": base_digest(engine.model, whole=engine.strategy.gather) == base_before,
            "reported": output,
            "sends_buffers": getattr(engine.strategy._run, "broadcast_buffers", False),
            "any": [
                engine.strategy.any_process(engine.strategy.rank == 1),
                engine.strategy.any_process(False),
            ],
        }
        other = make_engine(base, processes=meet(strategy), strategy=strategy)
        other.restore(load_file(folder / "single.safetensors"))
        whole["resumed"] = train(other, skip=SAVED_AFTER)
        third = make_engine(base, processes=meet(strategy), strategy=strategy, shape=FULL)
        whole["full"] = train(third, rate=FULL_RATE)
        whole["full_digest"] = third.digest()
        fourth = make_engine(base, processes=meet(strategy), strategy=strategy, activation_checkpointing=True)
        whole["checkpointed"] = train(fourth)
        found[strategy] = whole
        if engine.strategy.rank == 0:
            print(strategy, flush=True)
    if engine.strategy.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    engine.strategy.finish()


def main_alone(base, folder):
    """The strategies that shard, in a group of one."""
    found = {}
    for strategy in STRATEGIES[1:]:
        engine = make_engine(base, processes=meet(strategy), strategy=strategy, shape=FULL)
        before = engine.mean_loss(make_rows(5), batch_size=2)
        found[strategy] = {"before": before, "full": train(engine, rate=FULL_RATE)}
    (folder / "found_alone.json").write_text(json.dumps(found))
    engine.strategy.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    (main if os.environ["WORLD_SIZE"] != "1" else main_alone)(sys.argv[1], Path(sys.argv[2]))
    leave(0)
