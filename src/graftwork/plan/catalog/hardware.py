"""Cards and processors by name: what their makers state, and what was measured.

In: a name as people, drivers or price lists write it. Out: its figures with their source and date. Does
not look at this machine.
"""

import re
from functools import cache
from pathlib import Path

from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.plan.catalog.table import CatalogRow, ColumnParsers, find_named, read_table
from graftwork.records.hardware import Cpu, Gpu

GPU_COLUMNS = ColumnParsers(
    needed=(
        "name",
        "memory_gib",
        "capability",
        "half_tflops",
        "bandwidth_gb_s",
        "pcie_gb_s",
        "watts",
        "source",
        "dated",
    ),
    optional=("aliases", "eight_tflops", "nvlink_gb_s", "launch_usd"),
    key=("name",),
)
CPU_COLUMNS = ColumnParsers(
    needed=("name", "cores", "gflops", "bandwidth_gb_s", "watts", "source", "dated"),
    optional=("aliases", "half_gflops", "launch_usd"),
    key=("name",),
)
GUESSED = "guessed from the number of threads"
"""The source of a processor that no catalog knows."""
GUESSED_GFLOPS_A_THREAD = 35.0
"""Float32: half a core of 32 operations a clock at 2.5 GHz; two shared threads of an EPYC gave 57."""
GUESSED_GB_S_A_THREAD = 10.0
GUESSED_MOST_GB_S = 80.0
"""What a thread reads, and what two channels give to however many."""
GUESSED_WATTS_A_THREAD = 15.0
USUAL_RAM_GIB = 64.0
"""Host memory of a machine that is named by its card or processor alone, in every plan alike. This machine's
own memory says nothing about another one."""
_COUNTED = re.compile(r"(\d{1,4})[\s-]*(cores?|threads?|v?cpus?)", re.IGNORECASE)
THREADS_A_CORE = 2
OWN_FILE = "or put it into your own {}.csv and name its folder with `--catalog` or GRAFT_CATALOG"


def find_gpu(name: str, *, overlay: Path | None = None) -> Gpu:
    """A card by its name or an alias: "RTX 5060 Ti 16GB", "5060ti", "NVIDIA A100-SXM4-80GB" …"""
    things = {gpu.name: (gpu, _also(gpu.name, gpu.aliases)) for gpu in list_gpus(overlay=overlay)}
    return find_named(name, things, kind="GPU", fix=OWN_FILE.format("gpus"))


def find_cpu(name: str, *, overlay: Path | None = None) -> Cpu:
    """A processor by its name or an alias; "16 cores" or "8 vCPU" is guessed from the number."""
    counted = _COUNTED.fullmatch(name.strip())
    if counted and int(counted[1]):
        number, by_core = int(counted[1]), counted[2].lower().startswith("core")
        guessed = guess_cpu(name.strip(), threads=number * (THREADS_A_CORE if by_core else 1))
        return guessed.model_copy(update={"cores": number})
    things = {cpu.name: (cpu, cpu.aliases) for cpu in list_cpus(overlay=overlay)}
    return find_named(name, things, kind="processor", fix=OWN_FILE.format("cpus"))


def guess_cpu(name: str, *, threads: int) -> Cpu:
    """A processor of which only the threads are known: right within a factor of two."""
    return Cpu(
        name=name,
        cores=threads,
        gflops=GUESSED_GFLOPS_A_THREAD * threads,
        bandwidth_gb_s=min(GUESSED_GB_S_A_THREAD * threads, GUESSED_MOST_GB_S),
        watts=GUESSED_WATTS_A_THREAD * threads,
        source=GUESSED,
        reached=True,
    )


def list_gpus(*, overlay: Path | None = None) -> tuple[Gpu, ...]:
    return tuple(row.build(_gpu) for row in read_table("gpus", GPU_COLUMNS, overlay=overlay))


def list_cpus(*, overlay: Path | None = None) -> tuple[Cpu, ...]:
    return tuple(row.build(_cpu) for row in read_table("cpus", CPU_COLUMNS, overlay=overlay))


def _also(name: str, aliases: tuple[str, ...]) -> tuple[str, ...]:
    """The names that follow from a name: RTX and GTX are left out as often as not."""
    written = (name, *aliases)
    return (*aliases, *(block.upper().replace("RTX", "").replace("GTX", "") for block in written))


def _gpu(row: CatalogRow) -> Gpu:
    return Gpu(
        name=row.text("name"),
        aliases=row.names("aliases"),
        memory_gib=row.number("memory_gib", above=0),
        capability=row.number("capability", above=0),
        half_tflops=row.number("half_tflops", above=0),
        eight_tflops=row.number_or_none("eight_tflops"),
        bandwidth_gb_s=row.number("bandwidth_gb_s", above=0),
        pcie_gb_s=row.number("pcie_gb_s", above=0),
        nvlink_gb_s=row.number_or_none("nvlink_gb_s"),
        watts=row.number("watts", above=0),
        launch_usd=row.number_or_none("launch_usd"),
        source=row.text("source"),
        dated=row.text("dated"),
    )


def _cpu(row: CatalogRow) -> Cpu:
    return Cpu(
        name=row.text("name"),
        aliases=row.names("aliases"),
        cores=row.whole("cores"),
        gflops=row.number("gflops", above=0),
        half_gflops=row.number_or_none("half_gflops"),
        bandwidth_gb_s=row.number("bandwidth_gb_s", above=0),
        watts=row.number("watts", above=0),
        launch_usd=row.number_or_none("launch_usd"),
        source=row.text("source"),
        dated=row.text("dated"),
    )


@cache
def default_rates() -> StepRates:
    """The rates that settings are ranked by where the card is unknown: an H200's."""
    return rates_of(find_gpu("H200"))
