"""Headers of safetensors files, read and written without the library and without torch.

In: a path, or the tensors of a file to be written. Out: the header as JSON or as bytes. Reads no tensor.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import Damaged

LARGEST_HEADER = 16 * 2**20
"""The format allows 100 MB. A model of 100,000 tensors needs 12, and JSON grows twentyfold when parsed."""

TYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names that safetensors gives to torch's types."""


class TensorEntry(NamedTuple):
    name: str
    dtype: str
    """As in TYPE_NAMES."""
    shape: list[int]
    width: int
    """Bytes of an element."""
    size: int
    """Bytes of the tensor."""


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Wide types first, so that each tensor begins at a multiple of its own width."""
    return sorted(entries, key=lambda entry: (-entry.width, entry.name))


def encode_header(ordered: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a file that holds these tensors in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for entry in ordered:
        end = at + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_length(path: Path) -> int:
    """Bytes of the header, without the eight that state it."""
    with path.open("rb") as handle:
        return int.from_bytes(handle.read(8), "little")


def read_header(path: Path, *, fix: str) -> dict[str, Any]:
    """Type, shape and offsets of each tensor; Damaged if the file is not safetensors."""
    try:
        length = header_length(path)
        with path.open("rb") as handle:
            handle.seek(8)
            text = handle.read(length) if length <= LARGEST_HEADER else b""
    except OSError as error:
        raise explain_os_error(error, path) from error
    try:
        header = json.loads(text) if len(text) == length else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise Damaged(
            f"{path.name} is not a safetensors file",
            why="its header cannot be read; other formats can run code when they are loaded",
            fix=fix,
            where=str(path),
        )
    return header
