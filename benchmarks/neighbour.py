"""Training on a processor beside one busy neighbour: how much slower is a step, under each environment?

Run: python benchmarks/neighbour.py [--rounds 12] [--environment GOMP_SPINCOUNT=30000 ...]. Every
environment gets a training process of its own (embedded base, rank 16 on the upper 15 layers, 8 rows a
step, all cores). A round takes one step of each without the neighbour and one with it, in an order that
changes from round to round, so that other load on the machine falls on all alike; the ratios are taken
within a round and their median is reported with the quartiles. The neighbour is one single-threaded
process at nice 19 in a session of its own. Training processes that are not asked sleep. `GUARD=1` in an
environment starts the product's guard against spinning beside a neighbour (`graftwork.model.threads`).
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results import save_results

from graftwork.process.worker import WORKER_ENVIRONMENT

THREAD_VARIABLES = (
    "GUARD",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_DYNAMIC",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
    "KMP_BLOCKTIME",
)
"""Cleared before an environment is set: nothing of the caller's own may leak into the measurement."""
BURN = "while True: pass"
TOKENS, SHARED, REPLY = 110, 40, 30
SETTLE_SECONDS = 9.0
"""Untimed steps before each timed one; longer than the guard's longest hold."""


class Trainer:
    """A training process that takes one step at each request."""

    def __init__(self, name: str, environment: dict[str, str], folder: Path, *, group: Path | None) -> None:
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if key not in THREAD_VARIABLES}
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder)],
            env={**inherited, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _join(group, "training", self._child)
        self._read()

    def step(self) -> dict[str, float]:
        """Wall and processor seconds of one step."""
        assert self._child.stdin is not None
        self._child.stdin.write("step\n")
        self._child.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()

    def _read(self) -> dict[str, float]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the training process of {self.name!r} ended")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.contextmanager
def neighbour(group: Path | None) -> Iterator[None]:
    """One single-threaded process that burns a core at nice 19."""
    busy = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", BURN], start_new_session=True)
    _join(group, "neighbour", busy)
    try:
        time.sleep(0.3)
        yield
    finally:
        busy.kill()
        busy.wait()


def _join(group: Path | None, name: str, child: subprocess.Popen[Any]) -> None:
    """Training and neighbour in groups of equal shares, as sessions are without any control group."""
    if group is not None:
        own = group / name
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(child.pid))


def serve_steps(folder: Path) -> None:
    """The child: load the base, warm up, then one step for each line of standard input."""
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.base import EMBEDDED, find_base
    from graftwork.model.load import load_base
    from graftwork.model.threads import guard_spinning, use_threads
    from graftwork.train.cpu.step import make_cpu_step
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    threads = use_threads(int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else None)
    if "GUARD" in os.environ:
        guard_spinning(threads)
    settings = TrainSettings(rank=16, alpha=32, upper_layers=15, batch_rows=8)
    rows = _rows(settings.batch_rows)
    model = load_base(Path(find_base(EMBEDDED, project_folder=Path()).folder))
    shape = AdapterShape(rank=16, alpha=32, targets=ALL_LINEARS, layers=tuple(range(15, 30)))
    learned = attach(model, shape, seed=settings.seed)
    way = make_cpu_step(model, rows, settings=settings, folder=folder)
    if way is None:
        sys.exit("the processor's own step does not know this model")
    engine = TrainingEngine(model, learned, settings=settings, loss=way[0].summed_loss)

    def step() -> dict[str, float]:
        wall, own = time.perf_counter(), time.process_time()
        engine.backward(rows)
        engine.apply(1e-3)
        return {"wall": time.perf_counter() - wall, "processor": time.process_time() - own}

    step()
    step()
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        # The machine has just changed: what adapts itself needs a while.
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            step()
        print(json.dumps(step()), flush=True)


def _rows(count: int) -> list[Any]:
    from graftwork.records.dataset import Row
    from graftwork.records.interaction import Message, Origin

    chance = random.Random(1)
    beginning = [chance.randrange(100, 40_000) for _ in range(SHARED)]
    rows = []
    for number in range(count):
        own = [chance.randrange(100, 40_000) for _ in range(TOKENS - SHARED)]
        rows.append(
            Row(
                id=str(number),
                origin=Origin(file="log.jsonl", line=number + 1),
                messages=(Message(role="user", content="x"),),
                reply="y",
                tokens=(*beginning, *own),
                trained_from=TOKENS - REPLY,
            )
        )
    return rows


def measure(environments: dict[str, dict[str, str]], *, rounds: int, group: Path | None) -> dict[str, Any]:
    quiet: dict[str, list[dict[str, float]]] = {name: [] for name in environments}
    loaded: dict[str, list[dict[str, float]]] = {name: [] for name in environments}
    loads = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        trainers = []
        for number, (name, environment) in enumerate(environments.items()):
            folder = Path(scratch, str(number))
            folder.mkdir()
            trainers.append(Trainer(name, environment, folder, group=group))
            stack.callback(trainers[-1].close)
        for number in range(rounds):
            order = trainers[number % len(trainers) :] + trainers[: number % len(trainers)]
            for trainer in order:
                quiet[trainer.name].append(trainer.step())
            with neighbour(group):
                for trainer in order:
                    loaded[trainer.name].append(trainer.step())
            loads.append(os.getloadavg()[0])
            shown = "  ".join(
                f"{name}: {quiet[name][-1]['wall']:.2f} -> {loaded[name][-1]['wall']:.2f}"
                for name in environments
            )
            print(f"round {number + 1}/{rounds}  {shown}", file=sys.stderr)
    first = next(iter(environments))
    return {
        "rounds": rounds,
        "load_average": {"lowest": min(loads), "highest": max(loads)},
        "environments": {
            name: _summary(quiet[name], loaded[name], reference=quiet[first]) for name in environments
        },
    }


def _summary(quiet: list[Any], loaded: list[Any], *, reference: list[Any]) -> dict[str, Any]:
    def ratios(above: list[Any], below: list[Any], what: str) -> dict[str, float]:
        found = [one[what] / other[what] for one, other in zip(above, below, strict=True)]
        low, middle, high = statistics.quantiles(found, n=4)
        return {"median": middle, "lower_quartile": low, "upper_quartile": high}

    return {
        "seconds_alone": statistics.median(one["wall"] for one in quiet),
        "seconds_beside_neighbour": statistics.median(one["wall"] for one in loaded),
        "processor_seconds_alone": statistics.median(one["processor"] for one in quiet),
        "slowdown": ratios(loaded, quiet, "wall"),
        "processor_time_beside_neighbour": ratios(loaded, quiet, "processor"),
        "alone_against_first": ratios(quiet, reference, "wall"),
    }


def _environment(text: str) -> dict[str, str]:
    """`A=1,B=2`; the word `product` is what workers are started with, `none` is nothing."""
    if text == "none":
        return {}
    if text == "product":
        return {**WORKER_ENVIRONMENT, "GUARD": "1"}
    return dict(pair.split("=", 1) for pair in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--environment", action="append", help="NAME=VALUE,…; `product`; `none`")
    parser.add_argument(
        "--group", type=Path, help="a cgroup (cpu controller) that keeps other load of the machine apart"
    )
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        serve_steps(asked.child)
        return
    names = asked.environment or ["GOMP_SPINCOUNT=30000", "product"]
    figures = measure({name: _environment(name) for name in names}, rounds=asked.rounds, group=asked.group)
    print(json.dumps(figures, indent=2))
    if not asked.no_save:
        print(save_results("neighbour", figures))


if __name__ == "__main__":
    main()
