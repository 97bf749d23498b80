"""Loss scaling for float16: gradients too small for the type are lifted, and lowered again before use.

In: whether a gradient overflowed. Out: the factor for the next loss. It doubles after many good steps
and halves at an overflow, whose step is passed over. Its state is two numbers that a checkpoint holds.
"""

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
GROW_EVERY = 200


class LossScaler:
    """`on` is False for types with a range like that of float32: then the factor is always 1."""

    def __init__(self, *, on: bool, first: float = FIRST_SCALE, grow_every: int = GROW_EVERY) -> None:
        self.factor = first if on else 1.0
        self._on = on
        self._good = 0
        self._grow_every = grow_every

    @property
    def can_fall(self) -> bool:
        """An overflow is the factor's fault as long as it can still become smaller."""
        return self._on and self.factor > SMALLEST_SCALE

    def overflowed(self) -> None:
        self.factor, self._good = max(self.factor / 2, SMALLEST_SCALE), 0

    def went_well(self) -> None:
        if not self._on:
            return
        self._good += 1
        if self._good == self._grow_every:
            self.factor, self._good = min(self.factor * 2, LARGEST_SCALE), 0

    def state(self) -> dict[str, Tensor]:
        if not self._on:
            return {}
        return {
            "scaler/factor": torch.tensor(self.factor, dtype=torch.float64),
            "scaler/good": torch.tensor(self._good),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if self._on and "scaler/factor" in tensors:
            self.factor, self._good = float(tensors["scaler/factor"]), int(tensors["scaler/good"])
