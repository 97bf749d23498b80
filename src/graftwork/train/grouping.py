"""Which runs of a batch are trained side by side: decided from their plans alone. Pure.

In: the jobs of a batch, in order. Out: groups of places in it. Side by side costs what the shared
beginnings and the faster ways of a single run would have saved; it gains what starting small products
costs. So it is asked for, or chosen where a measurement has shown that it pays.
"""

from collections.abc import Sequence

from graftwork.records.run import TrainJob
from graftwork.records.units import GIB

PAYS = {"cpu": False, "cuda": False}
"""Where it is known to be faster: nowhere yet.

On a CPU two noisy repeats took 3-9 % less processor time than the plain path, which is not the way that a
single run takes there: against the processor's own step nobody has measured it, nor on a GPU.
"""

SMALL_TOKENS = 4096
"""Larger steps keep a device busy by themselves."""

SPARE = 0.9
"""The share of a device's memory that a group may plan to fill."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def choose_groups(jobs: Sequence[TrainJob]) -> tuple[tuple[int, ...], ...]:
    """Groups of at least two, each of runs that can and should share their steps."""
    groups: list[list[int]] = []
    for place, job in enumerate(jobs):
        if not _wanted(job):
            continue
        for group in groups:
            if _fit([*(jobs[at] for at in group), job]):
                group.append(place)
                break
        else:
            groups.append([place])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _wanted(job: TrainJob) -> bool:
    asked = job.run.get("side_by_side", "auto")
    alone = job.crew.get("strategy", "single") == "single"
    # A card's own step has layers of its own, which know one adapter.
    if asked == "off" or not alone or job.plan.tuning is not None:
        return False
    if job.plan.train["settings"]["method"] not in ("lora", "dora"):
        return False
    if _is_tight(job):
        return False
    return asked == "on" or (PAYS[job.plan.device.kind] and _tokens_a_step(job) <= SMALL_TOKENS)


def _is_tight(job: TrainJob) -> bool:
    """Whether its own rows do not fit at once: those that share a step take all of theirs together."""
    plain = job.plan.plain
    rows = int(job.plan.train["settings"].get("batch_rows", 1))
    return plain is not None and (plain.checkpointed or plain.micro_rows < rows)


def _fit(jobs: Sequence[TrainJob]) -> bool:
    """On one base, none waiting for another of them, and within the device's memory."""
    first, last = jobs[0], jobs[-1]
    if (first.base_folder, first.plan.dtype) != (last.base_folder, last.plan.dtype):
        return False
    if any(last.start_adapter and last.start_adapter.startswith(job.folder) for job in jobs):
        return False
    base = last.plan.total_parameters.value * BYTES.get(last.plan.dtype, 4) / GIB
    # The weights are there once; what each run needs besides them is there for each.
    needed = base + sum(max(job.plan.peak_memory_gib.high - base, 0.0) for job in jobs)
    return needed <= SPARE * last.plan.device.memory_gib


def _tokens_a_step(job: TrainJob) -> float:
    return job.plan.tokens.value / max(job.plan.steps.value, 1)
