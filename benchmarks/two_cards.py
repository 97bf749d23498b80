"""The planner's answer for two cards with 16 GB, run by two processes that share one GPU.

    python benchmarks/two_cards.py                  # on a machine with a GPU; about 4 minutes
    python benchmarks/two_cards.py --only qlora     # QLoRA of 6.7B; `full`: all weights of 1.3B
    python benchmarks/two_cards.py --small          # the same strategies with a tiny model on a CPU

`graft plan fit` is asked for two RTX 5060 Ti as in docs/answers/dual-gpu.md. Its strategy, micro-batch and
checkpointing are run by `graft`'s own engine and strategies; each process may take 16 GiB of the GPU. Two
processes on one GPU meet through gloo, so that speeds say nothing about two cards: memory and losses do.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_full import card_gib, device, emit, host_gib
from train_full_model import SHAPES, make_model, make_rows, step_sizes

PROCESSES, CAP_GIB, STEPS = 2, 16.0, 3
PORTIONS = 2
"""Forward and backward passes of a process in a step. More take no more memory, and gloo is slow."""
MACHINE = ("--gpu", "RTX 5060 Ti 16GB", "--gpus", str(PROCESSES), "--cpu", "Ryzen 9950X", "--ram", "128")


@dataclass(frozen=True)
class Question:
    """What the planner is asked, and the shape that is trained then. `seconds` is when it is killed."""

    model: str
    method: str
    shape: str
    seconds: float


QUESTIONS = {
    "qlora": Question("deepseek-coder-6.7b", "qlora", "6.7b", 150),
    "full": Question("deepseek-coder-1.3b", "full", "1.4b", 150),
}


def ask_planner(question: Question) -> dict[str, Any]:
    """The answer of `graft plan fit`."""
    words = ("plan", "fit", "--model", question.model, "--method", question.method, *MACHINE)
    command = [sys.executable, "-m", "graftwork.cli.main", *words, "--rows", "10000", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_strategy(name: str, question: Question) -> dict[str, Any]:
    """Ask, start both processes, and put what was planned next to what they took."""
    answer = ask_planner(question)
    strategy = answer["strategy"]
    figures = {
        "model": question.model,
        "trained_shape": question.shape,
        "strategy": strategy["train"],
        "micro_rows": strategy["micro_rows"],
        "checkpointed_layers": strategy["checkpointed_layers"],
        "planned_gib": round(answer["peak_reserved_gib"]["value"], 2),
        "planned_allocated_gib": round(answer["peak_allocated_gib"]["value"], 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        job = {"name": name, "shape": question.shape, "folder": folder, "strategy": strategy}
        ended = start_group(job, seconds=question.seconds)
        figures |= {"ended": ended} if ended else {}
        for rank in range(PROCESSES):
            file = Path(folder, f"{rank}.json")
            figures[f"process {rank}"] = json.loads(file.read_text()) if file.exists() else {}
    return figures


def start_group(job: dict[str, Any], *, seconds: float) -> str:
    """Why it did not end well; empty where it did."""
    launcher = ("-m", "graftwork.train.distributed.torchrun", "--standalone")
    count = ("--nproc-per-node", str(PROCESSES))
    environment = {
        **os.environ,
        "GRAFT_SHARE_CARD": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }
    group = subprocess.Popen(
        [sys.executable, *launcher, *count, str(Path(__file__).resolve()), "--member", json.dumps(job)],
        stdout=sys.stderr,
        env=environment,
        start_new_session=True,
    )
    try:
        code = group.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()
        return f"killed after {seconds:.0f} s"
    return f"ended with {code}" if code else ""


def train_member(job: dict[str, Any]) -> None:
    """One of the processes: set up as a worker does it, a few steps, and its figures in a file."""
    import torch

    from graftwork.train.distributed.launch import leave, make_strategy
    from graftwork.train.settings import TrainSettings

    begun, rank = time.perf_counter(), int(os.environ["RANK"])
    found: dict[str, Any] = {}

    def note(**figures: Any) -> None:
        found.update(figures)
        Path(job["folder"], f"{rank}.json").write_text(json.dumps(found))
        print(f"[{job['name']}, process {rank}] {json.dumps(figures)}", file=sys.stderr, flush=True)

    planned, card = job["strategy"], device() == "cuda"
    settings = TrainSettings.model_validate(planned["train"])
    if card:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(CAP_GIB / total, 1.0), 0)
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // PROCESSES, 1))
    strategy = make_strategy(settings, device=device(), dtype=planned["precision"] if card else "float32")
    engine = make_engine(job, settings, strategy)
    note(set_up_seconds=round(time.perf_counter() - begun, 1), **card_gib())
    rows = PROCESSES * PORTIONS * planned["micro_rows"]
    batch = make_rows(job["shape"], rows, length=step_sizes(job["shape"])[1])
    losses, seconds = [], []
    for _ in range(STEPS):
        begun = time.perf_counter()
        losses.append(engine.backward(batch).loss)
        engine.apply(1e-4)
        if card:
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begun, 2))
        note(losses=losses, step_seconds=seconds, host_gib=round(host_gib(), 1), **card_gib())
    strategy.finish()
    leave(0)


def make_engine(job: dict[str, Any], settings: Any, strategy: Any) -> Any:
    """Weights where the worker of `graft train` has them: those that are cut up begin on the host."""
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.trainable import make_trainable
    from graftwork.model.load import quantize_blocks
    from graftwork.train.engine import StepOptions, TrainingEngine
    from graftwork.train.settings import ALL_LINEARS

    planned, full = job["strategy"], settings.method == "full"
    half = torch.bfloat16 if device() == "cuda" else torch.float32
    model = make_model(job["shape"], torch.float32 if full else half)
    if settings.method == "qlora":
        quantize_blocks(model, device=device())
    if settings.strategy not in ("fsdp", "zero3"):
        model.to(device())
    layers = tuple(range(SHAPES[job["shape"]]["layers"]))
    shape = AdapterShape(
        kind="full" if full else "lora",
        rank=settings.rank,
        alpha=2 * settings.rank,
        targets=() if full else ALL_LINEARS,
        layers=layers,
    )
    return TrainingEngine(
        model,
        make_trainable(model, shape, seed=1),
        settings=settings,
        strategy=strategy,
        step=StepOptions(
            micro_rows=planned["micro_rows"], activation_checkpointing=planned["checkpointed_layers"] > 0
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=QUESTIONS, help="one of the two")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/two_cards.json")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.member:
        train_member(json.loads(asked.member))
        return
    if not asked.small and device() == "cpu":
        print("passed over: this needs a GPU; --small runs tiny shapes on a CPU")
        return
    if asked.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = {}
    for name, question in QUESTIONS.items():
        if asked.only in (None, name):
            small = Question(question.model, question.method, "tiny", 120)
            figures[name] = run_strategy(name, small if asked.small else question)
            emit({name: figures[name]})
    if asked.save:
        from results import save_results

        save_results("two_cards", figures)


if __name__ == "__main__":
    main()
