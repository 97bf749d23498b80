"""Whether a run adds up in the same order every time: a killed run then resumes to the bytes of a whole one.

In: a plan and settings. Out: torch set accordingly, before the first product on a GPU. On a CPU it always is.
On a GPU the order of sums differs in the backward pass of attention. Its deterministic version is slower and
takes more memory for few heads; what else a step computes has one, too, or is in a fixed order anyway.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from graftwork.records.errors import UserMistake
from graftwork.records.plan import Plan
from graftwork.train.settings import TrainSettings

AUTO: Mapping[Literal["streamed", "packed", "plain"], bool] = {
    # Attention is a few percent of a step that trains all weights.
    "streamed": True,
    # Attention is a larger share of a step whose products are in 8 bits.
    "packed": False,
    # What any model of transformers computes may lack a deterministic version.
    "plain": False,
}
"""What `deterministic: auto` means on a GPU, by the step that is taken."""

CUBLAS_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""8 buffers of 4,096 KiB: what torch gives cuBLAS on a Hopper anyway."""


def is_deterministic(plan: Plan, settings: TrainSettings) -> bool:
    if plan.device.kind == "cpu":
        return True
    if settings.deterministic != "auto":
        return settings.deterministic == "on"
    if plan.streamed is not None:
        return AUTO["streamed"]
    return AUTO["plain" if plan.tuning is None else "packed"]


def use_deterministic_kernels(wanted: bool, *, on_card: bool) -> None:
    """Before the first product on the card: torch looks at cuBLAS's setting only once."""
    import torch

    if wanted and on_card:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
    # Not `warn_only`: flash attention would stay as it is, and cuDNN's, which has no such version, be used.
    torch.use_deterministic_algorithms(wanted)
    # Nothing here reads memory that it did not write, so filling it first is wasted work.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_missing_kernels() -> Iterator[None]:
    """An operation without a deterministic version is refused by torch: name the setting that asks for it."""
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise UserMistake(
            f"this run cannot be deterministic: {str(error).split(', but')[0]}",
            why="`train.deterministic` asks for sums in the same order every time",
            fix="set `train.deterministic: off`; a resumed run then differs in the last bits",
        ) from error
