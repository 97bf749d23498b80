"""What a checkpoint was made for, and whether that is this run.

In: settings, rows and their order. Out: a small identity that every checkpoint carries. A checkpoint
of another run is refused by name: silently used, it would be an adapter that nobody asked for.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.train.settings import TrainSettings


class CheckpointMismatch(UserMistake):
    """A checkpoint was made with other settings, other data or for another base."""


def run_identity(
    rows: Sequence[Row],
    batches: Sequence[Sequence[int]],
    *,
    settings: TrainSettings,
    more: Mapping[str, str],
) -> dict[str, Any]:
    """`more` is what the caller knows by a hash: the dataset, the base, the adapter's shape."""
    return {
        "steps": len(batches),
        "order": _digest_order(rows, batches),
        **more,
        "settings": settings.what_is_learned(),
    }


def require_same_run(mine: dict[str, Any], held: dict[str, Any], *, step: int, where: str) -> None:
    differing = [name for name in mine if mine[name] != held.get(name)]
    if not differing:
        return
    raise CheckpointMismatch(
        f"the checkpoint of step {step} belongs to another run",
        why="; ".join(_describe(name, mine[name], held.get(name)) for name in differing),
        fix="go back to what it was made with, or remove the checkpoints to begin anew",
        where=where,
    )


def _describe(name: str, mine: Any, held: Any) -> str:
    if isinstance(mine, dict) and isinstance(held, dict):
        keys = [key for key in {**held, **mine} if mine.get(key) != held.get(key)]
        return "; ".join(_describe(f"{name}.{key}", mine.get(key), held.get(key)) for key in keys)
    return f"{name} was {_short(held)} and is {_short(mine)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _digest_order(rows: Sequence[Row], batches: Sequence[Sequence[int]]) -> str:
    """Which rows, of what length, in which step: another order is another run."""
    outer = hashlib.sha256()
    for batch in batches:
        outer.update(repr([(rows[at].id, len(rows[at].tokens)) for at in batch]).encode())
    return outer.hexdigest()[:16]
