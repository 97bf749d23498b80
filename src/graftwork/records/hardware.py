"""Hardware of a run: a GPU, a CPU, a machine of both. Facts with a source and a date."""

from typing import Literal

from graftwork.records.base import Record

FIRST_WITH_BF16 = 8.0
FIRST_WITH_FP8 = 8.9


class Gpu(Record):
    """A GPU, as specified by its vendor or as measured."""

    name: str
    aliases: tuple[str, ...] = ()
    memory_gib: float
    """Memory shown by the driver, which is less than advertised."""
    capability: float
    """Compute capability: 7.0 has half-precision tensor cores, 8.0 bfloat16, 8.9 and later FP8."""
    half_tflops: float
    """Dense products in half precision, summed in float32."""
    eight_tflops: float | None = None
    """Dense products in FP8, summed in float32."""
    bandwidth_gb_s: float
    pcie_gb_s: float
    """One way, for the GPU's own link."""
    nvlink_gb_s: float | None = None
    """One way, between two GPUs, if they can be bridged."""
    watts: float
    launch_usd: float | None = None
    source: str = ""
    dated: str = ""

    @property
    def has_bf16(self) -> bool:
        return self.capability >= FIRST_WITH_BF16

    @property
    def has_fp8(self) -> bool:
        return self.capability >= FIRST_WITH_FP8 and self.eight_tflops is not None


class Cpu(Record):
    """A CPU. `gflops` is float32 over all cores; `half_gflops` if it supports bfloat16."""

    name: str
    aliases: tuple[str, ...] = ()
    cores: int
    gflops: float
    half_gflops: float | None = None
    bandwidth_gb_s: float
    watts: float
    launch_usd: float | None = None
    source: str = ""
    dated: str = ""
    reached: bool = False
    """Whether `gflops` is measured with products; else it is the theoretical peak."""


class Machine(Record):
    """GPUs of one kind, or none, and the machine around them."""

    gpu: Gpu | None = None
    gpus: int = 0
    cpu: Cpu | None = None
    ram_gib: float
    link_gb_s: float | None = None
    """One way between two GPUs; None: that of the GPUs' links through the host."""
    assumed: tuple[str, ...] = ()
    """Assumptions for facts that were not stated, as text."""

    @property
    def name(self) -> str:
        if self.gpu is None:
            return self.cpu.name if self.cpu else "a CPU"
        return f"{self.gpus} × {self.gpu.name}" if self.gpus > 1 else self.gpu.name


class Offer(Record):
    """A machine at a price."""

    place: str
    """As in `Place.name`."""
    gpu: str
    """A name or alias of the catalog of GPUs."""
    gpus: int = 1
    usd_per_hour: float | None = None
    spot_usd_per_hour: float | None = None
    usd_per_month: float | None = None
    """A subscription that holds `hours_per_month` of this GPU."""
    hours_per_month: float | None = None
    instance: str = ""
    region: str = ""
    vcpus: float | None = None
    memory_gib: float | None = None
    reserved_usd_per_hour: float | None = None
    """With a commitment of `reserved_term`."""
    reserved_term: str = ""
    storage_usd_gib_month: float | None = None
    """Price of a volume that outlives the machine."""
    longest_hours: float | None = None
    """The most that one job may take there."""
    quota_hours: float | None = None
    """Hours that are left of a free quota."""
    quota_until: str = ""
    """When the quota is reset."""
    source: str
    dated: str


class PlaceTerms(Record):
    """A place where a run can be put, and its terms."""

    name: str
    title: str
    kind: Literal["cloud", "notebook", "managed", "own"]
    session_hours: float | None = None
    """Longest time that one job may run."""
    free_hours_per_week: float | None = None
    free_hours_per_day: float | None = None
    spot: bool = False
    preemptions_per_hour: float | None = None
    """Preemptions of its spot machines; None if not published."""
    storage_usd_gib_month: float = 0.0
    egress_usd_gib: float = 0.0
    setup_minutes: float = 10.0
    """From the order to the first step: machine, packages, weights."""
    smallest_billed_minutes: float = 0.0
    disk_gib: float | None = None
    """Disk of a session, if the place sets it; None if it can be ordered as needed."""
    driven_by: Literal["api", "by hand"] = "api"
    notes: str = ""
    source: str
    dated: str
