"""GPUs and CPUs by name: what their makers state, and what was measured.

Input: a name as people, drivers or price lists write it. Output: its figures with their source and date; and
what frozen weights in fewer bits cost and gain in training, as measured. Does not look at this machine.
"""

import re
from functools import cache
from pathlib import Path

from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.plan.catalog import (
    SOURCE,
    ColumnParsers,
    above_zero,
    find_named,
    list_rows,
    names,
    number,
    read_table,
    text,
    whole,
)
from graftwork.records.hardware import Cpu, Gpu

GPU_COLUMNS = ColumnParsers(
    needed={
        "name": text,
        "memory_gib": above_zero,
        "capability": above_zero,
        "half_tflops": above_zero,
        "bandwidth_gb_s": above_zero,
        "pcie_gb_s": above_zero,
        "watts": above_zero,
        **SOURCE,
    },
    optional={"aliases": names, "eight_tflops": number, "nvlink_gb_s": number, "launch_usd": number},
    key=("name",),
)
CPU_COLUMNS = ColumnParsers(
    needed={
        "name": text,
        "cores": whole,
        "gflops": above_zero,
        "bandwidth_gb_s": above_zero,
        "watts": above_zero,
        **SOURCE,
    },
    optional={"aliases": names, "half_gflops": number, "launch_usd": number},
    key=("name",),
)
GUESSED = "guessed from the number of threads"
"""The source of a CPU that is not in the catalog."""
GUESSED_GFLOPS_PER_THREAD = 35.0
"""Float32: half a core of 32 operations per clock at 2.5 GHz; two shared threads of an EPYC gave 57."""
GUESSED_GB_S_PER_THREAD = 10.0
GUESSED_MOST_GB_S = 80.0
"""Memory bandwidth per thread, and the most that two channels provide."""
GUESSED_WATTS_PER_THREAD = 15.0
USUAL_RAM_GIB = 64.0
"""Host memory of a machine that is named only by its GPU or CPU, in every plan. This machine's own
memory is irrelevant to another one.
"""
_COUNTED = re.compile(r"(\d{1,4})[\s-]*(cores?|threads?|v?cpus?)", re.IGNORECASE)
THREADS_PER_CORE = 2
OWN_FILE = "or put it into your own {}.csv and name its folder with `--catalog` or GRAFT_CATALOG"


def find_gpu(name: str, *, overlay: Path | None = None) -> Gpu:
    """A GPU by its name or an alias: "RTX 5060 Ti 16GB", "5060ti", "NVIDIA A100-SXM4-80GB" …"""
    things = {}
    for gpu in list_gpus(overlay=overlay):
        # RTX and GTX are left out as often as not.
        short = (alias.upper().replace("RTX", "").replace("GTX", "") for alias in (gpu.name, *gpu.aliases))
        things[gpu.name] = (gpu, (*gpu.aliases, *short))
    return find_named(name, things, kind="GPU", fix=OWN_FILE.format("gpus"))


def find_cpu(name: str, *, overlay: Path | None = None) -> Cpu:
    """A CPU by its name or an alias; "16 cores" or "8 vCPU" is guessed from the number."""
    counted = _COUNTED.fullmatch(name.strip())
    if counted and int(counted[1]):
        number, by_core = int(counted[1]), counted[2].lower().startswith("core")
        guessed = guess_cpu(name.strip(), threads=number * (THREADS_PER_CORE if by_core else 1))
        return guessed.model_copy(update={"cores": number})
    things = {cpu.name: (cpu, cpu.aliases) for cpu in list_cpus(overlay=overlay)}
    return find_named(name, things, kind="CPU", fix=OWN_FILE.format("cpus"))


def guess_cpu(name: str, *, threads: int) -> Cpu:
    """Guess a CPU from its number of threads: right within a factor of two."""
    return Cpu(
        name=name,
        cores=threads,
        gflops=GUESSED_GFLOPS_PER_THREAD * threads,
        bandwidth_gb_s=min(GUESSED_GB_S_PER_THREAD * threads, GUESSED_MOST_GB_S),
        watts=GUESSED_WATTS_PER_THREAD * threads,
        source=GUESSED,
        reached=True,
    )


def list_gpus(*, overlay: Path | None = None) -> tuple[Gpu, ...]:
    return list_rows("gpus", Gpu.model_validate, GPU_COLUMNS, overlay=overlay)


def list_cpus(*, overlay: Path | None = None) -> tuple[Cpu, ...]:
    return list_rows("cpus", Cpu.model_validate, CPU_COLUMNS, overlay=overlay)


@cache
def default_rates() -> StepRates:
    """Rates by which settings are ranked if the GPU is unknown: an H200's."""
    return rates_of(find_gpu("H200"))


TRADE_COLUMNS = ColumnParsers(
    needed={
        "form": text,
        "speed_change": text,
        "speed_measured_on": text,
        "loss_change": text,
        "loss_measured_on": text,
        **SOURCE,
    },
    optional={"note": text},
    key=("form",),
)
NAMES = {"eight": "8 bits", "four": "4 bits (NF4)"}
SWITCHES = {"eight": "`train.fp8: off` keeps 16 bits", "four": "`train.method: lora` keeps 16 bits"}


@cache
def describe_trade(form: str) -> str:
    """Against frozen weights in bfloat16: the change of tokens per second and of the loss after training."""
    row = next(row for row in read_table("quantization", TRADE_COLUMNS) if row.text("form") == form)
    speed, loss = float(row.text("speed_change")), float(row.text("loss_change"))
    return (
        f"{NAMES[form]}: {speed:+.0%} speed ({row.text('speed_measured_on')}), about {loss:+.0%} "
        f"loss ({row.text('loss_measured_on')}), measured {row.text('dated')}; {SWITCHES[form]}"
    )
