"""Trains in forked children that are killed: `python kill_server.py BASE`, an order a line.

Loading torch fifty times would take minutes; here one process loads it, and every attempt at the run
is a fork of that process, with the product's own loop, engine and checkpoints in it. An order names
the run's folder and when the attempt dies: `after_step` with a pause in seconds, by the parent's
SIGKILL; or `after_step` with `point`, at so many-th touch of the disk from then on, by its own. The
hooks for that are set here, in the child, and nowhere in the product.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from train_samples import SETTINGS, make_engine, make_rows

from graftwork.files.disk import Journal
from graftwork.train import checkpoints
from graftwork.train.callbacks import DivergenceCallback, TrainingCallback
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.objectives.epochs import EpochOrder

LONG = SETTINGS.model_copy(update={"epochs": 25, "learning_rate": 5e-3})


class Order(TrainingCallback):
    """Writes down which rows each step was about."""

    def __init__(self, folder):
        self._journal = Journal(folder / "order.jsonl")

    def accept_gradient(self, number, measured, rows):
        self._journal.append([number, *(row.id for row in rows)])
        return True


class Trap(TrainingCallback):
    """From a step on, counts every touch of the disk, and dies at the one that was drawn."""

    def __init__(self, after_step, point):
        self._after, self._left, self._armed = after_step, point, False
        self.touches = 0
        for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
            setattr(module, name, self._set(getattr(module, name)))
        parts = checkpoints._file_parts

        def one_by_one(named):
            for part in parts(named):
                self._touch()
                yield part[: len(part) // 2]
                self._touch()
                yield part[len(part) // 2 :]

        checkpoints._file_parts = one_by_one

    def _set(self, call):
        def touched(*arguments, **named):
            self._touch()
            return call(*arguments, **named)

        return touched

    def _touch(self):
        self.touches += 1
        if self._armed:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, engine, *, done, steps):
        self._armed = done >= self._after

    def on_step_end(self, step, steps):
        self._armed = step.step >= self._after


class LastStep(TrainingCallback):
    """An attempt that is to be killed does not end: it dies here, or waits for its parent's late signal."""

    def __init__(self, order):
        self._is_waiting = "pause" in order

    def on_step_begin(self, number, steps):
        if number == steps and self._is_waiting:
            signal.pause()
        elif number == steps:
            os.kill(os.getpid(), signal.SIGKILL)


def attempt(engine, folder, order):
    source = EpochOrder(make_rows(), settings=LONG)
    callbacks = [DivergenceCallback(LONG.watch, peek=source.peek), Order(folder)]
    if "after_step" in order:
        callbacks.append(LastStep(order))
    if "point" in order:
        callbacks.insert(0, Trap(order["after_step"], order["point"]))
    loop = TrainingLoop(engine, source, RunContext(LONG, folder), callbacks=callbacks)
    replay = loop.run()
    save_file(engine.learned(), folder / "adapter.safetensors")
    return {"replayed": replay[0] if replay else 0, "identical": replay[1] if replay else None}


def journalled(path, offset):
    """The last step that was written down whole beyond `offset`; 0 where there is none."""
    if not path.exists():
        return 0
    lines = path.read_bytes()[offset:].rsplit(b"\n", 2)
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


def kill_when_due(child, folder, order, offset):
    """SIGKILL from outside, a drawn time after the step was written down."""
    while journalled(folder / "steps.jsonl", offset) < order["after_step"]:
        if os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("the child ended before its time")
        time.sleep(0.001)
    time.sleep(order["pause"])
    os.kill(child, signal.SIGKILL)


def serve(base):
    os.fsync = lambda _file: None  # What a killed process has written stays in the kernel.
    engine = make_engine(base)
    print(json.dumps({"steps": len(make_rows()) // LONG.batch_size * LONG.epochs}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        folder = Path(order["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / "steps.jsonl"
        offset = journal.stat().st_size if journal.exists() else 0
        child = os.fork()
        if child == 0:
            done = attempt(engine, folder, order)
            (folder / "done.json").write_text(json.dumps(done))
            os._exit(0)
        if "pause" in order:
            kill_when_due(child, folder, order, offset)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
