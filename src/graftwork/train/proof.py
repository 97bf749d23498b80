"""Proof that the base is what it was when training began.

In: a job and its model. Out: a hash before, a hash after, and an error where they differ.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainJob

if TYPE_CHECKING:
    from graftwork.train.crew.crew import DistributedStrategy


def hash_base(job: TrainJob, model: Any, crew: "DistributedStrategy", *, first: bool) -> str:
    """A hash of the base: of its weights in memory, or of its files where those in memory are learned."""
    from graftwork.model.load import base_digest, base_files_digest

    full = job.plan.method == "full"
    if not first and (full or not crew.shards):
        return ""
    return base_files_digest(Path(job.base_folder)) if full else base_digest(model, whole=crew.whole)


def require_base_unchanged(before: str, after: str, *, where: str) -> None:
    if after != before:
        raise EnvironmentLacks(
            "the base weights changed during training",
            why="an adapter trained on shifting ground cannot be served",
            fix="this is a fault of the program: please report it with the run's folder",
            where=where,
        )
