"""The probe as a process of its own: `python -m graftwork.train.probe_process JOB`.

Input: a ProbeJob, as JSON or as the path of a file with it. Output: one JSON line on standard output,
ProbeFacts; on standard error a JSON line before each part: what comes, and the seconds that are still
expected. Imports nothing that a machine with torch and transformers lacks.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, cast

from graftwork.costmodel.gpu_tuning import FIRST_WITH_EIGHT, GPU_SHARE
from graftwork.costmodel.run import why_plain
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.shape import adapter_parameters, layer_parameters, linear_names
from graftwork.records.base import GIB
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.records.plan import DeviceName, Form, ModelShape, ProbedStep, ProbeFacts, ProbeJob, Tuning

WARM_UP, TIMED = 5, 12
"""The first pass runs eagerly, the second is recorded."""
CPU_WARM_UP, CPU_TIMED = 1, 3
TARGET_STEP_SECONDS = 0.8
"""Approximate time of a CPU's step: the number and length of rows are chosen for it."""
CPU_TRAINED_SHARE = 0.15
HEAD_TOKENS = 2048
PROBED_VOCABULARY_BYTES = 2**31
"""A CPU's probe makes no larger tables of random numbers than this."""


def probe_gpu_step(job: ProbeJob, *, layers: int, tokens: int, form: Form) -> ProbedStep:
    """One optimizer step of `tokens` tokens on the GPU, keeping everything if that fits."""
    import torch

    from graftwork.model.adapters.peft import attach
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import TrainSettings

    shape = job.shape.model_copy(update={"layers": layers, "parameters": None, "max_positions": 32768})
    length = min(job.length, tokens)
    # Everything kept, weights turned over in the step, the embedding on the GPU.
    tuning = Tuning(
        form=form,
        head="eight" if form == "eight" and shape.vocab_size % 16 == 0 else "whole",
        micro_tokens=tokens,
        longest=length,
        keep=shape.layers,
        lean=0,
        chunk_tokens=tokens,
        head_tokens=min(tokens, HEAD_TOKENS),
        turned=False,
        host_embedding=False,
        compiled=False,
        recorded=True,
        limit_gib=torch.cuda.get_device_properties(0).total_memory / GIB * GPU_SHARE,
        peak_gib=0.0,
        seconds_per_token=0.0,
    )
    model = make_model(shape, device="cuda", dtype="bfloat16")
    settings = TrainSettings(
        method="qlora" if form == "four" else "lora",
        rank=job.rank,
        alpha=2 * job.rank,
        max_grad_norm=1.0,
    )
    frozen = load_quantized(model, tuning, device="cuda")
    parameters = attach(model, _adapter(shape, job.rank), seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
    torch.cuda.empty_cache()
    rows = make_rows(tokens // length, length=length, vocabulary=shape.vocab_size)
    # Not settled: there is room to keep everything.
    engine._use(tuning)
    seconds = _time(engine, rows, warm_up=WARM_UP, timed=TIMED, wait=torch.cuda.synchronize)
    peak = float(torch.cuda.max_memory_allocated())
    del engine, frozen, parameters, model
    gc.collect()
    torch.cuda.empty_cache()
    return ProbedStep(
        tokens=tokens, length=length, peak_bytes=peak, tuning=tuning, **_figures(shape, job, seconds)
    )


def probe_cpu_step(job: ProbeJob, *, layers: int, gflops: float) -> ProbedStep:
    """One optimizer step on the CPU, as large as possible in short time."""
    import torch

    from graftwork.model.adapters.peft import attach
    from graftwork.process.machine import peak_memory_gib
    from graftwork.train.cpu.step import make_cpu_step
    from graftwork.train.engine import StepOptions, TrainingEngine
    from graftwork.train.settings import TrainSettings

    small = min(job.shape.vocab_size, int(PROBED_VOCABULARY_BYTES / (4 * job.shape.hidden_size)))
    changes = {"layers": layers, "vocab_size": small, "parameters": None}
    shape = job.shape.model_copy(update=changes)
    # A step of four layers that takes about as long as it may.
    head = CPU_TRAINED_SHARE * shape.vocab_size * shape.hidden_size
    flops_per_token = 4 * (4 * layer_parameters(shape) + head)
    room = int(gflops * 1e9 * 0.5 * TARGET_STEP_SECONDS / flops_per_token)
    length = max(16, min(job.length, 256, room))
    rows_count = max(1, min(8, room // length))
    torch.set_num_threads(job.threads or torch.get_num_threads())
    model = make_model(shape, device="cpu", dtype="float32")
    parameters = attach(model, _adapter(shape, job.rank), seed=1)
    settings = TrainSettings(rank=job.rank, alpha=2 * job.rank, batch_size=rows_count)
    # As many replies as logs have: else the head would hide the blocks.
    prompt_tokens = length - max(1, int(length * CPU_TRAINED_SHARE))
    rows = make_rows(rows_count, length=length, vocabulary=small, trained_from=prompt_tokens)
    logits = None
    if why_plain(shape, device="cpu", method=settings.method, precision="float32") is None:
        logits = make_cpu_step(model, rows, settings=settings, shape=shape, folder=Path(job.folder))[0].logits
    engine = TrainingEngine(model, parameters, settings=settings, step=StepOptions(logits=logits))
    seconds = _time(engine, rows, warm_up=CPU_WARM_UP, timed=CPU_TIMED)
    return ProbedStep(
        tokens=rows_count * length,
        length=length,
        peak_bytes=peak_memory_gib() * GIB,
        trained_share=1 - prompt_tokens / length,
        **_figures(shape, job, seconds),
    )


def make_model(shape: ModelShape, *, device: str, dtype: str) -> Any:
    """A Llama of these sizes with random weights, created on its device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied_embeddings,
    )
    kind, maker = getattr(torch, dtype), cast("Any", AutoModelForCausalLM)
    before = torch.get_default_dtype()
    with torch.device(device):
        torch.set_default_dtype(kind)
        try:
            model = maker.from_config(config, dtype=kind)
        finally:
            torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def make_rows(count: int, *, length: int, vocabulary: int, trained_from: int = 1) -> list[Row]:
    """Rows of random tokens, trained on from one position to the end."""
    import numpy as np

    chance = np.random.default_rng(1)
    return [
        Row.model_construct(
            id=str(number),
            origin=Origin(file="random", line=1),
            messages=(Message(role="user", content=""),),
            reply="",
            tokens=tuple(chance.integers(0, vocabulary, length).tolist()),
            trained_from=trained_from,
        )
        for number in range(count)
    ]


def _adapter(shape: ModelShape, rank: int) -> AdapterShape:
    return AdapterShape(
        rank=rank, alpha=2 * rank, targets=linear_names(shape), layers=tuple(range(shape.layers))
    )


def _time(
    engine: Any, rows: Sequence[Row], *, warm_up: int, timed: int, wait: Any = lambda: None
) -> list[float]:
    seconds = []
    for number in range(warm_up + timed):
        wait()
        started_at = time.perf_counter()
        engine.backward(rows)
        engine.apply(1e-4)
        wait()
        if number >= warm_up:
            seconds.append(time.perf_counter() - started_at)
    return seconds


def _figures(shape: ModelShape, job: ProbeJob, seconds: list[float]) -> dict[str, Any]:
    """Fields of a ProbedStep that follow from the model and the timed steps."""
    ordered, middle = sorted(seconds), median(seconds)
    quarter = len(ordered) // 4
    return {
        "layers": shape.layers,
        "trainable": adapter_parameters(
            shape, rank=job.rank, targets=linear_names(shape), layers=shape.layers
        ),
        "seconds": middle,
        "spread": (ordered[-1 - quarter] - ordered[quarter]) / 2 / middle,
    }


EXPECTED = {
    "starting torch": 4.0,
    "the context": 1.0,
    "products at the model's sizes": 2.0,
    "copying memory": 0.5,
    "transfers to the GPU and back": 0.5,
    "calling a kernel": 0.2,
    "the disk": 1.0,
}
"""Seconds measured on our machines; only used for the remaining time."""
GPU_STEP_SECONDS = {4: 4.0, 2: 1.5}
"""By layers: the first step of a form starts its kernels."""
CPU_STEP_SECONDS = 5.0
TWO_SIZES_SECONDS = 15.0
"""With less time only one format and one number of tokens are probed."""
LAYERS = (4, 2)


class Probing:
    """Runs the parts in order, reports them, and skips those that time or the machine does not allow."""

    def __init__(self, job: ProbeJob, parts: list[str]) -> None:
        self.job = job
        self.begun = time.perf_counter()
        self.left_out: list[str] = []
        self.took: dict[str, float] = {}
        self._ahead = {part: EXPECTED[part] for part in parts}

    def expect(self, part: str, seconds: float) -> None:
        self._ahead[part] = seconds

    def pass_over(self, *parts: str) -> None:
        """Skip a part that does not apply to a CPU: nothing is missing."""
        for part in parts:
            self._ahead.pop(part, None)

    def do(self, part: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; None if it failed. A part without an estimate counts as short."""
        seconds_left = round(sum(self._ahead.values()), 1)
        print(json.dumps({"doing": part, "left_seconds": seconds_left}), file=sys.stderr, flush=True)
        self._ahead.pop(part, None)
        started_at = time.perf_counter()
        try:
            return work()
        except (RuntimeError, OSError, ImportError, ValueError, NotImplementedError) as error:
            # A probe is for unknown machines: one part that fails must not lose the others.
            self.left_out.append(
                f"{part}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            return None
        finally:
            self.took[part] = round(time.perf_counter() - started_at, 2)

    def has_time(self, part: str, *, quick: bool = False) -> bool:
        """A `quick` part has been prepared by the one before it."""
        if quick or time.perf_counter() - self.begun < self.job.seconds:
            return True
        self._ahead.pop(part, None)
        self.left_out.append(f"{part}: the {self.job.seconds:.0f} seconds were spent")
        return False


def probe(job: ProbeJob) -> ProbeFacts:
    """Everything that can be measured on this machine."""
    from graftwork.model.probe import used_before

    before = used_before()
    probing = Probing(job, list(EXPECTED))
    torch = probing.do("starting torch", lambda: import_module("torch"))
    if torch is None:
        raise ModuleNotFoundError("torch", name="torch")
    on_gpu = torch.cuda.is_available()
    facts = _gpu_facts(job, probing, before) if on_gpu else _cpu_facts(job, probing)
    return ProbeFacts(
        **facts,
        shape=job.shape,
        rank=job.rank,
        took=probing.took,
        left_out=tuple(probing.left_out),
        seconds=round(time.perf_counter() - probing.begun, 2),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _gpu_facts(job: ProbeJob, probing: Probing, before: float | None) -> dict[str, Any]:
    import torch

    from graftwork.model import probe as rates

    gpu = torch.cuda.get_device_properties(0)
    capability = gpu.major + gpu.minor / 10
    forms = job.forms or (("eight",) if capability >= FIRST_WITH_EIGHT else ("whole",))
    ahead = [(form, tokens, layers) for tokens in job.tokens for form in forms for layers in LAYERS]
    if job.seconds < TWO_SIZES_SECONDS:
        ahead = ahead[: len(LAYERS)]
    for planned in ahead:
        probing.expect(_named(*planned), GPU_STEP_SECONDS[planned[-1]])
    context = probing.do("the context", lambda: rates.measure_context(before))
    sizes = rates.measure_products
    eight = capability >= FIRST_WITH_EIGHT
    products = probing.do(
        "products at the model's sizes", lambda: tuple(sizes(job.shape, device="cuda", eight=eight))
    )
    copied = probing.do("copying memory", lambda: rates.measure_copy(device="cuda"))
    transfers = probing.do("transfers to the GPU and back", rates.measure_transfers)
    launch = probing.do("calling a kernel", lambda: rates.measure_launch(device="cuda"))
    disk = probing.do("the disk", lambda: rates.measure_disk(Path(job.folder)))
    torch.cuda.empty_cache()
    return {
        "device": _device("cuda", gpu.name),
        "memory_gib": gpu.total_memory / GIB,
        "capability": capability,
        "threads": torch.get_num_threads(),
        "products": products or (),
        "copy_bytes_s": copied or 0.0,
        "context_bytes": context,
        "to_device_bytes_s": transfers and transfers[0],
        "from_device_bytes_s": transfers and transfers[1],
        "launch_seconds": launch,
        "disk_write_bytes_s": disk and disk[0],
        "disk_read_bytes_s": disk and disk[1],
        "steps": _gpu_steps(job, probing, ahead),
    }


def _gpu_steps(job: ProbeJob, probing: Probing, ahead: list[tuple[Form, int, int]]) -> tuple[ProbedStep, ...]:

    probed: list[ProbedStep] = []
    for form, tokens, layers in ahead:
        name = _named(form, tokens, layers)
        # With the same sizes nothing is compiled again.
        quick = any(step.tokens == tokens and step.tuning and step.tuning.form == form for step in probed)
        if probing.has_time(name, quick=quick):
            work = partial(probe_gpu_step, job, layers=layers, tokens=tokens, form=form)
            step = probing.do(name, work)
            probed += [] if step is None else [step]
    return tuple(probed)


def _named(form: Form, tokens: int, layers: int) -> str:
    bits = {"whole": 16, "eight": 8, "four": 4}[form]
    return f"a step of {layers} layers, {tokens:,} tokens, weights in {bits} bits"


def _cpu_facts(job: ProbeJob, probing: Probing) -> dict[str, Any]:
    import torch

    from graftwork.model import probe as rates
    from graftwork.model.probe import describe_device

    device = describe_device(threads=job.threads)
    torch.set_num_threads(device.threads)
    for layers in LAYERS:
        probing.expect(f"a step of {layers} layers", CPU_STEP_SECONDS)
    probing.pass_over("the context", "transfers to the GPU and back")
    products = probing.do(
        "products at the model's sizes",
        lambda: tuple(rates.measure_products(job.shape, device="cpu", eight=False)),
    )
    copied = probing.do("copying memory", lambda: rates.measure_copy(device="cpu"))
    launch = probing.do("calling a kernel", lambda: rates.measure_launch(device="cpu"))
    disk = probing.do("the disk", lambda: rates.measure_disk(Path(job.folder)))
    gflops = (
        sorted(rate.flops for rate in products or ())[len(products or ()) // 2] / 1e9 if products else 30.0
    )
    steps: list[ProbedStep] = []
    for layers in LAYERS:
        name = f"a step of {layers} layers"
        if probing.has_time(name):
            step = probing.do(name, partial(probe_cpu_step, job, layers=layers, gflops=gflops))
            steps += [] if step is None else [step]
    return {
        "device": _device("cpu", device.name),
        "memory_gib": device.memory_gib,
        "threads": device.threads,
        "products": products or (),
        "copy_bytes_s": copied or 0.0,
        "launch_seconds": launch,
        "disk_write_bytes_s": disk and disk[0],
        "disk_read_bytes_s": disk and disk[1],
        "steps": tuple(steps),
    }


def _device(kind: str, name: str) -> DeviceName:
    from graftwork.model.probe import name_device

    device = name_device()
    driver = device.driver if device.kind == kind else ""
    return DeviceName.model_validate({"kind": kind, "name": name, "driver": driver, "torch": device.torch})


def main() -> int:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    argument = sys.argv[1]
    job = ProbeJob.from_json(argument if argument.lstrip().startswith("{") else Path(argument).read_bytes())
    print(probe(job).model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
