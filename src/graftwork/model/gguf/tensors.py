"""Tensors of safetensors files as arrays, read when they are asked for. Needs no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.files.safetensors import header_length, read_header
from graftwork.records.errors import UserMistake

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class StoredTensor(NamedTuple):
    """A tensor in a file: where it is, and of what type and shape."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[np.float32]:
        """Its values in float32."""
        data = np.memmap(self.path, _TYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)
        if self.dtype == "BF16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(data, np.float32)


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder's safetensors files, by name."""
    found = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _in_file(path)]
    return sorted(found, key=lambda tensor: tensor.name)


def _in_file(path: Path) -> Iterator[StoredTensor]:
    header: dict[str, Any] = read_header(path, fix="fetch the weights again")
    start = 8 + header_length(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _TYPES:
            raise UserMistake(
                f"the tensor {name} is of the type {entry['dtype']}",
                why=f"only {', '.join(_TYPES)} can be converted",
                fix="use a base that is not quantized",
                where=str(path),
            )
        yield StoredTensor(
            name, path, entry["dtype"], tuple(entry["shape"]), start + int(entry["data_offsets"][0])
        )
