"""What a run can be put on: a card, a processor, a machine of both. Facts with a source and a date."""

from graftwork.records.base import Record

FIRST_WITH_BF16 = 8.0
FIRST_WITH_FP8 = 8.9


class Gpu(Record):
    """A card as its maker and whoever measured it state it."""

    name: str
    aliases: tuple[str, ...] = ()
    memory_gib: float
    """What the driver shows, which is less than what the box says."""
    capability: float
    """Compute capability: 7.0 has half-precision tensor cores, 8.0 bfloat16, 8.9 and later FP8."""
    half_tflops: float
    """Dense products in half precision, summed in float32."""
    eight_tflops: float | None = None
    """Dense products in FP8, summed in float32."""
    bandwidth_gb_s: float
    pcie_gb_s: float
    """One way, as the card's own connector gives it."""
    nvlink_gb_s: float | None = None
    """One way, between two cards, where they can be bridged."""
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
    """A processor. `gflops` is float32 over all cores; `half_gflops` where it multiplies bfloat16 itself."""

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


class Machine(Record):
    """Cards of one kind, or none, and what stands around them."""

    gpu: Gpu | None = None
    gpus: int = 0
    cpu: Cpu | None = None
    ram_gib: float
    link_gb_s: float | None = None
    """One way between two cards; None: what the cards' connectors give through the host."""
    assumed: tuple[str, ...] = ()
    """What was not stated and had to be assumed, in words."""

    @property
    def name(self) -> str:
        if self.gpu is None:
            return self.cpu.name if self.cpu else "a processor"
        return f"{self.gpus} × {self.gpu.name}" if self.gpus > 1 else self.gpu.name
