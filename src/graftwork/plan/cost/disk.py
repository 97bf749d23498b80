"""Disk that a run needs, part by part.

In: parameters, what is trained, rows. Out: GiB by what they are for. The sizes of packages are measured on a
Linux installation; the rest follows from the parameters. Does not know which files a user keeps besides.
"""

from graftwork.records.base import Figure, Record
from graftwork.records.units import GIB

# torch with its CUDA libraries, transformers and the rest, as installed on Linux, with pip's cache.
PACKAGES_GIB = (7.0, 9.0, 14.0)
# A token of text is about four characters, and is kept as text and as numbers.
BYTES_A_TOKEN = 4 + 8
LOGS_GIB = 0.1
KEPT_CHECKPOINTS = 3
STATE_BYTES = 8
"""Adam's two states in float32."""
WEIGHT_BYTES = 2
ADAPTER_BYTES = 4


class DiskNeed(Record):
    """What must be free before the run."""

    parts_gib: dict[str, Figure]
    total_gib: Figure
    checkpoint_gib: float
    result_gib: float
    """What is carried away in the end: the adapter, or the model."""


def need_disk(
    *, total_parameters: float, trainable: float, full: bool, tokens: float, kept: int = KEPT_CHECKPOINTS
) -> DiskNeed:
    result = trainable * (WEIGHT_BYTES if full else ADAPTER_BYTES) / GIB
    checkpoint = result + trainable * STATE_BYTES / GIB
    low, value, high = PACKAGES_GIB
    weights = total_parameters * WEIGHT_BYTES / GIB
    parts = {
        "packages": Figure(value=value, low=low, high=high, unit="GiB"),
        # A hub that keeps another format or precision beside it doubles them.
        "base weights": Figure(value=weights, low=weights, high=2 * weights, unit="GiB"),
        "data": Figure.about(tokens * BYTES_A_TOKEN / GIB, down=0.5, up=3.0, unit="GiB"),
        # One more than are kept: the new one is whole before the oldest goes.
        "checkpoints": Figure.exact((kept + 1) * checkpoint, unit="GiB"),
        "result": Figure.exact(result, unit="GiB"),
        "logs": Figure.about(LOGS_GIB, down=0.2, up=3.0, unit="GiB"),
    }
    total = Figure(
        value=sum(part.value for part in parts.values()),
        low=sum(part.low for part in parts.values()),
        high=sum(part.high for part in parts.values()),
        unit="GiB",
    )
    return DiskNeed(parts_gib=parts, total_gib=total, checkpoint_gib=checkpoint, result_gib=result)
