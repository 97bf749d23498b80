"""The file of a learned router: a safetensors file whose metadata hold the card.

In: a classifier and its card, or a path. Out: bytes, or both of them checked. Runs nothing on loading.
"""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.files.safetensors import TensorEntry, encode_header, header_length, read_header
from graftwork.records.errors import Damaged
from graftwork.records.live import RouterCard
from graftwork.text.classifier import BUCKETS, TextClassifier

FIX = "train the router again: graft train --router 0.95"


def router_path(state: Path) -> Path:
    """The project's router, in its state folder."""
    return state / "router.safetensors"


def write_router(path: Path, classifier: TextClassifier, card: RouterCard) -> None:
    tensors = {"weights": classifier.weights, "bias": classifier.bias}
    entries = [
        TensorEntry(name, "F32", list(tensor.shape), tensor.itemsize, tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    metadata = {"card": card.to_json(), "scale": repr(classifier.scale)}
    data = [np.ascontiguousarray(tensor, "<f4").tobytes() for tensor in tensors.values()]
    write_atomic(path, encode_header(entries, metadata) + b"".join(data))


def read_router(path: Path) -> tuple[TextClassifier, RouterCard]:
    metadata = read_header(path, fix=FIX).get("__metadata__") or {}
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


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(f"{path.name} is not a router", why=why, fix=FIX, where=str(path))
