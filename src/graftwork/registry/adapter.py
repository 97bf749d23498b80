"""The two files of a PEFT adapter or of full weights, and the proof that they are what they are called.

In: the folder that training left. Out: its files with their hashes, or an error. Nothing is unpickled: the
weights must be safetensors by their content, not only by their name.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from graftwork.files.digest import file_digest, folder_digest
from graftwork.files.whole import explain_os_error
from graftwork.records.errors import Damaged
from graftwork.records.release import ReleaseFile
from graftwork.records.units import MIB

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ADAPTER_FILES = (CONFIG, WEIGHTS)
FULL_FILES = ("config.json", "model.safetensors")
"""What `method: full` leaves: the weights of the whole model."""

_LARGEST_HEADER = 16 * MIB
"""The format allows 100 MB. A model of 100,000 tensors needs 12, and JSON grows twentyfold when parsed."""


def inspect_adapter(folder: Path, *, expected_hash: str) -> tuple[ReleaseFile, ...]:
    """The files of the adapter that the training run left, proven to be those."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise explain_os_error(error, folder) from error
    files = learned_files(folder)
    if names != list(files):
        raise Damaged(
            "the adapter folder does not hold an adapter and nothing else",
            why=f"it holds {', '.join(names) or 'nothing'}; a release takes {' and '.join(ADAPTER_FILES)}",
            fix="train again (`graft train`), or move what does not belong there away",
            where=str(folder),
        )
    if folder_digest(folder) != expected_hash:
        raise Damaged(
            "the adapter is not the one that the training run left",
            why=f"its hash is not {expected_hash[:12]}…",
            fix="train again (`graft train`)",
            where=str(folder),
        )
    config, weights = files
    require_safetensors(folder / weights)
    _require_config(folder / config, key="peft_type" if files == ADAPTER_FILES else "model_type")
    return tuple(
        ReleaseFile(path=name, sha256=file_digest(folder / name), size=(folder / name).stat().st_size)
        for name in files
    )


def learned_files(folder: Path) -> tuple[str, str]:
    """The names of config and weights in the folder that training left."""
    return choose_learned({path.name for path in folder.iterdir()})


def choose_learned(names: Collection[str]) -> tuple[str, str]:
    """The names of config and weights among these files: an adapter unless it is full weights."""
    full = all(name in names for name in FULL_FILES)
    return FULL_FILES if full and CONFIG not in names else ADAPTER_FILES


def require_safetensors(path: Path) -> None:
    """Refuse a file whose header is not that of safetensors; pickles come under any name."""
    read_header(path)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: what it says of each tensor."""
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            text = handle.read(length) if length <= _LARGEST_HEADER else b""
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
            fix="train again (`graft train`), or get the file again from where it was made",
            where=str(path),
        )
    return header


def _require_config(path: Path, *, key: str) -> None:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{path.name} is not JSON", why=str(error), fix="train again (`graft train`)", where=str(path)
        ) from error
    if not isinstance(config, dict) or key not in config:
        raise Damaged(
            f"{path.name} does not describe {'a PEFT adapter' if key == 'peft_type' else 'a model'}",
            why=f"it has no {key}",
            fix="train again (`graft train`)",
            where=str(path),
        )
