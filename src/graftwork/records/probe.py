"""What half a minute on a device found out about it: asked for, and answered."""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.plan import ModelShape, Tuning

Form = Literal["whole", "eight", "four"]


class DeviceName(Record):
    """Which device it is, and with what it is driven: a probe is good for the same three."""

    kind: Literal["cpu", "cuda"]
    name: str
    driver: str = ""
    torch: str = ""


class ProbeJob(Record):
    """What a probe is to look at."""

    shape: ModelShape
    folder: str
    """Where the disk is tried: what is written there is removed again."""
    length: int = 2048
    """Tokens of a row in the real steps."""
    tokens: tuple[int, ...] = (8192, 2048)
    """Tokens of a pass on a card. The first are tried first; each number has to be compiled for."""
    rank: int = 16
    forms: tuple[Form, ...] = ()
    """Frozen weights on a card; empty: 8 bits where the card has them, else 16."""
    threads: int | None = None
    seconds: float = 30.0
    """When this much is spent, what is left is left out."""


class ProductRate(Record):
    """How fast one product of a decoder's layer goes."""

    layer: str
    tokens: int
    inputs: int
    outputs: int
    dtype: str
    flops: float
    """A second."""


class ProbedStep(Record):
    """A real step of the project's own with few layers. `seconds` is the median."""

    layers: int
    tokens: int
    length: int
    trainable: int
    trained_share: float = 1.0
    """Of the tokens, those that were predicted."""
    seconds: float
    spread: float
    """Half the range of the middle half, over the median."""
    peak_bytes: float
    tuning: Tuning | None = None
    """None on a processor."""


class ProbeFacts(Record):
    """The device as it was found, in bytes, seconds and operations a second. None: could not be measured."""

    device: DeviceName
    memory_gib: float
    capability: float | None = None
    threads: int
    shape: ModelShape
    rank: int
    products: tuple[ProductRate, ...] = ()
    copy_bytes_s: float
    """Read and written, together."""
    context_bytes: float | None = None
    to_device_bytes_s: float | None = None
    from_device_bytes_s: float | None = None
    launch_seconds: float | None = None
    disk_write_bytes_s: float | None = None
    disk_read_bytes_s: float | None = None
    steps: tuple[ProbedStep, ...] = ()
    took: dict[str, float] = {}
    """Seconds of each part of the probe."""
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""
    seconds: float
    at: str
