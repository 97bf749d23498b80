"""How near the embedded engine comes to the ceiling of its matrix products, with eight requests at once.

Run: python benchmarks/serve_ceiling.py [--rounds 20] [--threads 1] [--save]. The ceiling is a decoding step
that is nothing but the model's matrix products for a batch of eight, as torch multiplies: those of the linear
layers, and the two of attention with the keys and values that the engine holds. Blocks of two steps of the
decoder that `graft serve` runs and of two bare ones alternate, so that other load on the machine hits both
alike; times are CPU time, which such load changes least, and wall time.
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
from graftwork.inference.engine import EngineSource
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.generate.requests import GenerationRequest
from graftwork.model.generate.sampling import Sampling

ROWS = 8
STEPS = 2
"""Of each block."""


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds)."""
    before, began = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - before, time.perf_counter() - began


def matrix_products(engine: EmbeddedEngine) -> tuple[Callable[[], None], Callable[[], None]]:
    """One step's products on rows of the right sizes: those of the linear layers, and those of attention."""
    model, decoder = engine.decoder._model, engine.decoder
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(ROWS, weight.shape[1]) for weight in layers}
    config = model.config
    groups, heads = config.num_key_value_heads, config.num_attention_heads
    query = torch.randn(ROWS, groups, heads // groups, config.hidden_size // heads)

    @torch.inference_mode()
    def multiply() -> None:
        for weight in layers:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    @torch.inference_mode()
    def attend() -> None:
        for keys, values in decoder._cache._room[:, :, :ROWS, :, : decoder._columns]:
            (query @ keys.transpose(-1, -2)) @ values

    return multiply, attend


def measure(*, rounds: int, threads: int) -> dict[str, Any]:
    folder = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    engine = EmbeddedEngine(EngineSource(base_folder=folder, rows=ROWS, threads=threads))
    # Answers that end early would leave rows empty: no token ends one here.
    engine.decoder._stop = frozenset()
    sampling = Sampling(STEPS * (rounds + 2) + 2)
    for messages in read_conversations(ROWS):
        engine.decoder.submit(GenerationRequest(engine.render(messages).tokens, sampling))
    engine.decoder.step()  # reads the prompts
    multiply, attend = matrix_products(engine)
    shares: dict[str, list[float]] = {"cpu": [], "wall": []}
    steps: dict[str, list[float]] = {"engine": [], "linear layers": [], "attention": []}
    for number in range(rounds + 1):
        decoded = timed(lambda: [engine.decoder.step() for _ in range(STEPS)])
        linear = timed(lambda: [multiply() for _ in range(STEPS)])
        attention = timed(lambda: [attend() for _ in range(STEPS)])
        if number:  # the first round warms up
            for place, name in enumerate(shares):
                shares[name].append((linear[place] + attention[place]) / decoded[place])
            for name, taken in zip(steps, (decoded, linear, attention), strict=True):
                steps[name].append(1000 * taken[0] / STEPS)
    assert engine.decoder.running == ROWS
    quarters = statistics.quantiles(shares["cpu"], n=4)
    return {
        "rows": ROWS,
        "threads": threads,
        "rounds": rounds,
        "share_of_the_ceiling_cpu": round(statistics.median(shares["cpu"]), 3),
        "quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
        "share_of_the_ceiling_wall": round(statistics.median(shares["wall"]), 3),
        "cpu_ms_a_step": {name: round(statistics.median(found), 1) for name, found in steps.items()},
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/serve_ceiling.json")
    asked = parser.parse_args()
    figures = measure(rounds=asked.rounds, threads=asked.threads)
    if asked.save:
        save_results("serve_ceiling", figures)
    print(json.dumps(figures, indent=2))
