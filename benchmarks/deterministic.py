"""What sums in the same order cost a LoRA step on a GPU (`train.deterministic`), and what they give.

    python benchmarks/deterministic.py              # on a machine with a GPU; about 2 minutes
    python benchmarks/deterministic.py --small      # a tiny model on a CPU

Random weights of Llama shapes, rank 16 on all layers, frozen weights in 8 bits, steps that are recorded and
not compiled. Rows of one length take cuDNN's attention unless sums have a fixed order; rows of different
lengths take flash attention in both cases. Each case runs in a process of its own: seconds a step, and
whether the same weights and rows give the same gradients twice.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from train_full import card_gib, choose_kernels, device, emit
from train_full_model import SHAPES, make_model, make_rows, model_shape

RANK, LONGEST, TOKENS, LIMIT_GIB, CASE_SECONDS = 16, 2048, 16384, 48.0, 100
WARM_UP, TIMED = 4, 10


def run(shape: str, rows: str, order: str) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    choose_kernels(deterministic=order == "same")
    batch = rows_of(shape, rows)
    engine = make_engine(shape, batch)
    emit({"micro_tokens": engine.tuning.micro_tokens, "planned_gib": round(engine.tuning.peak_gib, 2)})
    same = gradients(engine, batch) == gradients(engine, batch)
    seconds = []
    for _ in range(WARM_UP + TIMED):
        begun = time.perf_counter()
        loss = engine.backward(batch).loss
        engine.apply(1e-4)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    middle = statistics.median(seconds[WARM_UP:])
    return {
        "same_gradients": same,
        "step_ms": round(1000 * middle, 2),
        "tokens_per_second": round(sum(len(row.tokens) for row in batch) / middle),
        "loss": round(loss, 4),
        **card_gib(),
    }


def rows_of(shape: str, rows: str) -> list[Any]:
    longest = LONGEST if device() == "cuda" else 32
    if rows == "even":
        return make_rows(shape, 8, length=longest)
    chance = random.Random(3)
    lengths = [chance.randrange(longest // 8, longest) for _ in range(16)]
    return [
        row.model_copy(update={"tokens": row.tokens[:length]})
        for row, length in zip(make_rows(shape, 16, length=longest), lengths, strict=True)
    ]


def gradients(engine: Any, batch: list[Any]) -> list[bytes]:
    """The bytes of all gradients of one backward pass."""
    import torch

    engine.forget()
    engine.backward(batch)
    found = [parameter.grad.contiguous().view(torch.uint8).cpu() for parameter in engine.parameters]
    engine.forget()
    return [gradient.numpy().tobytes() for gradient in found]


def make_engine(shape: str, batch: list[Any]) -> Any:
    """Settled, as `graft train` makes it."""
    import torch

    from graftwork.costmodel.card_tuning import TuningRequest, choose_tuning
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.shape import adapter_parameters
    from graftwork.plan.catalog.hardware import default_rates
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    sizes, card = model_shape(shape), device() == "cuda"
    request = TuningRequest(
        method="lora",
        adapted=sizes.layers,
        trainable=adapter_parameters(sizes, rank=RANK, targets=ALL_LINEARS, layers=sizes.layers),
        step_tokens=min(sum(len(row.tokens) for row in batch), TOKENS),
        longest=max(len(row.tokens) for row in batch),
        eight=card,
        compile="off",
    )
    tuning = choose_tuning(sizes, request, limit_gib=LIMIT_GIB, rates=default_rates())
    assert tuning is not None
    model = make_model(shape, torch.bfloat16 if card else torch.float32)
    settings = TrainSettings(rank=RANK, alpha=2 * RANK)
    frozen = load_quantized(model, tuning, device=device())
    layers = tuple(range(SHAPES[shape]["layers"]))
    adapter = AdapterShape(rank=RANK, alpha=2 * RANK, targets=ALL_LINEARS, layers=layers)
    parameters = attach(model, adapter, seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=sizes)
    engine.settle(batch)
    return engine


def start(shape: str, rows: str, order: str) -> dict[str, Any]:
    """Run a case in a process of its own; if it does not end well, what it had measured and why."""
    words = [sys.executable, str(Path(__file__).resolve()), "--case", shape, rows, order]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, env=environment, timeout=CASE_SECONDS, check=False
        )
        out, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        out, code = (late.stdout or b"").decode(), -9
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return {**found, **({"error": f"ended with {code}"} if code else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.4b"], choices=SHAPES)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/deterministic.json")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        emit(run(*asked.case))
        return
    if not asked.small and device() == "cpu":
        print("passed over: this needs a GPU; --small runs tiny shapes on a CPU")
        return
    if asked.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = {}
    for shape in ["tiny"] if asked.small else asked.shapes:
        for rows in ("even", "uneven"):
            for order in ("same", "any"):
                name = f"{shape}, {rows} rows, {order} order"
                figures[name] = start(shape, rows, order)
                emit({name: figures[name]})
    if asked.save:
        from results import save_results

        save_results("deterministic", figures)


if __name__ == "__main__":
    main()
