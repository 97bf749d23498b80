"""Host memory that a GPU can read and write directly.

In: a size and a type. Out: a flat tensor, its pages locked where a GPU is to copy from them.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def host_buffer(elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A flat tensor of zeros. Its pages are taken when they are first written.

    Not from torch's pinned allocator, which rounds sizes up to powers of two.
    """
    size = max(elements, 1) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=dtype)[:elements]
    if pinned and elements:
        pin(buffer)
    return buffer


def pin(buffer: Tensor) -> bool:
    """Lock the pages of a buffer for good. Where that fails, copies still work, but wait for each other."""
    # All threads fetch the pages, which locking would do with one.
    buffer.zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        # The error would be reported by the next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return code == 0
