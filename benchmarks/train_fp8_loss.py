"""Does training in fewer bits learn the same? Loss curves of a real model, form by form.

Run: python benchmarks/train_fp8_loss.py [--rows 288] [--base FOLDER] [--dataset FOLDER]. By default
SmolLM2-135M-Instruct and the demo's dataset (`graft data prepare -C examples/cited_answers` first). The
same rows in the same order from the same first adapter: plain transformers; our step with frozen weights
whole, in 8 bits with 8-bit products, and in NF4. Prints the loss along the way and the validation loss
before and after, and "served": that of the same adapter on the unquantised base. Without a GPU the 8-bit
products are computed from the same codes and scales in float32, and everything else is float32 too: what
is seen is then the effect of the 8 bits alone.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
EPOCHS, BATCH, CHECKS, UPPER = 2, 8, 24, 15
FORMS = ("plain", "whole", "eight", "four")


def train(form: str, base: Path, rows: list[Any], checks: list[Any], device: str) -> dict[str, Any]:
    """One run; every loss of it."""
    from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.load import load_base
    from graftwork.model.shape import read_shape
    from graftwork.plan.catalog.hardware import default_rates
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.objectives.epochs import learning_rate, plan_steps
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    settings = TrainSettings(rank=16, alpha=32, epochs=EPOCHS, batch_size=BATCH, learning_rate=2e-3)
    shape = read_shape(base)
    adapter = AdapterShape(
        rank=16, alpha=32, targets=ALL_LINEARS, layers=tuple(range(shape.layers - UPPER, shape.layers))
    )
    dtype = "bfloat16" if device == "cuda" else "float32"
    begun = time.perf_counter()
    engine: TrainingEngine
    if form == "plain":
        model = load_base(base, dtype=dtype, device=device)
        engine = TrainingEngine(model, attach(model, adapter, seed=17), settings=settings)
    else:
        model = load_base(base, dtype=dtype)
        tuning = choose_tuning(
            shape,
            TuningRequest(
                method="qlora" if form == "four" else "lora",
                adapted=UPPER,
                trainable=5_000_000,
                step_tokens=2048,
                longest=max(len(row.tokens) for row in rows),
                eight=form == "eight",
            ),
            limit_gib=16,
            rates=default_rates(),
        )
        assert tuning is not None
        tuning = tuning.model_copy(update={"compiled": False})
        frozen = load_quantized(model, tuning, device=device)
        parameters = attach(model, adapter, seed=17)
        engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
        engine.settle(rows)
    steps = plan_steps(rows, settings=settings)
    before = engine.mean_loss(checks, batch_size=8)
    losses = []
    for number, batch in enumerate(steps, 1):
        losses.append(engine.backward([rows[at] for at in batch]).loss)
        engine.apply(learning_rate(number, steps=len(steps), highest=2e-3, warmup_ratio=0.1))
    after, seconds = engine.mean_loss(checks, batch_size=8), time.perf_counter() - begun
    served = (
        after if form == "plain" else _loss_on_whole_base(parameters, base, adapter, checks, dtype, device)
    )
    return {
        "form": form,
        "before": before,
        "after": after,
        "served": served,
        "seconds": seconds,
        "losses": losses,
    }


def _loss_on_whole_base(
    learned: Any, base: Path, adapter: Any, checks: list[Any], dtype: str, device: str
) -> float:
    """The adapter's loss where it will work: on the base as it is served, not as it was trained on."""
    import torch

    from graftwork.model.adapters.peft import attach
    from graftwork.model.load import load_base
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.settings import TrainSettings

    model = load_base(base, dtype=dtype, device=device)
    fresh = attach(model, adapter, seed=17)
    with torch.no_grad():
        for ours, theirs in zip(_tensors(fresh), _tensors(learned), strict=True):
            ours.copy_(theirs)
    return TrainingEngine(model, fresh, settings=TrainSettings()).mean_loss(checks, batch_size=8)


def _tensors(parameters: Any) -> list[Any]:
    return list(parameters.values()) if isinstance(parameters, dict) else list(parameters)


def main() -> None:
    import torch

    from graftwork.files.dataset import read_rows
    from graftwork.model.base import EMBEDDED, find_base
    from graftwork.model.threads import use_threads
    from graftwork.train.objectives.epochs import choose_rows

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--dataset", type=Path)
    asked = parser.parse_args()
    use_threads(None)
    base = asked.base or Path(find_base(EMBEDDED, project_folder=Path()).folder)
    folders = Path(__file__).parents[1] / "examples" / "cited_answers" / ".graft" / "datasets"
    dataset = asked.dataset or next(iter(folders.glob("[0-9a-f]*")))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = read_rows(dataset, "train")
    rows = [every[at] for at in choose_rows(len(every), most=asked.rows, seed=17)]
    checks = read_rows(dataset, "validation")[:CHECKS]
    found = []
    for form in asked.forms:
        found.append(train(form, base, rows, checks, device))
        print(form, {key: value for key, value in found[-1].items() if key != "losses"}, flush=True)
    show(found)
    from results import save_results

    name = torch.cuda.get_device_name() if device == "cuda" else None
    runs = [{key: value for key, value in run.items() if key != "losses"} for run in found]
    print(save_results("train_fp8_loss", {"rows": len(rows), "runs": runs}, device=name))


def show(found: list[dict[str, Any]]) -> None:
    print(f"{'step':>10} " + " ".join(f"{run['form']:>9}" for run in found))
    steps = len(found[0]["losses"])
    for step in sorted({1, *range(4, steps, 4), steps}):
        print(f"{step:>10} " + " ".join(f"{run['losses'][step - 1]:>9.4f}" for run in found))
    for name in ("before", "after", "served"):
        print(f"{name:>10} " + " ".join(f"{run[name]:>9.4f}" for run in found))


if __name__ == "__main__":
    main()
