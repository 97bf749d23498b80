"""An exception from deterministic kernels, for what needs none: drawing a token.

Where a process asks for kernels that add up in the same order every time, torch refuses all others. On a GPU
the cumulative sum is one of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def any_order(operand: Tensor) -> Iterator[None]:
    """Operations on this tensor that may add up in any order are allowed within."""
    if not operand.is_cuda or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
