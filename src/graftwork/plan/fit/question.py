"""The question of `graft plan fit`, and what follows from it before any strategy is tried. Pure.

Input: a model, a machine, what the user stated. Output: a FitQuestion; the memory available, the setup of the
plain step, the chance that a batch of long rows runs out of memory late. Looks at no file and not at this
machine.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

from graftwork.costmodel.rollouts import choose_prompts_at_once
from graftwork.costmodel.run import why_plain as why_plain_step
from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.records.base import ELEMENT_BYTES, Figure
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.plan import FitOptions, FitQuestion, PlainSetup, Precision, RolloutLoad, Sharding

DEFAULT_ROWS = 1000


def make_question(model: CatalogModel, options: FitOptions, *, machine: Machine) -> FitQuestion:
    lengths = (options.seq,) if isinstance(options.seq, int) else tuple(sorted(options.seq))
    if options.algorithm == "grpo":
        # What is learned from is what was generated: a prompt and its answer.
        lengths = (options.prompt_tokens + options.completion_tokens,)
    # Numbers that no run can have are refused by name.
    stated = {
        "--seq": min(lengths, default=0),
        "--batch": options.batch_size,
        "--epochs": options.epochs,
        "--rank": options.rank,
        "--ram": machine.ram_gib,
        "--gpus": machine.gpus if machine.gpu is not None else 1,
    }
    for option, value in stated.items():
        if value <= 0:
            raise UserError(
                f"{option} is {value:g}",
                why="it must be above 0",
                fix="use a larger number",
                where=option,
            )
    share = options.trained_share
    if options.algorithm == "grpo":
        share = options.completion_tokens / lengths[0]
    derived = {
        "trained_share": share,
        "rows": options.rows or (len(lengths) if len(lengths) > 1 else DEFAULT_ROWS),
        "targets": options.targets or linear_names(model.shape),
        "adapted_layers": min(options.adapted_layers or model.shape.layers, model.shape.layers),
    }
    return FitQuestion(
        model=model.name,
        shape=model.shape,
        architecture=model.architecture,
        lengths=lengths,
        machine=machine,
        **(options.model_dump(exclude={"seq"}) | derived),
    )


def kind_of(question: FitQuestion) -> Literal["cpu", "cuda"]:
    return "cpu" if question.machine.gpu is None else "cuda"


def half_precision(question: FitQuestion) -> Precision:
    """bfloat16 if the GPU supports it, else float16 with scaling; CPUs work in float32."""
    gpu = question.machine.gpu
    if gpu is None:
        cpu = question.machine.cpu
        return "bfloat16" if cpu is not None and cpu.half_gflops else "float32"
    return "bfloat16" if gpu.has_bf16 else "float16"


def why_plain(question: FitQuestion) -> str | None:
    """Return why `graft train` would not use its own step on one device; None if it does."""
    gpu = question.machine.gpu
    return why_plain_step(
        question.shape,
        device=kind_of(question),
        method=question.method,
        precision=half_precision(question),
        capability=None if gpu is None else gpu.capability,
    )


def plain_setup(
    question: FitQuestion, *, sharding: Sharding, rows: int, tokens: int, checkpointed: int
) -> PlainSetup:
    """One pass of `rows` rows of `tokens` tokens."""
    graft, full = question.engine == "graft", question.method == "full"
    half = half_precision(question)
    weights: Precision = half
    if full:
        # Trained weights are in float32; DeepSpeed keeps that copy apart and computes in 16 bits.
        weights = half if not graft and sharding in ("zero2", "zero3") else "float32"
    return PlainSetup(
        method=question.method,
        rank=question.rank,
        targets=question.targets,
        adapted_layers=question.adapted_layers,
        dtype=weights,
        # Our own plain step mixes precisions only on one GPU where the weights themselves are learned.
        autocast=half != "float32" and not (graft and full and sharding != "none"),
        rows=rows,
        tokens=tokens,
        checkpointed=checkpointed,
        experts=question.experts,
        optimizer=question.optimizer,
        kbit_upcast=not graft and question.method == "qlora",
        fused_nf4=graft,
    )


CONTEXT_GIB = (0.3, 0.4, 0.5)
"""CUDA's own on a GPU: least, usual, most (published)."""
NCCL_GIB = (0.2, 0.35, 0.5)
"""A communicator between GPUs (published: about 0.5)."""
DESKTOP_GIB = (0.0, 0.2, 0.6)
"""GPU memory of a display on a desktop (guessed; `nvidia-smi` shows it)."""
SYSTEM_GIB = 4.0
"""Host memory of the operating system and its services (guessed)."""
TIGHT = 0.90

_PLAYED_ON = re.compile(r"(?<!\d)[2-5]0[5-9]0(?!\d)")


def rollout_load(question: FitQuestion) -> RolloutLoad | None:
    """The answers of a step as `graft train` samples them; None but for its GRPO."""
    if question.algorithm != "grpo" or question.engine != "graft":
        return None
    prompts = max(-(-question.batch_size // question.generations), 1)
    load = RolloutLoad(
        prompts=prompts,
        answers=min(question.generations, question.batch_size),
        prompt_tokens=question.prompt_tokens,
        max_tokens=question.completion_tokens,
        answer_tokens=question.completion_tokens,
        reward_seconds=question.reward_seconds / graders(question),
        reference_rows=0 if question.method == "full" else prompts,
    )
    return choose_prompts_at_once(
        question.shape,
        load,
        memory_gib=gpu_room(question, gpus=1).value,
        width=ELEMENT_BYTES[half_precision(question)],
        recorded=question.machine.gpu is not None,
    )


def graders(question: FitQuestion) -> int:
    """Processes that grade answers: one for each core with `graft train`, and with TRL the trainer itself."""
    cpu = question.machine.cpu
    return cpu.cores if question.engine == "graft" and cpu is not None else 1


def gpu_room(question: FitQuestion, *, gpus: int) -> Figure:
    """GiB that the allocator may use of one GPU; on a CPU, the host memory."""
    if question.memory_limit_gib is not None:
        return Figure.exact(question.memory_limit_gib, "GiB")
    gpu = question.machine.gpu
    if gpu is None:
        return Figure.exact(host_room(question), "GiB")
    reserves = [CONTEXT_GIB]
    if gpus > 1:
        reserves.append(NCCL_GIB)
    if drives_display(gpu):
        reserves.append(DESKTOP_GIB)
    least, usual, most = (sum(figures[case] for figures in reserves) for case in range(3))
    total = gpu.memory_gib
    return Figure(
        value=max(total - usual, 0.0), low=max(total - most, 0.0), high=max(total - least, 0.0), unit="GiB"
    )


def host_room(question: FitQuestion) -> float:
    """GiB of the host that a run may take."""
    return max(question.machine.ram_gib - SYSTEM_GIB, 0.0)


def drives_display(gpu: Gpu) -> bool:
    """GeForce GPUs, by the number in their name."""
    return _PLAYED_ON.search(gpu.name) is not None


QUANTILES = tuple((at + 0.5) / 16 for at in range(16))
RANGE_IN_DEVIATIONS = 2.0
"""A stated range is treated as two standard deviations either way."""
LONGEST_TAIL = 2.0
"""How much longer than the longest known row an unknown one may be (guessed)."""


def late_chance(
    lengths: Sequence[int],
    *,
    rows_in_run: int,
    rows_at_once: int,
    largest_that_fits: Sequence[float],
) -> float:
    """Probability that some batch exceeds what fits and the first does not. `largest_that_fits` are lengths
    for equally likely true peaks: the peak is not known exactly.
    """
    batches = max(rows_in_run // max(rows_at_once, 1), 1)
    chances = []
    for most in largest_that_fits:
        long = share_above(lengths, most, rows_in_run=rows_in_run)
        first = 1 - (1 - long) ** rows_at_once
        chances.append((1 - first) - (1 - first) ** batches)
    return max(sum(chances) / len(chances), 0.0) if chances else 0.0


def share_above(lengths: Sequence[int], most: float, *, rows_in_run: int) -> float:
    """Share of the rows that are longer than `most`."""
    if len(lengths) == 1:
        return float(lengths[0] > most)
    ordered = sorted(lengths)
    above = len(ordered) - bisect_right(ordered, most)
    if above or len(ordered) >= rows_in_run:
        return above / len(ordered)
    # None of the sample is: by the rule of succession one in this many may be, the less the further off.
    distance = most / max(ordered[-1], 1)
    return 0.0 if distance >= LONGEST_TAIL else (LONGEST_TAIL - distance) / (len(ordered) + 1)


def truths(value: float, *, spread: float) -> tuple[float, ...]:
    """Equally likely values around the stated one."""
    if spread <= 0:
        return (value,)
    normal = NormalDist(value, value * spread / RANGE_IN_DEVIATIONS)
    return tuple(max(normal.inv_cdf(quantile), 0.0) for quantile in QUANTILES)


def length_that_fits(*, room: float, floor: float, at_longest: float, longest: int) -> float:
    """Tokens of a row at which the peak reaches the limit, if memory grows in proportion to them."""
    a_token = (at_longest - floor) / max(longest, 1)
    return math.inf if a_token <= 0 else max((room - floor) / a_token, 0.0)
