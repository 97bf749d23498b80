"""Safetensors files without the library and without torch: their headers, and the file of a learned router.

Input: a path, or the tensors of a file to be written. Output: the header as JSON or as bytes; a classifier
whose metadata hold its card, both checked.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import explain_os_error, write_atomic
from graftwork.records.errors import Corrupted
from graftwork.records.live import RouterCard

if TYPE_CHECKING:
    from graftwork.text.classifier import TextClassifier

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
    """The header of a file with these tensors in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for entry in ordered:
        end = start + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_length(path: Path) -> int:
    """Bytes of the header, without the eight that state it."""
    with path.open("rb") as handle:
        return int.from_bytes(handle.read(8), "little")


def read_header(path: Path, *, fix: str) -> dict[str, Any]:
    """Type, shape and offsets of each tensor; Corrupted if the file is not safetensors."""
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
        raise Corrupted(
            f"{path.name} is not a safetensors file",
            why="its header cannot be read; other formats can run code when they are loaded",
            fix=fix,
            where=str(path),
        )
    return header


ROUTER_FIX = "train the router again: graft train --router 0.95"


def router_path(state: Path) -> Path:
    """The project's router, in its state folder."""
    return state / "router.safetensors"


def write_router(path: Path, classifier: "TextClassifier", card: RouterCard) -> None:
    import numpy as np

    tensors = {"weights": classifier.weights, "bias": classifier.bias}
    entries = [
        TensorEntry(name, "F32", list(tensor.shape), tensor.itemsize, tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    metadata = {"card": card.to_json(), "scale": repr(classifier.scale)}
    data = [np.ascontiguousarray(tensor, "<f4").tobytes() for tensor in tensors.values()]
    write_atomic(path, encode_header(entries, metadata) + b"".join(data))


def read_router(path: Path) -> tuple["TextClassifier", RouterCard]:
    import numpy as np

    from graftwork.text.classifier import BUCKETS, TextClassifier

    metadata = read_header(path, fix=ROUTER_FIX).get("__metadata__") or {}
    try:
        card = RouterCard.from_json(metadata["card"])
        scale = float(metadata["scale"])
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, "its card cannot be read") from error
    count = len(card.labels)
    values = np.fromfile(path, "<f4", offset=8 + header_length(path))
    if len(values) != (BUCKETS + 1) * count or not np.isfinite(values).all() or not np.isfinite(scale):
        raise _damaged(path, "its weights do not fit its card")
    weights = values[: BUCKETS * count].reshape(BUCKETS, count)
    return TextClassifier(card.labels, weights, values[BUCKETS * count :], scale, card.threshold), card


def _damaged(path: Path, why: str) -> Corrupted:
    return Corrupted(f"{path.name} is not a router", why=why, fix=ROUTER_FIX, where=str(path))
