"""How right the planner is about memory: every configuration predicted, then run, one process each.

    python benchmarks/plan_memory.py --dry                          # predictions only, needs no GPU
    python benchmarks/plan_memory.py --out own.jsonl [--jobs 4]
    python benchmarks/plan_memory.py --out timed.jsonl --timed      # seconds per step: one at a time

Our own training step over nine decoders of random weights (`plan_memory_shapes.py`); two of them are
held out. All predictions are made first and written beside the results (`OUT.predicted`), before the
first process starts. A line comes as soon as a configuration has run: {"engine", "config",
"predicted", "measured", "held_out", "device"}.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plan_memory_shapes import (
    DECODERS,
    HELD_OUT,
    name_of,
    own_configurations,
    pair_questions,
    shape_of,
    trained_places,
    tuning_of,
)

from graftwork.records.base import GIB

STEP_OF_LENGTHS = 64
LONGEST = 65536
GPU_GIB = 128.0
"""Of an H200, for all processes together."""
CHILD = Path(__file__).with_name("plan_memory_run.py")


def predict(configuration: dict[str, Any]) -> dict[str, Any]:
    """What the planner says, in GiB."""
    peak = planned_peak(configuration)
    return {
        "allocated_gib": peak.allocated / GIB,
        "reserved_gib": peak.reserved / GIB,
        "parts_gib": {name: part / GIB for name, part in peak.parts.items()},
        "phase": peak.phase,
    }


def planned_peak(configuration: dict[str, Any]) -> Any:
    from graftwork.costmodel.gpu_memory import gpu_peak
    from graftwork.model.shape import adapter_parameters, linear_names

    shape = shape_of(configuration)
    if configuration["method"] == "full":
        return planned_full(configuration)
    trainable = adapter_parameters(
        shape, rank=configuration["rank"], targets=linear_names(shape), layers=shape.layers
    )
    return gpu_peak(
        shape,
        tuning_of(configuration),
        trainable=trainable,
        adapted=shape.layers,
        places=trained_places(configuration),
        even=not configuration["uneven"],
        expandable=configuration["expandable"],
    )


def planned_full(configuration: dict[str, Any]) -> Any:
    """Full training goes through transformers itself: float32 weights, products in bfloat16."""
    from graftwork.costmodel.plain_step import plain_trace, replayed
    from graftwork.records.plan import PlainSetup

    setup = PlainSetup(
        method="full",
        targets=(),
        adapted_layers=configuration["layers"],
        dtype="float32",
        autocast=True,
        rows=configuration["rows"],
        tokens=configuration["length"],
    )
    family = DECODERS[configuration["model"]].family
    trace = plain_trace(shape_of(configuration), setup, architecture=family)
    return replayed(trace, expandable=configuration["expandable"])


def longest_that_fits(question: dict[str, Any]) -> int:
    """The largest length that the planner says fits under the cap: by halving."""

    def fits(length: int) -> bool:
        return bool(planned_peak({**question, "length": length}).reserved <= question["cap_gib"] * GIB)

    low, high = 0, LONGEST // STEP_OF_LENGTHS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP_OF_LENGTHS) else (low, middle)
    return low * STEP_OF_LENGTHS


def pairs() -> list[dict[str, Any]]:
    """Each question as two configurations: said to fit, and 5 % longer."""
    found = []
    for question in pair_questions():
        length = longest_that_fits(question)
        more = -(-int(length * 1.05) // STEP_OF_LENGTHS) * STEP_OF_LENGTHS
        found += [
            {**question, "length": length, "pair": "said to fit"},
            {**question, "length": more, "pair": "5 % more"},
        ]
    return found


def chosen(asked: argparse.Namespace) -> list[dict[str, Any]]:
    configurations = [*own_configurations(), *pairs()]
    if asked.timed:
        plain = [c for c in configurations if "pair" not in c and not c["cap_gib"]]
        configurations = [{**c, "timed": True} for c in plain]
    configurations = [c for c in configurations if asked.only in name_of(c)]
    # What compiles takes longest: it starts first.
    return sorted(configurations, key=lambda c: not c["compiled"])[:: asked.every]


def run_all(asked: argparse.Namespace) -> None:
    predicted = predict_all(asked)
    if asked.predict:
        return
    device = gpu_name()
    room, begun = Room(GPU_GIB), time.perf_counter()

    def one(configuration: dict[str, Any], said: dict[str, Any]) -> None:
        # What is said may be wrong, and loading takes more than a step: some room beside it.
        need = min(said["reserved_gib"] * 1.1 + 3, GPU_GIB)
        with room.taken(need):
            measured = run_child(configuration)
        plain = {key: value for key, value in configuration.items() if key != "timed"}
        line = {
            "engine": "graft",
            "config": plain,
            "predicted": said,
            "measured": measured,
            "held_out": configuration["model"] in HELD_OUT,
            "device": device,
        }
        with room.lock:
            append(asked.out, line)
        shown = measured.get("error", "")[-300:] or ("ran out" if measured["ran_out"] else "")
        figures = f"{measured.get('allocated_gib', 0):7.2f} {measured.get('reserved_gib', 0):7.2f}"
        said_figures = f"{said['allocated_gib']:7.2f} {said['reserved_gib']:7.2f}"
        print(
            f"{time.perf_counter() - begun:5.0f} s {said_figures} | {figures} {name_of(plain)} {shown}",
            flush=True,
        )

    with ThreadPoolExecutor(1 if asked.timed else asked.jobs) as pool:
        for done in [pool.submit(one, c, p) for c, p in predicted]:
            done.result()


def predict_all(asked: argparse.Namespace) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Configurations with what is said of them: written before anything runs, perhaps on another machine."""
    if asked.predicted:
        lines = [json.loads(line) for line in asked.predicted.read_text().splitlines()]
        return [(line["config"], line["predicted"]) for line in lines]
    predicted = [(configuration, predict(configuration)) for configuration in chosen(asked)]
    beside = asked.out.with_name(asked.out.name + ".predicted")
    lines = [json.dumps({"config": c, "predicted": p}) for c, p in predicted]
    beside.write_text("\n".join(lines) + "\n")
    return predicted


def run_child(configuration: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, str(CHILD), json.dumps(configuration)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "took longer than 240 s", "ran_out": False}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr or done.stdout)[-2000:], "ran_out": False}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


class Room:
    """Of the card's memory, shared by the processes that run at a time."""

    def __init__(self, gib: float) -> None:
        self._left = gib
        self.lock = threading.Lock()
        self._changed = threading.Condition()

    def taken(self, gib: float) -> "Place":
        return Place(self, gib)

    def take(self, gib: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left >= gib)
            self._left -= gib

    def give(self, gib: float) -> None:
        with self._changed:
            self._left += gib
            self._changed.notify_all()


class Place:
    def __init__(self, room: Room, gib: float) -> None:
        self._room, self._gib = room, gib

    def __enter__(self) -> None:
        self._room.take(self._gib)

    def __exit__(self, *_: object) -> None:
        self._room.give(self._gib)


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as handle:
        handle.write(json.dumps(line) + "\n")


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no card"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("plan_memory_own.jsonl"))
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--timed", action="store_true", help="measure seconds per step, one process each")
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--every", type=int, default=1, help="every so many of them")
    parser.add_argument("--predict", action="store_true", help="write OUT.predicted, run nothing")
    parser.add_argument("--predicted", type=Path, help="run the configurations of such a file")
    parser.add_argument("--dry", action="store_true", help="print predictions, run nothing")
    asked = parser.parse_args()
    if not asked.dry:
        run_all(asked)
        return
    configurations = chosen(asked)
    for configuration in configurations:
        said = predict(configuration)
        print(f"{said['allocated_gib']:7.2f} {said['reserved_gib']:7.2f} {name_of(configuration)}")
    print(f"{len(configurations)} configurations")


if __name__ == "__main__":
    main()
