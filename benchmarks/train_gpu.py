"""Our training step on one GPU under memory caps, beside the peers of `train_gpu_peers.py`.

Run on a machine with a GPU: python benchmarks/train_gpu_peers.py --out peers.jsonl, then
python benchmarks/train_gpu.py --peers peers.jsonl. Random weights of the Qwen2.5-7B shape, rows of
2,048 tokens, LoRA r = 16 on all linears, an optimizer step at every pass. The cap is all that ours is
told: the plan chooses the rest, the engine measures and settles, the allocator enforces the cap. Each
setting runs in a process of its own; the figure is the median of 8 steps after 4.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
CAPS = (9.0, 16.0, 24.0, 48.0, 139.0)
SEQUENCE, RANK, STEP_TOKENS = 2048, 16, 8192
WARM_UP, TIMED, LOOP_STEPS = 4, 8, 304
SETTINGS = [
    *(("ours", "lora", "on", cap) for cap in CAPS),
    *(("ours, bf16 products", "lora", "off", cap) for cap in CAPS[1:]),
    *(("ours, NF4, bf16 products", "qlora", "off", cap) for cap in CAPS[:2]),
]


def measure(method: str, fp8: str, cap: float) -> dict[str, Any]:
    """One setting, in this process: the bare step."""
    import torch

    found = make_engine(method, fp8, cap)
    if found is None:
        return {"error": "the plan says that it does not fit"}
    engine, settled = found
    tuning = engine.tuning
    seconds = []
    for number in range(WARM_UP + TIMED):
        rows = make_rows(tuning.micro_tokens)
        if number == WARM_UP:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        measured = engine.backward(rows)
        engine.apply(1e-4)
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begun)
    return {
        "tokens_per_second": round(tuning.micro_tokens / statistics.median(seconds)),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "settle_seconds": round(settled, 1),
        "loss": round(measured.loss, 3),
        "tuning": tuning.model_dump(),
    }


def measure_loop(cap: float) -> dict[str, Any]:
    """What data, journal, heartbeat and checkpoints every 50 steps add to the bare step."""
    from graftwork.process.heartbeat import Heart
    from graftwork.train.callbacks import HeartbeatCallback
    from graftwork.train.loop import RunContext, TrainingLoop
    from graftwork.train.objectives.epochs import EpochOrder
    from graftwork.train.settings import TrainSettings

    found = make_engine("lora", "on", cap)
    assert found is not None
    engine, _ = found
    a_step = engine.tuning.micro_tokens // SEQUENCE
    rows = make_rows(LOOP_STEPS * engine.tuning.micro_tokens)
    settings = TrainSettings(
        rank=RANK, alpha=2 * RANK, epochs=1, batch_size=a_step, checkpoint_every=50, learning_rate=1e-5
    )
    bare, last = 0.0, 0.0

    def timed(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal bare, last
            begun = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                last = time.perf_counter()
                bare += last - begun

        return call

    for number in range(WARM_UP):
        engine.backward(rows[number * a_step : (number + 1) * a_step])
        engine.apply(1e-5)
    engine.backward, engine.apply = timed(engine.backward), timed(engine.apply)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Heart(folder, vitals=True) as heart:
            loop = TrainingLoop(
                engine,
                EpochOrder(rows, settings=settings),
                RunContext(settings, folder),
                callbacks=[HeartbeatCallback(heart, folder)],
            )
            begun = time.perf_counter()
            loop.run()
            whole = time.perf_counter() - begun
    return {
        "steps": loop.steps,
        "loop_seconds": round(whole, 3),
        "step_seconds": round(bare, 3),
        "last_checkpoint_seconds": round(begun + whole - last, 3),
        "overhead_while_training_percent": round(100 * ((last - begun) / bare - 1), 2),
        "overhead_percent": round(100 * (whole / bare - 1), 2),
    }


def make_engine(method: str, fp8: str, cap: float) -> tuple[Any, float] | None:
    """The engine as the cap alone decides it, settled; and the seconds that settling took."""
    import torch
    from train_gpu_model import SHAPES

    from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.plan.catalog.hardware import default_rates
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    model, shape = make_model(SHAPES["qwen2.5-7b"])
    adapter = AdapterShape(rank=RANK, alpha=2 * RANK, targets=ALL_LINEARS, layers=tuple(range(shape.layers)))
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    tuning = choose_tuning(
        shape,
        TuningRequest(
            method=method,
            adapted=shape.layers,
            trainable=trainable_of(shape),
            step_tokens=STEP_TOKENS,
            longest=SEQUENCE,
            eight=fp8 == "on",
        ),
        limit_gib=min(cap, total * 0.98),
        rates=default_rates(),
    )
    if tuning is None:
        return None
    settings = TrainSettings(method=method, rank=RANK, alpha=2 * RANK, max_grad_norm=1.0)
    frozen = load_quantized(model, tuning, device="cuda")
    parameters = attach(model, adapter, seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
    torch.cuda.empty_cache()
    begun = time.perf_counter()
    engine.settle(make_rows(tuning.micro_tokens))
    return engine, time.perf_counter() - begun


def make_model(numbers: Any) -> tuple[Any, Any]:
    """Random weights in host memory; and the shape as the plan reads it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from graftwork.records.plan import ModelShape

    config = Qwen2Config(
        vocab_size=numbers.vocabulary,
        hidden_size=numbers.hidden,
        intermediate_size=numbers.inner,
        num_hidden_layers=numbers.layers,
        num_attention_heads=numbers.heads,
        num_key_value_heads=numbers.key_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    # A run loads from the host: weights that change their form on the card would leave gaps there.
    model = model.cpu()
    torch.cuda.empty_cache()
    return model, ModelShape(
        name="qwen2.5-7b",
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=False,
        max_positions=config.max_position_embeddings,
    )


def trainable_of(shape: Any) -> int:
    from graftwork.model.shape import adapter_parameters
    from graftwork.train.settings import ALL_LINEARS

    return adapter_parameters(shape, rank=RANK, targets=ALL_LINEARS, layers=shape.layers)


def make_rows(tokens: int) -> list[Any]:
    """Rows of random tokens, all of them trained on, as in the peers' script."""
    import numpy as np

    from graftwork.records.dataset import Row
    from graftwork.records.interaction import Message, Origin

    return [
        Row.model_construct(
            id=str(at),
            origin=Origin(file="random", line=1),
            messages=(Message(role="user", content=""),),
            reply="",
            tokens=tuple(np.random.randint(0, 150_000, SEQUENCE).tolist()),
            trained_from=1,
        )
        for at in range(tokens // SEQUENCE)
    ]


def run_all(budget: float, out: Path | None) -> list[dict[str, Any]]:
    """Each setting in a child; a line as soon as it is there."""
    found, begun = [], time.perf_counter()
    for name, method, fp8, cap in SETTINGS:
        if time.perf_counter() - begun > budget:
            print(f"passed over for want of time: {name} at {cap:.0f} GiB", flush=True)
            continue
        child = [sys.executable, __file__, "--one", method, fp8, str(cap)]
        done = subprocess.run(child, capture_output=True, text=True, timeout=240, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result = json.loads(lines[-1]) if lines else {"error": (done.stderr or done.stdout)[-1500:]}
        found.append({"name": name, "cap_gib": cap, **result})
        print(json.dumps(found[-1]), flush=True)
        if out is not None:
            with out.open("a") as handle:
                handle.write(json.dumps(found[-1]) + "\n")
    return found


def show(ours: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    from train_gpu_peers import best_under

    print(f"{'cap GiB':>8} {'ours':<28} {'tokens/s':>9} {'GiB':>6}   {'best peer':<28} {'tokens/s':>9} ratio")
    for result in ours:
        peer = best_under(result["cap_gib"], peers) if peers else None
        speed = result.get("tokens_per_second")
        gib = result.get("reserved_gib", 0)
        line = f"{result['cap_gib']:>8.0f} {result['name']:<28} {speed or 'no':>9} {gib:>6}"
        if peer is not None and speed:
            theirs = peer["tokens_per_second"]
            line += f"   {peer['name']:<28} {theirs:>9} {speed / theirs:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "FP8", "CAP"))
    parser.add_argument("--loop", type=float, metavar="CAP", help="measure what the loop adds to the step")
    parser.add_argument("--peers", type=Path, help="JSON lines of train_gpu_peers.py, of the same machine")
    parser.add_argument("--ours", type=Path, help="JSON lines of an earlier run of this file, to show again")
    parser.add_argument("--out", type=Path, help="append results here as they come")
    parser.add_argument("--budget-seconds", type=float, default=3600)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one[0], asked.one[1], float(asked.one[2]))))
        return
    if asked.loop:
        figures = measure_loop(asked.loop)
        print(json.dumps(figures))
        save("train_gpu_loop", figures)
        return
    if asked.ours:
        ours = [json.loads(line) for line in asked.ours.read_text().splitlines()]
    else:
        import torch

        if not torch.cuda.is_available():
            print("passed over: this needs a GPU")
            return
        ours = run_all(asked.budget_seconds, asked.out)
    peers = [json.loads(line) for line in asked.peers.read_text().splitlines()] if asked.peers else []
    show(ours, peers)
    save("train_gpu", {"ours": ours, "peers": peers})


def save(name: str, figures: dict[str, Any]) -> None:
    import torch
    from results import save_results

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(save_results(name, figures, device=device))


if __name__ == "__main__":
    main()
