"""Full fine-tuning in little GPU memory: the streaming engine, kill and resume.

    python benchmarks/train_full.py                 # on a machine with a GPU; under 9 minutes
    python benchmarks/train_full.py --small         # the same cases, tiny, on a CPU in a minute
    python benchmarks/train_full.py --only streamed-6.7b,resume-1.4b

Random weights of Llama shapes, rows of 2,048 tokens, 16 rows per step, AdamW, clipping. Each case runs in a
process of its own under a memory cap of the allocator, prints its figures as they come, and is killed after
its time: what it had measured by then is kept. What does not fit the budget of all cases is skipped.
"""

import argparse
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from train_full_model import SHAPES, make_model, make_rows, model_shape, step_sizes

RATE = 1e-5
LEAST_SECONDS = 20.0


@dataclass(frozen=True)
class Case:
    """One process. `seconds` is when it is killed."""

    name: str
    kind: str
    shape: str
    cap_gib: float
    seconds: float = 120
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("streamed-1.4b", "streamed", "1.4b", 8, 75),
    Case("resume-1.4b", "resume", "1.4b", 8, 180),
    Case("streamed-3b", "streamed", "3b", 16, 90),
    Case("streamed-6.7b", "streamed", "6.7b", 16, 150),
)
EXTRA = (
    Case("streamed-6.7b-host", "streamed", "6.7b", 16, 150, {"update": "host"}),
    Case("streamed-6.7b-gpu", "streamed", "6.7b", 16, 150, {"update": "gpu"}),
)
"""Only by name."""
SMALL = (
    Case("streamed-tiny", "streamed", "tiny", 1, 90),
    Case("resume-tiny", "resume", "tiny", 1, 120),
)


def plan(case: Case) -> Any:
    """The step that `graft plan fit` and `graft train` choose on this machine."""
    import torch

    from graftwork.costmodel.plain_step import PlainRun
    from graftwork.costmodel.rates import rates_of
    from graftwork.costmodel.streamed import StreamedWork, choose_streamed
    from graftwork.model.shape import total_parameters
    from graftwork.plan.catalog.hardware import default_rates, find_gpu
    from graftwork.plan.fit import project as fit
    from graftwork.plan.fit.candidates import RESERVED_SPREAD
    from graftwork.plan.fit.question import SYSTEM_GIB
    from graftwork.records.errors import UserError

    gpu, rates, card = None, default_rates(), torch.cuda.is_available()
    if card:
        try:
            gpu = find_gpu(torch.cuda.get_device_name())
            rates = rates_of(gpu)
        except UserError:
            pass
    here = fit.this_host()
    shape = model_shape(case.shape)
    run = PlainRun(
        shape,
        "llama",
        total_parameters(shape),
        "bfloat16" if card else "float32",
        rates,
        here.model_copy(update={"gpu": gpu, "gpus": int(gpu is not None)}),
    )
    rows, length = step_sizes(case.shape)
    step = choose_streamed(
        run,
        StreamedWork((length,), rows),
        limit_gib=case.cap_gib,
        host_gib=here.ram_gib - SYSTEM_GIB,
        spread=RESERVED_SPREAD["computed"],
    )
    update = {key: case.options[key] for key in ("update", "micro_rows") if key in case.options}
    return step.model_copy(update=update)


def planned_figures(case: Case, step: Any) -> dict[str, Any]:
    rows, length = step_sizes(case.shape)
    return {
        "planned_gib": round(step.peak_gib, 2),
        "planned_host_gib": round(step.host_gib, 1),
        "planned_step_seconds": round((step.seconds_per_token or 0) * rows * length, 3),
        "update": step.update,
        "micro_rows": step.micro_rows,
        "host_inputs": step.host_inputs,
    }


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def host_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpu_gib() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def choose_kernels(*, deterministic: bool) -> None:
    """As a worker of `graft train` does, before the card is used."""
    from graftwork.train.worker import use_deterministic_kernels

    use_deterministic_kernels(deterministic, on_gpu=device() == "cuda")


def make_engine(case: Case) -> Any:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import make_trainable
    from graftwork.train.settings import TrainSettings
    from graftwork.train.streamed.engine import StreamedEngine

    step = plan(case)
    emit(planned_figures(case, step))
    begun = time.perf_counter()
    model = make_model(case.shape)
    layers = tuple(range(SHAPES[case.shape]["layers"]))
    shape = AdapterShape(kind="full", rank=1, alpha=1, targets=(), layers=layers)
    parameters = make_trainable(model, shape, seed=1)
    weights = sum(parameter.numel() for parameter in parameters) / 1e9
    say(case, f"{weights:.2f}e9 weights in {time.perf_counter() - begun:.0f} s")
    settings = TrainSettings(
        method="full",
        offload=True,
        learning_rate=RATE,
        batch_size=step_sizes(case.shape)[0],
        epochs=1,
        checkpoint_every=2,
        keep_checkpoints=1,
        warmup_ratio=0,
    )
    begun = time.perf_counter()
    engine = StreamedEngine(model, parameters, settings=settings, step=step, device=device())
    say(case, f"buffers made and pinned in {time.perf_counter() - begun:.0f} s; host {host_gib():.1f} GiB")
    return engine, settings


def timed_steps(
    case: Case, step: Callable[[], float], *, most: int = 4, least: int = 3, seconds: float = 40
) -> list[float]:
    """Seconds between the beginnings of steps: an update that goes on in the background is counted."""
    import torch

    begins = [time.perf_counter()]
    for number in range(most + 1):
        loss = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begins.append(time.perf_counter())
        say(case, f"step {number + 1}: loss {loss:.4f}, {begins[-1] - begins[-2]:.2f} s")
        if number == 0:
            emit({"first_step_seconds": round(begins[1] - begins[0], 2), "first_loss": loss})
        if number + 1 >= least and begins[-1] - begins[0] > seconds:
            break
    # The first step makes states, buffers and kernels.
    return [after - before for before, after in itertools.pairwise(begins[1:])]


def run_streamed(case: Case) -> dict[str, Any]:
    """Steps with deterministic kernels, as by default, and with the fastest; are gradients repeated?"""
    choose_kernels(deterministic=True)
    rows, length = step_sizes(case.shape)
    engine, _ = make_engine(case)
    batch = make_rows(case.shape, rows, length=length)

    def step() -> float:
        measured = engine.backward(batch)
        engine.apply(RATE)
        return float(measured.loss)

    seconds = sorted(timed_steps(case, step))
    middle, planned = seconds[len(seconds) // 2], engine.step
    found = {
        "tokens_per_second": round(rows * length / middle, 1),
        "step_seconds": round(middle, 3),
        **planned_figures(case, planned),
        **gpu_gib(),
        "counted_gib": round(engine.device_memory.peak / 2**30, 3),
        "host_gib": round(host_gib(), 1),
    }
    emit(found)
    found |= time_apart(engine, batch)
    found["same_gradients"] = same_gradients(engine, batch)
    emit(found)
    choose_kernels(deterministic=False)
    fast = sorted(timed_steps(case, step, most=3, least=2, seconds=15))
    engine.learned()
    found |= {
        "step_seconds_any_order": round(fast[len(fast) // 2], 3),
        "same_gradients_any_order": same_gradients(engine, batch),
    }
    engine.digest()
    return found


def time_apart(engine: Any, batch: list[Any]) -> dict[str, float]:
    """Seconds of the passes and of the update, each without the other."""
    engine.learned()
    begun = time.perf_counter()
    engine.backward(batch)
    passed = time.perf_counter()
    engine.apply(RATE)
    engine.learned()
    ended = time.perf_counter()
    return {"passes_seconds": round(passed - begun, 3), "update_seconds": round(ended - passed, 3)}


def same_gradients(engine: Any, batch: list[Any]) -> bool:
    """Whether the same weights and rows give the same bits twice: at the bottom, behind everything else."""
    import torch

    def bits() -> list[Any]:
        measured = engine.backward(batch)
        units = (engine._units.table, engine._units.blocks[0])
        words = [unit.gradient.view(torch.int32).sum(dtype=torch.int64) for unit in units]
        return [measured.loss, measured.gradient_norm, *(int(word) for word in words)]

    return bits() == bits()


RESUME_STEPS, KILLED_AFTER = 4, 3
ATTEMPT_SECONDS = 80.0


def run_attempt(case: Case) -> dict[str, Any]:
    """Train in a folder with checkpoints; `kill` ends the process at a step with SIGKILL."""
    from graftwork.train.callbacks import TrainingCallback
    from graftwork.train.loop import RunContext, TrainingLoop
    from graftwork.train.objectives.epochs import EpochOrder

    choose_kernels(deterministic=True)
    rows, length = step_sizes(case.shape)
    engine, settings = make_engine(case)
    data = make_rows(case.shape, rows * RESUME_STEPS, length=length)
    kill = case.options.get("kill")
    losses, seconds = [], []

    class Killer(TrainingCallback):
        name = "killer"

        def on_step_end(self, step: Any, steps: int) -> None:
            say(case, f"step {step.step} of {steps}: loss {step.loss:.4f}, {step.seconds:.2f} s")
            losses.append(step.loss)
            seconds.append(step.seconds)
            if kill and step.step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(case.options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    context = RunContext(settings, folder, report=lambda message: say(case, message))
    # The last step needs no checkpoint here: it would take as long as all steps.
    loop = TrainingLoop(engine, EpochOrder(data, settings=settings), context, callbacks=[Killer()])
    if case.options.get("whole"):
        loop._is_due = lambda number: False  # type: ignore[method-assign]
    else:
        loop._is_due = lambda number: number == 2  # type: ignore[method-assign]
    loop.run()
    return {
        "state": state_digest(engine),
        "losses": losses,
        "step_seconds": round(min(seconds), 3),
        **gpu_gib(),
        "host_gib": round(host_gib(), 1),
    }


def state_digest(engine: Any) -> str:
    """Of all weights and both of Adam's moments, by several threads."""
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    from graftwork.model.load import tensors_digest

    tensors = {name: value for name, value in engine.state().items() if not name.startswith("random/")}
    with ThreadPoolExecutor(8) as threads:
        each = threads.map(lambda name: tensors_digest({name: tensors[name]}), sorted(tensors))
        return hashlib.sha256("\n".join(each).encode()).hexdigest()


def run_resume(case: Case) -> dict[str, Any]:
    """A run that is killed and resumed ends with the bytes of one that was not."""
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + case.seconds
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (
            ("whole", {"folder": f"{folder}/whole", "whole": True}),
            ("killed", {"folder": f"{folder}/cut", "kill": True}),
            ("resumed", {"folder": f"{folder}/cut"}),
        ):
            seconds = min(ATTEMPT_SECONDS, end - time.monotonic())
            if seconds < LEAST_SECONDS:
                found[name] = {"skipped": "no time is left"}
                continue
            attempt = Case(f"{case.name}/{name}", "attempt", case.shape, case.cap_gib, seconds, options)
            found[name] = start(attempt)
    states = [found[name].get("state") for name in ("whole", "resumed")]
    killed = found["killed"].get("error", "").endswith("-9")
    return {"same_bytes": None not in states and states[0] == states[1], "was_killed": killed, **found}


def say(case: Case, message: str) -> None:
    print(f"[{case.name}] {message}", file=sys.stderr, flush=True)


def emit(figures: dict[str, Any]) -> None:
    """Figures that are known so far; later ones of the same name replace them."""
    print(json.dumps(figures), flush=True)


def start(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own; if it does not end well, what it had measured and why."""
    begun = time.perf_counter()
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    child = subprocess.Popen(
        [sys.executable, __file__, "--case", json.dumps(vars(case))],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    found: dict[str, Any] = {}
    try:
        out, _ = child.communicate(timeout=case.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, _ = child.communicate()
        found["error"] = f"killed after {case.seconds:.0f} s"
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if child.returncode and "error" not in found:
        found["error"] = f"ended with {child.returncode}"
    return {**found, "took_seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", help="cases by name, separated by commas")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train_full.json")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        case = Case(**json.loads(asked.case))
        run = {"streamed": run_streamed, "attempt": run_attempt}[case.kind]
        emit(run(case))
        return
    if not asked.small and device() == "cpu":
        print("passed over: this needs a GPU; --small runs tiny shapes on a CPU")
        return
    cases = SMALL if asked.small else CASES
    if asked.only:
        wanted = asked.only.split(",")
        known = {case.name: case for case in (*EXTRA, *cases)}
        cases = tuple(known[name] for name in wanted)
    if asked.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {}
    end = time.monotonic() + asked.budget
    for case in cases:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            found[case.name] = {"skipped": "the budget is spent"}
        else:
            limited = replace(case, seconds=min(case.seconds, left))
            # A case that starts cases of its own runs here.
            found[case.name] = run_resume(limited) if case.kind == "resume" else start(limited)
        emit({case.name: found[case.name]})
        if asked.save:
            from results import save_results

            save_results("train_full", found)


if __name__ == "__main__":
    main()
