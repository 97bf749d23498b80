"""How near the embedded engine comes to the ceiling of its matrix products, with eight requests at once.

Run: python benchmarks/serve_ceiling.py [--rounds 5] [--threads 1] [--save]. The ceiling is a decoding step
that is nothing but the model's matrix products for a batch of eight. Rounds of both alternate; times are CPU
time, which other load on the machine changes least, and wall time.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generate import read_conversations
from results import save_results

from graftwork.inference.embedded import EmbeddedEngine
from graftwork.inference.engine import DecodingSettings, EngineSource
from graftwork.model.base import EMBEDDED, find_base

ROWS = 8
SHORT, LONG = 4, 20
"""Tokens of each answer; the difference leaves out what reading the prompts takes."""


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds)."""
    before, began = os.times(), time.perf_counter()
    call()
    after = os.times()
    return after.user + after.system - before.user - before.system, time.perf_counter() - began


def matrix_products(engine: EmbeddedEngine) -> Callable[[], None]:
    """One step's products, on rows of the right sizes."""
    model = engine.decoder._model
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(ROWS, weight.shape[1]) for weight in layers}

    @torch.inference_mode()
    def step() -> None:
        for weight in layers:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return step


def measure(*, rounds: int, threads: int) -> dict[str, Any]:
    folder = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    engine = EmbeddedEngine(EngineSource(base_folder=folder, rows=ROWS, threads=threads))
    prompts = [engine.render(messages) for messages in read_conversations(ROWS)]
    # Answers that end early would leave rows empty: no token ends one here.
    engine.decoder._stop = frozenset()
    step = matrix_products(engine)
    answers = {n: lambda n=n: engine.answer(prompts, DecodingSettings(n)) for n in (SHORT, LONG)}
    shares: dict[str, list[float]] = {"cpu": [], "wall": []}
    steps: dict[str, list[float]] = {"engine": [], "products": []}
    for number in range(rounds + 1):
        short, long = timed(answers[SHORT]), timed(answers[LONG])
        bare = timed(lambda: [step() for _ in range(LONG - SHORT)])
        if number:  # the first round warms up
            for place, name in enumerate(shares):
                shares[name].append(bare[place] / (long[place] - short[place]))
            steps["engine"].append(1000 * (long[0] - short[0]) / (LONG - SHORT))
            steps["products"].append(1000 * bare[0] / (LONG - SHORT))
    return {
        "rows": ROWS,
        "threads": threads,
        "rounds": rounds,
        "share_of_the_ceiling_cpu": round(statistics.median(shares["cpu"]), 3),
        "share_of_the_ceiling_wall": round(statistics.median(shares["wall"]), 3),
        "cpu_ms_a_step": {name: round(statistics.median(found), 1) for name, found in steps.items()},
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/serve_ceiling.json")
    asked = parser.parse_args()
    figures = measure(rounds=asked.rounds, threads=asked.threads)
    if asked.save:
        save_results("serve_ceiling", figures)
    print(json.dumps(figures, indent=2))
