"""How long `graft --help` and a worker take to start, against a bare interpreter and the imports themselves.

Run: python benchmarks/startup.py [--rounds 9]. The goal for `graft --help` is half a second; times on shared
machines vary, so look at the ratio to the bare interpreter too. The worker measures the machine and opens its
card: as a new interpreter, and forked from the process that has done the imports.
"""

import argparse
import statistics
import subprocess
import sys
import time

from graftwork.process.local_workers import worker_environment
from graftwork.process.preload import PreloadedWorkers

WORKER = "graftwork.model.probe"
FORKED = "worker, forked"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "graft --help": [sys.executable, "-m", "graftwork.cli.main", "--help"],
    "import transformers, torch": [sys.executable, "-c", "import torch, transformers"],
    "worker, new interpreter": [sys.executable, "-m", WORKER, "1"],
}


def seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def seconds_forked(workers: PreloadedWorkers) -> float | None:
    """None where the worker could not be forked."""
    begun = time.perf_counter()
    ended = workers.run(WORKER, ["1"])
    return time.perf_counter() - begun if ended is not None and ended[0] == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    workers = PreloadedWorkers()
    workers.warm_up(worker_environment())
    first = seconds_forked(workers)
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            found[name].append(seconds(command))
        if (forked := seconds_forked(workers)) is not None:
            found.setdefault(FORKED, []).append(forked)
    workers.stop()
    medians = {name: statistics.median(times) for name, times in found.items()}
    bare = medians["python -c pass"]
    for name, median in medians.items():
        print(f"{name:<28} {median:6.3f} s   {median / bare:5.1f} × the bare interpreter")
    print(f"goal of 0.5 s for graft --help: {'met' if medians['graft --help'] < 0.5 else 'MISSED'}")
    if first is None or FORKED not in medians:
        print("workers cannot be forked here: each starts as a new interpreter")


if __name__ == "__main__":
    main()
