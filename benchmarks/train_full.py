"""Full fine-tuning in little GPU memory: the streaming engine, its peers, kill and resume, distribution.

    python benchmarks/train_full.py                 # on a machine with a GPU; under 8 minutes
    python benchmarks/train_full.py --small         # the same cases, tiny, on a CPU in a minute
    python benchmarks/train_full.py --only streamed-6.7b,resume-1.4b

Random weights of Llama shapes, rows of 2,048 tokens, 16 rows a step, AdamW, clipping. Each case runs in a
process of its own under a memory cap of the allocator, prints its figures at its end, and is
killed after its time. What does not fit the budget of all cases is skipped.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEQUENCE, ROWS = 2048, 16
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
    Case("streamed-6.7b", "streamed", "6.7b", 16, 110),
    Case("resume-1.4b", "resume", "1.4b", 8, 130),
    Case("streamed-3b", "streamed", "3b", 16, 60),
    Case("fsdp2-3b", "fsdp2", "3b", 16, 75),
    Case("deepspeed-3b", "deepspeed", "3b", 16, 120),
    Case("distributed-1", "distributed", "nano", 16, 60, {"processes": 1}),
    Case("distributed-2", "distributed", "nano", 16, 60, {"processes": 2}),
)
EXTRA = (
    Case("streamed-6.7b-host", "streamed", "6.7b", 16, 150, {"update": "host"}),
    Case("streamed-6.7b-card", "streamed", "6.7b", 16, 150, {"update": "card"}),
    Case("fsdp2-6.7b", "fsdp2", "6.7b", 16, 240),
    Case("deepspeed-6.7b", "deepspeed", "6.7b", 16, 300),
)
"""Only by name: 6.7B with DeepSpeed needs more host memory than 128 GiB may have."""
SMALL = (
    Case("streamed-tiny", "streamed", "tiny", 1, 60),
    Case("resume-tiny", "resume", "tiny", 1, 90),
    Case("fsdp2-tiny", "fsdp2", "tiny", 1, 60),
    Case("distributed-1", "distributed", "nano", 1, 120, {"processes": 1}),
)
SHAPES: dict[str, dict[str, int]] = {
    "6.7b": {"hidden": 4096, "inner": 11008, "layers": 32, "heads": 32, "vocabulary": 32256},
    "3b": {"hidden": 3072, "inner": 8192, "layers": 28, "heads": 24, "vocabulary": 32256},
    "1.4b": {"hidden": 2048, "inner": 5504, "layers": 24, "heads": 16, "vocabulary": 32256},
    "nano": {"hidden": 128, "inner": 256, "layers": 2, "heads": 4, "vocabulary": 512},
    "tiny": {"hidden": 64, "inner": 128, "layers": 3, "heads": 4, "vocabulary": 512},
}


def make_config(shape: str) -> Any:
    from transformers import LlamaConfig

    sizes = SHAPES[shape]
    return LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        pad_token_id=None,
    )


def make_model(shape: str, dtype: Any = None) -> Any:
    """Weights from a small random pattern: drawing billions of them would take minutes."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(make_config(shape))
    model = model.to(dtype or torch.float32).to_empty(device="cpu")
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config)
    pattern = torch.randn(1 << 16, generator=torch.Generator().manual_seed(17)) * 0.02
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            flat, shifted = parameter.view(-1), pattern.roll(number)
            whole = flat.numel() // len(pattern) * len(pattern)
            flat[:whole].view(-1, len(pattern)).copy_(shifted.expand(whole // len(pattern), -1))
            flat[whole:].copy_(shifted[: flat.numel() - whole])
    return model.eval().requires_grad_(False)


def make_rows(shape: str, count: int, *, length: int) -> list[Any]:
    import random

    from graftwork.records.dataset import Row
    from graftwork.records.interaction import Message, Origin

    chance = random.Random(5)
    vocabulary = SHAPES[shape]["vocabulary"]
    return [
        Row(
            id=str(number),
            origin=Origin(file="log.jsonl", line=number + 1),
            messages=(Message(role="user", content="x"),),
            reply="y",
            tokens=tuple(chance.randrange(3, vocabulary) for _ in range(length)),
            trained_from=1,
        )
        for number in range(count)
    ]


def model_shape(shape: str) -> Any:
    from graftwork.model.shape import shape_of

    return shape_of(make_config(shape).to_dict(), name=shape)


def plan(case: Case) -> Any:
    """The step that `graft plan fit` and `graft train` choose on this machine."""
    import torch

    from graftwork.costmodel.distributed import PlainRun
    from graftwork.costmodel.rates import rates_of
    from graftwork.costmodel.streamed import StreamedWork, choose_streamed
    from graftwork.model.shape import total_parameters
    from graftwork.pipeline import fit_here
    from graftwork.plan.catalog.hardware import default_rates, find_gpu
    from graftwork.plan.fit.candidate import RESERVED_SPREAD
    from graftwork.plan.fit.question import SYSTEM_GIB
    from graftwork.records.errors import UserMistake

    gpu, rates, card = None, default_rates(), torch.cuda.is_available()
    if card:
        try:
            gpu = find_gpu(torch.cuda.get_device_name())
            rates = rates_of(gpu)
        except UserMistake:
            pass
    here = fit_here.this_host()
    shape = model_shape(case.shape)
    run = PlainRun(
        shape,
        "llama",
        total_parameters(shape),
        "bfloat16" if card else "float32",
        rates,
        here.model_copy(update={"gpu": gpu, "gpus": int(gpu is not None)}),
    )
    rows, length = sizes(case)
    step = choose_streamed(
        run,
        StreamedWork((length,), rows),
        limit_gib=case.cap_gib,
        host_gib=here.ram_gib - SYSTEM_GIB,
        spread=RESERVED_SPREAD["computed"],
    )
    update = {key: case.options[key] for key in ("update", "micro_rows") if key in case.options}
    return step.model_copy(update=update)


def sizes(case: Case) -> tuple[int, int]:
    """Rows of a step and tokens of a row."""
    return (ROWS, SEQUENCE) if case.shape not in ("tiny", "nano") else (4, 16)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def host_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def card_gib() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def make_engine(case: Case) -> Any:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.trainable import make_trainable
    from graftwork.train.settings import TrainSettings
    from graftwork.train.streamed.engine import StreamedEngine

    step = plan(case)
    say(case, f"plan: {step.model_dump_json()}")
    begun = time.perf_counter()
    model = make_model(case.shape)
    layers = tuple(range(SHAPES[case.shape]["layers"]))
    shape = AdapterShape(kind="full", rank=1, alpha=1, targets=(), layers=layers)
    parameters = make_trainable(model, shape, seed=1)
    say(
        case,
        f"{sum(p.numel() for p in parameters) / 1e9:.2f}e9 weights in {time.perf_counter() - begun:.0f} s",
    )
    settings = TrainSettings(
        method="full",
        offload=True,
        learning_rate=RATE,
        batch_rows=sizes(case)[0],
        epochs=1,
        checkpoint_every=2,
        keep_checkpoints=1,
        warmup_share=0,
    )
    begun = time.perf_counter()
    engine = StreamedEngine(model, parameters, settings=settings, step=step, device=device())
    say(case, f"buffers made and pinned in {time.perf_counter() - begun:.0f} s; host {host_gib():.1f} GiB")
    return engine, settings


def timed_steps(case: Case, step: Any, *, most: int = 5, least: int = 3, seconds: float = 40) -> list[float]:
    """Seconds between the beginnings of steps: an update that goes on in the background is counted."""
    import torch

    begins = [time.perf_counter()]
    for number in range(most + 1):
        loss = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begins.append(time.perf_counter())
        say(case, f"step {number + 1}: loss {loss:.4f}, {begins[-1] - begins[-2]:.2f} s")
        if number + 1 >= least and begins[-1] - begins[0] > seconds:
            break
    # The first step makes states, buffers and kernels.
    return [after - before for before, after in itertools.pairwise(begins[1:])]


def run_streamed(case: Case) -> dict[str, Any]:
    rows, length = sizes(case)
    engine, _ = make_engine(case)
    batch = make_rows(case.shape, rows, length=length)

    def step() -> float:
        measured = engine.backward(batch)
        engine.apply(RATE)
        return float(measured.loss)

    seconds = sorted(timed_steps(case, step))
    alone = time_apart(engine, batch)
    engine.digest()
    middle, planned = seconds[len(seconds) // 2], engine.step
    tokens = rows * length
    return {
        "tokens_per_second": round(tokens / middle, 1),
        "step_seconds": round(middle, 3),
        "planned_step_seconds": round((planned.seconds_a_token or 0) * tokens, 3),
        **card_gib(),
        "planned_gib": round(planned.peak_gib, 2),
        "counted_gib": round(engine.device_bytes.peak / 2**30, 3),
        "host_gib": round(host_gib(), 1),
        "planned_host_gib": round(planned.host_gib, 1),
        **alone,
        "update": planned.update,
        "micro_rows": planned.micro_rows,
        "host_inputs": planned.host_inputs,
    }


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


RESUME_STEPS, KILLED_AFTER = 4, 3


def run_attempt(case: Case) -> dict[str, Any]:
    """Train in a folder with checkpoints; `kill` ends the process at a step with SIGKILL."""
    import torch

    from graftwork.train.callbacks import TrainingCallback
    from graftwork.train.loop import RunContext, TrainingLoop
    from graftwork.train.objectives.epochs import EpochOrder

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    # With warnings only, cuDNN's attention stays one that adds up in another order each time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rows, length = sizes(case)
    engine, settings = make_engine(case)
    data = make_rows(case.shape, rows * RESUME_STEPS, length=length)
    kill = case.options.get("kill")

    class Killer(TrainingCallback):
        name = "killer"

        def on_step_end(self, step: Any, steps: int) -> None:
            say(case, f"step {step.step} of {steps}: loss {step.loss:.4f}, {step.seconds:.2f} s")
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
    return {"digest": engine.digest(), **card_gib(), "host_gib": round(host_gib(), 1)}


def run_resume(case: Case) -> dict[str, Any]:
    """A run that is killed and resumed ends with the bytes of one that was not."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (
            ("whole", {"folder": f"{folder}/whole", "whole": True}),
            ("killed", {"folder": f"{folder}/cut", "kill": True}),
            ("resumed", {"folder": f"{folder}/cut"}),
        ):
            found[name] = start(Case(f"{case.name}/{name}", "attempt", case.shape, case.cap_gib, 80, options))
    same = found["whole"].get("digest") == found["resumed"].get("digest") is not None
    killed = found["killed"].get("error", "").endswith("-9")
    return {"same_bytes": same, "was_killed": killed, "resumed": found["resumed"], "whole": found["whole"]}


def say(case: Case, message: str) -> None:
    print(f"[{case.name}] {message}", file=sys.stderr, flush=True)


def start(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own."""
    script = HERE / (
        "train_full_peers.py" if case.kind in ("fsdp2", "deepspeed", "distributed") else __file__
    )
    begun = time.perf_counter()
    environment = {
        **os.environ,
        "DS_BUILD_OPS": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    child = subprocess.Popen(
        [sys.executable, str(script), "--case", json.dumps(vars(case))],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=case.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return {"error": f"killed after {case.seconds:.0f} s"}
    took = round(time.perf_counter() - begun, 1)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        return {"error": f"ended with {child.returncode}", "took_seconds": took}
    return {**json.loads(lines[-1]), "took_seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", help="cases by name, separated by commas")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train_full.json")
    parser.add_argument("--budget", type=float, default=460, help="seconds for all cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        case = Case(**json.loads(asked.case))
        run = {"streamed": run_streamed, "resume": run_resume, "attempt": run_attempt}[case.kind]
        print(json.dumps(run(case)), flush=True)
        return
    cases = SMALL if asked.small else CASES
    if asked.only:
        wanted = asked.only.split(",")
        cases = tuple(case for case in (*cases, *EXTRA) if case.name in wanted)
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
        print(json.dumps({case.name: found[case.name]}), flush=True)
        if asked.save:
            from results import save_results

            save_results("train_full", found)


if __name__ == "__main__":
    main()
