"""Answers tested in the sandbox: runs a second, for every way that works on this machine.

The same small answer and its tests go through each way, one at a time and as many at a time as there are
cores; beside them a bare `python -c` with the same code and no walls at all. Rounds are interleaved, so that
a busy machine is equally unfair to each; figures are medians.

Run: `python benchmarks/sandbox.py [--runs N] [--rounds N] [--json]`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from graftwork.process.pool import count_cores
from graftwork.process.sandbox import CodeJob, Sandbox, SandboxKind, run_jobs, why_not
from graftwork.process.sandbox.run import WAYS

ANSWER = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\n"


def main() -> None:
    arguments = _read_arguments()
    ways = [kind for kind in WAYS if not why_not(kind)]
    work: dict[str, Callable[[int], None]] = {"bare python, one at a time": _run_bare}
    for kind in ways:
        for at_once in dict.fromkeys((1, count_cores())):
            work[f"{kind}, {at_once} at a time"] = _in_boxes(kind, at_once)
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(arguments.rounds):
        for name, run in work.items():
            begun = time.perf_counter()
            run(arguments.runs)
            rates[name].append(arguments.runs / (time.perf_counter() - begun))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    if arguments.json:
        print(json.dumps({"runs_per_second": medians, "cores": count_cores()}))
        return
    for name, rate in medians.items():
        print(f"{name:<36}{rate:8.1f} runs/s{1000 / rate:8.1f} ms each")


def _run_bare(runs: int) -> None:
    for _ in range(runs):
        subprocess.run([sys.executable, "-I", "-S", "-c", ANSWER + TESTS], check=True)


def _in_boxes(kind: SandboxKind, at_once: int) -> Callable[[int], None]:
    def run(runs: int) -> None:
        jobs = [CodeJob(ANSWER, TESTS)] * runs
        assert all(result.ok for result in run_jobs(jobs, sandbox=Sandbox(kind), at_once=at_once))

    return run


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
