"""A real training step of few layers with random weights, timed, through the engine that will train.

In: a shape and the device. Out: ProbedSteps. Speed does not depend on the values of weights, so none are
loaded. Knows the engines; what is made of their seconds is the plan's affair.
"""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.shape import adapter_parameters, layer_parameters, linear_names
from graftwork.records.dataset import Row
from graftwork.records.fit import Form, ProbedStep, ProbeJob
from graftwork.records.interaction import Message, Origin
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB

WARM_UP, TIMED = 5, 12
"""The first two passes compile, the third is recorded."""
PROCESSOR_WARM_UP, PROCESSOR_TIMED = 1, 3
PROCESSOR_STEP_SECONDS = 0.8
"""About what one processor's step may take: the rows are as many, and as long, as that allows."""
PROCESSOR_TRAINED_SHARE = 0.15
CARD_SHARE = 0.94
HEAD_TOKENS = 2048
PROBED_VOCABULARY_BYTES = 2**31
"""A processor's probe makes no larger tables of random numbers than this."""


def probe_card_step(job: ProbeJob, *, layers: int, tokens: int, form: Form) -> ProbedStep:
    """One optimizer step of `tokens` tokens on the card, all kept where that fits."""
    import torch

    from graftwork.model.adapters.peft import attach
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import TrainSettings

    shape = job.shape.model_copy(update={"layers": layers, "parameters": None, "max_positions": 32768})
    length = min(job.length, tokens)
    tuning = _tuning(shape, tokens=tokens, length=length, form=form)
    model = make_model(shape, device="cuda", dtype="bfloat16")
    settings = TrainSettings(
        method="qlora" if form == "four" else "lora",
        rank=job.rank,
        alpha=2 * job.rank,
        max_gradient_norm=1.0,
    )
    frozen = load_quantized(model, tuning, device="cuda")
    parameters = attach(model, _adapter(shape, job.rank), seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
    torch.cuda.empty_cache()
    rows = make_rows(tokens // length, length=length, vocabulary=shape.vocab_size)
    # Not settled: that would compile everything a second time, for a step that keeps nothing.
    engine._use(tuning)
    seconds = _time(engine, rows, warm_up=WARM_UP, timed=TIMED, wait=torch.cuda.synchronize)
    peak = float(torch.cuda.max_memory_allocated())
    del engine, frozen, parameters, model
    gc.collect()
    torch.cuda.empty_cache()
    return _step(shape, job, seconds, length=length, tokens=tokens, peak=peak, tuning=tuning)


def probe_processor_step(job: ProbeJob, *, layers: int, gflops: float) -> ProbedStep:
    """One optimizer step on the processor, as large as keeps it short."""
    import torch

    from graftwork.model.adapters.peft import attach
    from graftwork.process.memory import peak_memory_gib
    from graftwork.train.cpu.step import make_cpu_step
    from graftwork.train.engine import StepOptions, TrainingEngine
    from graftwork.train.settings import TrainSettings

    small = min(job.shape.vocab_size, int(PROBED_VOCABULARY_BYTES / (4 * job.shape.hidden_size)))
    changes = {"layers": layers, "vocab_size": small, "parameters": None}
    shape = job.shape.model_copy(update=changes)
    rows_count, length = _processor_rows(job, shape, gflops)
    torch.set_num_threads(job.threads or torch.get_num_threads())
    model = make_model(shape, device="cpu", dtype="float32")
    parameters = attach(model, _adapter(shape, job.rank), seed=1)
    settings = TrainSettings(rank=job.rank, alpha=2 * job.rank, batch_rows=rows_count)
    # As many replies as logs have: else the head would hide the blocks.
    asked = length - max(1, int(length * PROCESSOR_TRAINED_SHARE))
    rows = make_rows(rows_count, length=length, vocabulary=small, trained_from=asked)
    way = make_cpu_step(model, rows, settings=settings, folder=Path(job.folder))
    logits = None if way is None else way[0].logits
    engine = TrainingEngine(model, parameters, settings=settings, step=StepOptions(logits=logits))
    seconds = _time(engine, rows, warm_up=PROCESSOR_WARM_UP, timed=PROCESSOR_TIMED)
    return _step(
        shape,
        job,
        seconds,
        length=length,
        tokens=rows_count * length,
        peak=peak_memory_gib() * GIB,
        trained_share=1 - asked / length,
    )


def _processor_rows(job: ProbeJob, shape: ModelShape, gflops: float) -> tuple[int, int]:
    """(rows, length) of a step of four layers that takes about as long as it may."""
    head = PROCESSOR_TRAINED_SHARE * shape.vocab_size * shape.hidden_size
    a_token = 4 * (4 * layer_parameters(shape) + head)
    room = int(gflops * 1e9 * 0.5 * PROCESSOR_STEP_SECONDS / a_token)
    length = max(16, min(job.length, 256, room))
    return max(1, min(8, room // length)), length


def make_model(shape: ModelShape, *, device: str, dtype: str) -> Any:
    """A Llama of these sizes with random weights, made where it will work."""
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
    kind, maker = getattr(torch, dtype), cast(Any, AutoModelForCausalLM)
    before = torch.get_default_dtype()
    with torch.device(device):
        torch.set_default_dtype(kind)
        try:
            model = maker.from_config(config, dtype=kind)
        finally:
            torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def make_rows(count: int, *, length: int, vocabulary: int, trained_from: int = 1) -> list[Row]:
    """Rows of random tokens, trained on from one place to the end."""
    import numpy as np

    chance = np.random.default_rng(1)
    return [
        Row.model_construct(
            id=str(at),
            origin=Origin(file="random", line=1),
            messages=(Message(role="user", content=""),),
            reply="",
            tokens=tuple(chance.integers(0, vocabulary, length).tolist()),
            trained_from=trained_from,
        )
        for at in range(count)
    ]


def _tuning(shape: ModelShape, *, tokens: int, length: int, form: Form) -> Tuning:
    """Everything kept, weights turned over in the step, the embedding on the card."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory / GIB
    return Tuning(
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
        limit_gib=total * CARD_SHARE,
        peak_gib=0.0,
        seconds_a_token=0.0,
    )


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
        begun = time.perf_counter()
        engine.backward(rows)
        engine.apply(1e-4)
        wait()
        if number >= warm_up:
            seconds.append(time.perf_counter() - begun)
    return seconds


def _step(
    shape: ModelShape,
    job: ProbeJob,
    seconds: list[float],
    *,
    length: int,
    tokens: int,
    peak: float,
    tuning: Tuning | None = None,
    trained_share: float = 1.0,
) -> ProbedStep:
    ordered, middle = sorted(seconds), median(seconds)
    quarter = len(ordered) // 4
    return ProbedStep(
        layers=shape.layers,
        tokens=tokens,
        length=length,
        trainable=adapter_parameters(shape, rank=job.rank, targets=linear_names(shape), layers=shape.layers),
        trained_share=trained_share,
        seconds=middle,
        spread=(ordered[-1 - quarter] - ordered[quarter]) / 2 / middle,
        peak_bytes=peak,
        tuning=tuning,
    )
