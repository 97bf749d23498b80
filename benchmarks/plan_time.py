"""Seconds of our own step on a card: predicted before a probe, predicted after it, and measured.

Run on a machine with a GPU: python benchmarks/plan_time.py --out plan_time.jsonl. First the card is probed
(`graftwork.pipeline.probe_process`, as `graft plan probe` does), then each setting runs in a process of
its own, alone on the card; the predictions are written down before it starts. Random weights, rows of
random tokens, an optimizer step at every pass; the figure is the median of 8 steps after 5. What the
budget has no time for is named: most of a setting's time is compiling.
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

from plan_time_settings import RANK, SETTINGS, Setting, shape_of, trainable_of, tuning_of

from graftwork.costmodel.card_time import RowStatistics, TrainedPart

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
ROOT = Path(__file__).resolve().parent.parent
WARM_UP, TIMED = 5, 8
PROBED = {"7b": 30.0}
"""Shapes that are probed, and the seconds for each."""


def predict(setting: Setting, tuning: Any, rates: Any) -> dict[str, float]:
    """Seconds of one step by parts, and their sum."""
    from graftwork.costmodel.card_time import card_step

    shape = shape_of(setting.shape)
    step = card_step(
        shape,
        tuning,
        TrainedPart(adapted=shape.layers, trainable=trainable_of(shape), rates=rates),
        RowStatistics(mean_length=setting.length),
    )
    parts = {**step.parts, **step.once_a_step}
    return {"seconds": sum(parts.values()), **parts}


def measure(setting: Setting, tuning: Any) -> dict[str, Any]:
    """One setting, in this process. The card is not touched before a line comes on standard input."""
    import torch
    import transformers  # noqa: F401 - imported while another setting is measured

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.shape import linear_names
    from graftwork.pipeline.probe_process import make_model, make_rows
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import TrainSettings

    if not sys.stdin.readline():
        sys.exit("whoever started this is gone")
    shape = shape_of(setting.shape)
    model = make_model(shape, device="cuda", dtype="bfloat16")
    adapter = AdapterShape(
        rank=RANK, alpha=2 * RANK, targets=linear_names(shape), layers=tuple(range(shape.layers))
    )
    method = "qlora" if setting.form == "four" else "lora"
    settings = TrainSettings(method=method, rank=RANK, alpha=2 * RANK, max_gradient_norm=1.0)
    frozen = load_quantized(model, tuning, device="cuda")
    parameters = attach(model, adapter, seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
    torch.cuda.empty_cache()
    rows = make_rows(setting.tokens // setting.length, length=setting.length, vocabulary=shape.vocab_size)
    # Not settled: the tuning is what is asked about, and there is room for it.
    engine._use(tuning)
    begun = time.perf_counter()
    engine.backward(rows)
    torch.cuda.synchronize()
    engine.forget()
    first = time.perf_counter() - begun
    seconds = []
    for number in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.backward(rows)
        engine.apply(1e-4)
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begun)
    return {
        "measured": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "first_pass_seconds": round(first, 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def probe_shape(name: str, seconds: float) -> dict[str, Any]:
    """The probe's own process, as `graft plan probe` starts it."""
    job = {
        "shape": shape_of(name).model_dump(),
        "folder": tempfile.gettempdir(),
        "length": 2048,
        "rank": RANK,
        "seconds": seconds,
    }
    child = [sys.executable, "-m", "graftwork.pipeline.probe_process", json.dumps(job)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=200, check=False, env=_environment())
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": (done.stderr or done.stdout)[-2500:]}


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_all(settings: list[Setting], budget: float, out: Path) -> None:
    """Probe, predict, measure; a line as soon as it is there."""
    from graftwork.costmodel.probed_rates import rates_of_probe
    from graftwork.costmodel.rates import rates_of
    from graftwork.model.shape import layer_parameters
    from graftwork.plan.catalog.hardware import find_gpu
    from graftwork.records.plan import ProbeFacts

    begun = time.perf_counter()

    def tell(line: dict[str, Any]) -> None:
        line["at_second"] = round(time.perf_counter() - begun, 1)
        print(json.dumps(line), flush=True)
        with out.open("a") as handle:
            handle.write(json.dumps(line) + "\n")

    import torch

    stated = rates_of(find_gpu(torch.cuda.get_device_name()))
    tell({"stated": stated.model_dump()})
    probed: dict[str, Any] = {}
    for name, seconds in PROBED.items():
        found = probe_shape(name, seconds)
        rates = None
        if "error" not in found:
            rates = probed[name] = rates_of_probe(ProbeFacts.model_validate(found))
        tell({"probe": name, **found, "rates": rates and rates.model_dump()})

    def nearest(shape: str) -> str | None:
        size = layer_parameters(shape_of(shape))
        ratios = {one: layer_parameters(shape_of(one)) / size for one in probed}
        return min(ratios, key=lambda one: max(ratios[one], 1 / ratios[one])) if ratios else None

    def foretell(setting: Setting, tuning: Any) -> dict[str, Any]:
        near = nearest(setting.shape)
        after = predict(setting, tuning, probed[near]) if near else None
        return {"before": predict(setting, tuning, stated), "probe": near, "after": after}

    ready = [(setting, tuning_of(setting)) for setting in settings]
    tell({"predicted": {setting.name: foretell(setting, tuning) for setting, tuning in ready}})
    child = _start(*ready[0]) if ready else None
    for at, (setting, tuning) in enumerate(ready):
        spent = time.perf_counter() - begun > budget
        following = _start(*ready[at + 1]) if at + 1 < len(ready) and not spent else None
        line: dict[str, Any] = {
            "name": setting.name,
            "setting": setting._asdict(),
            "tuning": tuning.model_dump(),
            **foretell(setting, tuning),
        }
        if spent or child is None:
            line["error"] = "passed over for want of time"
            if child is not None:
                child.kill()
        else:
            line |= _finish(child)
        if "measured" in line:
            for when in ("before", "after"):
                if line[when]:
                    line[f"off_{when}"] = line[when]["seconds"] / line["measured"] - 1
        tell(line)
        child = following


def _start(setting: Setting, tuning: Any) -> "subprocess.Popen[str]":
    """A child that has imported everything when its turn comes."""
    child = [sys.executable, __file__, "--one", json.dumps(setting), tuning.model_dump_json()]
    pipe = subprocess.PIPE
    return subprocess.Popen(child, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment())


def _finish(child: Any) -> dict[str, Any]:
    try:
        said, complained = child.communicate("go\n", timeout=90)
    except subprocess.TimeoutExpired:
        child.kill()
        return {"error": "took longer than 90 seconds"}
    lines = [line for line in said.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": (complained or said)[-2500:]}


def show(lines: list[dict[str, Any]]) -> None:
    """The table, and the medians."""
    found = [line for line in lines if "measured" in line]
    print(f"{'setting':<52} {'measured':>9} {'before':>8} {'after':>8}")
    for line in found:
        after = line.get("off_after")
        print(
            f"{line['name']:<52} {line['measured'] * 1000:>6.1f} ms {line['off_before']:>+8.1%} "
            f"{'' if after is None else format(after, '+.1%'):>8}"
        )
    for when in ("before", "after"):
        off = [abs(line[f"off_{when}"]) for line in found if f"off_{when}" in line]
        if off:
            print(f"median error {when} the probe: {statistics.median(off):.1%} over {len(off)} settings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "TUNING"))
    parser.add_argument("--out", type=Path, default=Path("plan_time.jsonl"))
    parser.add_argument("--show", type=Path, help="show the lines of an earlier run")
    parser.add_argument(
        "--save", type=Path, help="keep the lines of an earlier run as results/plan_time.json"
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of settings, from 0")
    parser.add_argument("--budget-seconds", type=float, default=165)
    asked = parser.parse_args()
    if asked.one:
        from graftwork.records.plan import Tuning

        print(json.dumps(measure(Setting(*json.loads(asked.one[0])), Tuning.from_json(asked.one[1]))))
        return
    if asked.show:
        show([json.loads(line) for line in asked.show.read_text().splitlines()])
        return
    if asked.save:
        from results import save_results

        lines = [json.loads(line) for line in asked.save.read_text().splitlines()]
        device = next((line["device"]["name"] for line in lines if "device" in line), None)
        print(save_results("plan_time", {"lines": lines}, device=device))
        return
    import torch

    if not torch.cuda.is_available():
        print("passed over: this needs a GPU")
        return
    chosen = [SETTINGS[at] for at in asked.only] if asked.only else list(SETTINGS)
    run_all(chosen, asked.budget_seconds, asked.out)
    show([json.loads(line) for line in asked.out.read_text().splitlines()])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
