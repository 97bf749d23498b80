"""Checkpoints: written whole, hashed, read back before they count; a damaged one is passed over.

In: named tensors and a small state. Out: a folder `step-000040/` with a manifest of hashes. The
last good checkpoint is never removed before the next one has been verified.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.files.digest import file_digest
from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.records.errors import Damaged

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: "dict[str, Tensor]"
    state: dict[str, Any]


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write, verify, and only then let old ones go."""
    from safetensors.torch import save

    path = folder / f"step-{checkpoint.step:06d}"
    if path.exists():
        try:
            verify(path)
        except Damaged:
            # Its bytes failed the check, so it is of no use to anyone.
            shutil.rmtree(path)
        else:
            # Stopped right after a resume: this step is safe already, and a good one is never removed.
            return path
    with folder_made_whole(path) as temporary:
        write_whole(temporary / TENSORS, save(checkpoint.tensors))
        write_whole(temporary / STATE, json.dumps(checkpoint.state))
        hashes = {name: file_digest(temporary / name) for name in (TENSORS, STATE)}
        write_whole(temporary / MANIFEST, json.dumps({"step": checkpoint.step, "sha256": hashes}))
    verify(path)
    for old in _folders(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def latest_good(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint that is whole, and a word about each newer one that is not."""
    from safetensors.torch import load_file

    complaints: list[str] = []
    for path in reversed(_folders(folder)):
        try:
            step = verify(path)
        except Damaged as damage:
            complaints.append(f"checkpoint {path.name} is passed over: {damage.what}")
            continue
        state = json.loads((path / STATE).read_text())
        return Checkpoint(step=step, tensors=load_file(path / TENSORS), state=state), tuple(complaints)
    return None, tuple(complaints)


def verify(path: Path) -> int:
    """Read every byte; the step if all is as the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        step, hashes = int(manifest["step"]), manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged("its manifest cannot be read", why=str(error), where=str(path)) from error
    for name in (TENSORS, STATE):
        try:
            actual = file_digest(path / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read", why=str(error), where=str(path)) from error
        if actual != hashes.get(name):
            raise Damaged(f"{name} has other bytes than were written", where=str(path))
    return step


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.exists() else []
