"""Cards and processors by name: what their makers state, and what was measured.

In: a name as people, drivers or price lists write it. Out: its figures with their source and date. Does
not look at this machine.
"""

from pathlib import Path

from graftwork.plan.catalog.names import find_named
from graftwork.plan.catalog.table import Columns, Row, read_table
from graftwork.records.hardware import Cpu, Gpu

GPU_COLUMNS = Columns(
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
CPU_COLUMNS = Columns(
    needed=("name", "cores", "gflops", "bandwidth_gb_s", "watts", "source", "dated"),
    optional=("aliases", "half_gflops", "launch_usd"),
    key=("name",),
)
OWN_FILE = "or put it into your own {}.csv and name its folder with `--catalog` or GRAFT_CATALOG"


def find_gpu(name: str, *, overlay: Path | None = None) -> Gpu:
    """A card by its name or an alias: "RTX 5060 Ti 16GB", "5060ti", "NVIDIA A100-SXM4-80GB" …"""
    things = {gpu.name: (gpu, _also(gpu.name, gpu.aliases)) for gpu in list_gpus(overlay=overlay)}
    return find_named(name, things, kind="card", fix=OWN_FILE.format("gpus"))


def find_cpu(name: str, *, overlay: Path | None = None) -> Cpu:
    """A processor by its name or an alias."""
    things = {cpu.name: (cpu, cpu.aliases) for cpu in list_cpus(overlay=overlay)}
    return find_named(name, things, kind="processor", fix=OWN_FILE.format("cpus"))


def list_gpus(*, overlay: Path | None = None) -> tuple[Gpu, ...]:
    return tuple(row.build(_gpu) for row in read_table("gpus", GPU_COLUMNS, overlay=overlay))


def list_cpus(*, overlay: Path | None = None) -> tuple[Cpu, ...]:
    return tuple(row.build(_cpu) for row in read_table("cpus", CPU_COLUMNS, overlay=overlay))


def _also(name: str, aliases: tuple[str, ...]) -> tuple[str, ...]:
    """The names that follow from a name: RTX and GTX are left out as often as not."""
    written = (name, *aliases)
    return (*aliases, *(one.upper().replace("RTX", "").replace("GTX", "") for one in written))


def _gpu(row: Row) -> Gpu:
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


def _cpu(row: Row) -> Cpu:
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
