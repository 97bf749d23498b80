"""Named tensors as one safetensors file, hashed from memory while it is written.

In: tensors on the host. Out: the file, its length and its hash. The hash is of the bytes that were
meant, so reading the file back proves that these are the bytes that arrived. Nothing is copied: a
checkpoint may be as large as what memory has left.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: "dict[str, Tensor]") -> tuple[str, int]:
    """Write and sync; the sha256 and the length of what was meant to be written."""
    digest, length = hashlib.sha256(), 0
    # Hashing takes as long as writing, and needs nothing of it.
    with path.open("wb") as handle, ThreadPoolExecutor(1, thread_name_prefix="hash") as beside:
        for part in _file_parts(tensors):
            hashed = beside.submit(digest.update, part)
            handle.write(part)
            length += len(part)
        handle.flush()
        os.fsync(handle.fileno())
        hashed.result()
    return digest.hexdigest(), length


def _file_parts(tensors: "dict[str, Tensor]") -> Iterator[bytes | memoryview]:
    """The header, then the bytes of each tensor: wide types first, so that each lies aligned."""
    import torch

    from graftwork.model.tensor_types import TYPE_NAMES

    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
