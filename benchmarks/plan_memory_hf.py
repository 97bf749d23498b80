"""Peak memory of plain transformers + PEFT on a card, beside what was said before: one fresh process each.

Weights are random: memory does not depend on them. The model, the steps and the words of a setting are those
that the tracer follows without a card (`graftwork.costmodel.trace.model`). Predictions are written to
OUT.predicted.jsonl before the first process starts; then one JSON line a setting goes to OUT. Models marked
`held_out` were never looked at while the counting was built.

    python benchmarks/plan_memory_hf.py --dry                       # predictions alone, no card needed
    python benchmarks/plan_memory_hf.py --out memory_hf.jsonl       # on a card; 4 processes at a time
    python benchmarks/plan_memory_hf.py --only qwen3-lora-2048      # one of them, in this process
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plan_memory_hf_cases import CASES, Case, case_json, shape_of

from graftwork.costmodel.plain_memory import plain_peak
from graftwork.records.plan import PlainSetup
from graftwork.records.units import GIB

STEPS = 4
SECONDS_EACH = 150.0
Line = dict[str, Any]


def predict(case: Case) -> Line:
    """What is said before the run. Needs no card and no torch."""
    peak = plain_peak(shape_of(case), case.setup, architecture=case.config["model_type"])
    return {
        "allocated_gib": peak.allocated / GIB,
        "reserved_gib": peak.reserved / GIB,
        "phase": peak.phase,
        "parts_gib": {name: value / GIB for name, value in peak.parts.items()},
    }


def measure(case: Case, *, history: Path | None) -> Line:
    """Set the model up on the card, take a few steps, and read the allocator's own counters."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from graftwork.costmodel.trace.model import build_model

    setup = case.setup
    torch.manual_seed(0)
    model: Any = build_model(case.config, setup, device="cuda", attention="sdpa")
    lay_out(model)
    optimizer = make_optimizer(model, setup)
    ids = torch.randint(0, case.config["vocab_size"], (setup.rows, setup.tokens), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = {"setup": torch.cuda.memory_allocated() / GIB}
    phases: dict[str, float] = {}
    most = 0.0
    seconds: list[float] = []
    backend = SDPBackend.FLASH_ATTENTION if setup.attention == "flash" else SDPBackend.MATH
    if history is not None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    with sdpa_kernel(backend):
        for step in range(STEPS):
            last = step == STEPS - 1
            started = time.perf_counter()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=setup.autocast):
                loss = loss_of(model, ids, setup)
            note(phases, held, "forward")
            loss.backward()
            note(phases, held, "backward")
            optimizer.step()
            note(phases, held, "optimizer")
            optimizer.zero_grad(set_to_none=True)
            del loss
            held["end"] = torch.cuda.memory_allocated() / GIB
            seconds.append(time.perf_counter() - started)
            most = max(most, *phases.values())
            if history is not None and step == 1:
                write_history(history)
                history = None
            if not last:
                phases = {}
    return {
        "allocated_gib": most,
        "reserved_gib": torch.cuda.memory_reserved() / GIB,
        "phases": phases,
        "held": held,
        "step_seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
    }


def lay_out(model: Any) -> None:
    """Every weight as if it had just been read, one after the other: building leaves holes between them."""
    import torch

    moved: dict[int, Any] = {}

    def move(tensor: Any, device: str) -> Any:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    for device in ("cpu", "cuda"):
        moved.clear()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device)
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                state.absmax, state.code = move(state.absmax, device), move(state.code, device)
                state.offset = move(state.offset, device)
                state.state2.absmax = move(state.state2.absmax, device)
                state.state2.code = move(state.state2.code, device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        gc.collect()
        torch.cuda.empty_cache()


def note(phases: dict[str, float], held: dict[str, float], phase: str) -> None:
    """The most that was held since the last note, and what is held now."""
    import torch

    torch.cuda.synchronize()
    phases[phase] = torch.cuda.max_memory_allocated() / GIB
    held[phase] = torch.cuda.memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()


def loss_of(model: Any, ids: Any, setup: PlainSetup) -> Any:
    """transformers' own loss; or head and loss in one, by Liger's kernel."""
    if setup.loss == "plain":
        return model(input_ids=ids, labels=ids, use_cache=False).loss
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False)[0]
    target = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].reshape(-1)
    weight = inner.get_output_embeddings().weight
    result = LigerFusedLinearCrossEntropyFunction.apply(hidden.view(-1, hidden.shape[-1]), weight, target)
    return result[0] if isinstance(result, tuple) else result


def make_optimizer(model: Any, setup: PlainSetup) -> Any:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setup.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-6)
    if setup.optimizer == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, lr=1e-6)
    how: dict[str, Any] = {"fused": True} if setup.optimizer == "adamw_fused" else {}
    if not how:
        how = {"foreach": setup.optimizer == "adamw_foreach"}
    return torch.optim.AdamW(trained, lr=1e-6, **how)


def write_history(path: Path) -> None:
    """Every block that was taken and given back, by size, so that a miss can be traced to its tensor."""
    import torch

    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1, "segment_alloc": 0}
    events = [[signs[e["action"]], e["addr"], e["size"]] for e in entries if e["action"] in signs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(events))


def run_child(case: Case, *, history: bool, out: Path) -> Line:
    """One setting in its own process."""
    command = [sys.executable, __file__, "--only", case.name, *(["--history", str(out)] if history else [])]
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_EACH, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {SECONDS_EACH:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": done.stderr.strip()[-1500:]}
    found: Line = json.loads(lines[-1])
    found["process_seconds"] = round(time.perf_counter() - begun, 1)
    return found


def describe_device() -> Line:
    from importlib import metadata

    import torch

    versions = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "liger_kernel"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return {"name": torch.cuda.get_device_name(), **versions}


def run_one(name: str, *, history: Path | None) -> None:
    case = next(case for case in CASES if case.name == name)
    path = None if history is None else Path(f"{history}.history") / f"{name}.json"
    measured = measure(case, history=path)
    print(json.dumps({"measured": measured, "device": describe_device()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="print predictions and stop")
    parser.add_argument("--only", help="one setting, in this process")
    parser.add_argument("--history", type=Path, help="with --only: where blocks are written")
    parser.add_argument("--out", type=Path, default=Path("memory_hf.jsonl"))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument(
        "--no-history", action="store_true", help="do not write what was taken and given back"
    )
    arguments = parser.parse_args()
    if arguments.only:
        run_one(arguments.only, history=arguments.history)
        return
    predicted = {case.name: predict(case) for case in CASES}
    lines = [{"engine": "hf", "config": case_json(case), "predicted": predicted[case.name]} for case in CASES]
    for line in lines:
        if arguments.dry:
            print(json.dumps(line))
    if arguments.dry:
        return
    Path(f"{arguments.out}.predicted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def run(case: Case) -> None:
        found = run_child(case, history=not arguments.no_history, out=arguments.out)
        line = {
            "engine": "hf",
            "config": case_json(case),
            "predicted": predicted[case.name],
            "held_out": case.held_out,
            **found,
        }
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "error" in found:
            print(f"{case.name:32} {found['error'][-200:]}", file=sys.stderr)
        elif not case.held_out:
            was, now = predicted[case.name], found["measured"]
            print(f"{case.name:32} {was['allocated_gib']:8.3f} {now['allocated_gib']:8.3f}", file=sys.stderr)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        # The longest first, so that no long one is left to the end.
        list(pool.map(run, sorted(CASES, key=lambda case: -predicted[case.name]["allocated_gib"])))


if __name__ == "__main__":
    main()
