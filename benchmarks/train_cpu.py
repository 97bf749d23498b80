"""Training SmolLM2 on a processor: ours against TRL and transformers + PEFT, step by step in one run.

Run: python benchmarks/train_cpu.py [--rows 96] [--threads N], after `graft data prepare -C
examples/cited_answers`. Same rows, batches, schedule, first weights, rank 16 on the upper 15 layers,
fp32, two epochs. Each peer's step follows ours on the same batch, so that whatever else the machine
does weighs on all alike. Ours counts whole: data, step, journal, digest, checkpoints. At the end the
adapters of all three are loaded by us and measured on the same validation rows. `--loop` measures
instead what the loop costs over the bare step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import save_results
from transformers import AutoTokenizer

from graftwork.files.dataset import read_rows
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import adapter_tensors, attach, load_adapter
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base
from graftwork.model.shape import read_shape
from graftwork.model.threads import use_threads
from graftwork.process.heartbeat import Heart
from graftwork.records.dataset import Row
from graftwork.train.callbacks import HeartbeatCallback
from graftwork.train.cpu.step import layout_tokens, make_cpu_step
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.loss import mean_loss
from graftwork.train.objectives.epochs import EpochOrder, learning_rate
from graftwork.train.settings import ALL_LINEARS, TrainSettings

DATASETS = Path(__file__).parents[1] / "examples" / "cited_answers" / ".graft" / "datasets"
SHAPE = AdapterShape(rank=16, alpha=32, targets=ALL_LINEARS, layers=tuple(range(15, 30)))


class Ours:
    """The product's own loop, one step at a time."""

    def __init__(self, base: Path, rows: list[Row], settings: TrainSettings, folder: Path) -> None:
        self.folder = folder
        self.model = load_base(base)
        learned = attach(self.model, SHAPE, seed=settings.seed)
        self.first = {name: tensor.clone() for name, tensor in adapter_tensors(self.model).items()}
        way = make_cpu_step(self.model, rows, settings=settings, shape=read_shape(base), folder=folder)
        print(way[1])
        self.heart = Heart(folder)
        self.engine = TrainingEngine(
            self.model,
            learned,
            settings=settings,
            step=StepOptions(logits=way[0].logits),
            progress=self.heart.move,
        )
        self.loop = TrainingLoop(
            self.engine,
            EpochOrder(rows, settings=settings),
            RunContext(settings, folder),
            callbacks=[HeartbeatCallback(self.heart, folder)],
        )

    def step(self, number: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.loop._finish_step(self.loop._step(number))
        torch.use_deterministic_algorithms(False)


class Times:
    """Seconds of each contender's steps, by the wall and by the processor."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.own: dict[str, list[float]] = {}

    def add(self, name: str, wall: float, own: float) -> None:
        self.wall.setdefault(name, []).append(wall)
        self.own.setdefault(name, []).append(own)

    def measure(self, name: str, work: Callable[[], None]) -> None:
        wall, own = time.perf_counter(), time.process_time()
        work()
        self.add(name, time.perf_counter() - wall, time.process_time() - own)


def compare(rows: list[Row], checks: list[Row], base: Path, settings: TrainSettings) -> dict[str, Any]:
    from train_cpu_peers import PlainLoop, peft_model, train_with_trl

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = Ours(base, rows, settings, folder)
        batches = ours.loop._batches
        before = mean_loss(ours.model, checks, batch_size=8, device="cpu")

        def rate(number: int) -> float:
            return learning_rate(
                min(number, len(batches)),
                steps=len(batches),
                highest=settings.learning_rate,
                warmup_ratio=settings.warmup_ratio,
            )

        trl = peft_model(load_base(base), SHAPE, ours.first)
        plain = PlainLoop(peft_model(load_base(base), SHAPE, ours.first), rate)
        times = Times()

        def after_trl_step(number: int, wall: float, own: float) -> None:
            times.add("TRL", wall, own)
            batch = [rows[at] for at in batches[number - 1]]
            times.measure("graftwork", lambda: ours.step(number))
            times.measure("transformers + PEFT", lambda: plain.step(number, batch))
            shown = "  ".join(
                f"{name} {seconds[-1]:.2f} s ({times.own[name][-1]:.2f})"
                for name, seconds in times.wall.items()
            )
            print(f"step {number}/{len(batches)}  {shown}", file=sys.stderr)

        train_with_trl(
            trl,
            AutoTokenizer.from_pretrained(base),
            rows,
            batches,
            epochs=settings.epochs,
            rate=rate,
            folder=folder,
            after_step=after_trl_step,
        )
        ours.loop._store.settle()
        losses = {"graftwork": mean_loss(ours.model, checks, batch_size=8, device="cpu")}
        for name, model in (("TRL", trl), ("transformers + PEFT", plain.model)):
            model.save_pretrained(folder / "peer")
            fresh = load_base(base)
            load_adapter(fresh, folder / "peer")
            losses[name] = mean_loss(fresh, checks, batch_size=8, device="cpu")
    return _figures(rows, batches, times, before, losses, settings)


def _figures(
    rows: list[Row], batches: Any, times: Times, before: Any, losses: Any, settings: TrainSettings
) -> dict[str, Any]:
    replies = [sum(len(rows[at].tokens) - rows[at].trained_from for at in batch) for batch in batches]
    each = len(batches) // settings.epochs
    found: dict[str, Any] = {
        "rows": len(rows),
        "steps": len(batches),
        "threads": torch.get_num_threads(),
        "reply_tokens_per_step": statistics.mean(replies),
        "validation_loss_before": before,
        "contenders": {},
    }
    for name, seconds in times.wall.items():
        found["contenders"][name] = {
            "reply_tokens_per_second": _rate(replies, seconds),
            "reply_tokens_per_cpu_second": _rate(replies, times.own[name]),
            "first_epoch": _rate(replies[:each], seconds[:each]),
            "later_epochs": _rate(replies[each:], seconds[each:]),
            "validation_loss_after": losses[name],
        }
    mine = found["contenders"]["graftwork"]
    for name, other in found["contenders"].items():
        if name == "graftwork":
            continue
        pairs = zip(times.wall[name], times.wall["graftwork"], strict=True)
        other["times_faster"] = mine["reply_tokens_per_second"] / other["reply_tokens_per_second"]
        other["times_faster_median_step"] = statistics.median(theirs / ours for theirs, ours in pairs)
        other["times_faster_by_cpu_time"] = (
            mine["reply_tokens_per_cpu_second"] / other["reply_tokens_per_cpu_second"]
        )
        other["loss_off"] = mine["validation_loss_after"] / other["validation_loss_after"] - 1
    found["roofline"] = roofline(rows, batches, times.wall["graftwork"], settings)
    return found


def _rate(replies: list[int], seconds: list[float]) -> float:
    return sum(replies) / sum(seconds) if seconds else 0.0


def roofline(
    rows: list[Row], batches: Any, seconds: list[float], settings: TrainSettings
) -> dict[str, float]:
    """Operations that a step cannot do without, over what the processor multiplies at its best."""
    layer, head, first = 3_539_520, 49152 * 576, 15
    query_out_mlp = layer - 2 * 576 * 192
    seen: set[int] = set()
    needed = 0.0
    for batch in batches:
        layout = layout_tokens([rows[at] for at in batch])
        tokens, asked = layout.shared + sum(layout.rests), sum(layout.predicting)
        fresh = sum(rest for at, rest in zip(batch, layout.rests, strict=True) if at not in seen)
        seen.update(batch)
        adapters = 6 * SHAPE.rank * 10176 * tokens * 15
        through = layer * 14 * tokens + (layer - query_out_mlp) * tokens + query_out_mlp * asked
        needed += 2.0 * layer * first * fresh + 4.0 * through + 4.0 * head * asked + adapters
    rate = best_rate()
    return {
        "gflop_per_step": needed / len(batches) / 1e9,
        "matrix_gflops": rate / 1e9,
        "share_reached": needed / rate / sum(seconds),
    }


def best_rate() -> float:
    """The best of many packed products of a step's size."""
    from graftwork.train.cpu.linear import pack_product

    x, weight = torch.randn(736, 576), torch.randn(1536, 576)
    product = pack_product(weight, None, packed=True)
    best = float("inf")
    for _ in range(60):
        begun = time.perf_counter()
        product(x)
        best = min(best, time.perf_counter() - begun)
    return 2 * 736 * 576 * 1536 / best


def measure_loop(rows: list[Row], base: Path, settings: TrainSettings) -> dict[str, Any]:
    """What data, journal, heartbeat, digest and checkpoints add to gradient and update."""
    inside = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal inside
            begun = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                inside += time.perf_counter() - begun

        return call

    with tempfile.TemporaryDirectory() as scratch:
        ours = Ours(base, rows, settings, Path(scratch))
        # Warm: the trunk's output is there, and threads and buffers too.
        for batch in ours.loop._batches[: max(len(ours.loop._batches) // settings.epochs, 1)]:
            ours.engine.backward([rows[at] for at in batch])
            ours.engine.forget()
        ours.engine.backward = timed(ours.engine.backward)  # type: ignore[method-assign]
        ours.engine.apply = timed(ours.engine.apply)  # type: ignore[method-assign]
        begun = time.perf_counter()
        with ours.heart:
            ours.loop.run()
        whole = time.perf_counter() - begun
    return {
        "steps": ours.loop.steps,
        "checkpoint_every": settings.checkpoint_every,
        "loop_seconds": whole,
        "step_seconds": inside,
        "overhead_percent": 100 * (whole / inside - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--checks", type=int, default=24, help="validation rows for the final loss")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    folder = max(DATASETS.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, default=None)
    if folder is None:
        sys.exit("no dataset: run `graft data prepare -C examples/cited_answers` first")
    if not asked.loop:
        try:
            import trl  # noqa: F401
        except ImportError:
            sys.exit("TRL is not installed: pip install trl==1.16.0 peft datasets")
    use_threads(asked.threads)
    settings = TrainSettings(
        rank=16, alpha=32, upper_layers=15, epochs=2, batch_size=8, learning_rate=2e-3, checkpoint_every=50
    )
    # Whole batches only: then all contenders see the same ones.
    rows = read_rows(folder, "train")[: asked.rows // 8 * 8]
    checks = read_rows(folder, "validation")[: asked.checks]
    base = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    figures = measure_loop(rows, base, settings) if asked.loop else compare(rows, checks, base, settings)
    print(json.dumps(figures, indent=2))
    if not asked.no_save:
        print(save_results("train_cpu_loop" if asked.loop else "train_cpu", figures))


if __name__ == "__main__":
    main()
