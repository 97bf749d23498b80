"""The question, with what the user left out filled in.

In: a model, a machine and what the user stated. Out: a FitQuestion. Looks at no file and not at this machine.
"""

from collections.abc import Sequence
from typing import Literal

from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.records.errors import UserMistake
from graftwork.records.fit import Algorithm, FitQuestion, Method, Optimizer
from graftwork.records.hardware import Machine

DEFAULT_ROWS = 1000


def make_question(
    model: CatalogModel,
    *,
    machine: Machine,
    method: Method = "qlora",
    algorithm: Algorithm = "sft",
    engine: Literal["graft", "hf"] = "graft",
    seq: int | Sequence[int] = 2048,
    rows: int | None = None,
    epochs: float = 1.0,
    batch_rows: int = 16,
    rank: int = 16,
    optimizer: Optimizer = "adamw_fused",
    offload: Literal["auto", "none", "optimizer", "weights"] = "auto",
    memory_limit_gib: float | None = None,
    trained_share: float = 1.0,
    adapted_layers: int | None = None,
    targets: tuple[str, ...] | None = None,
    prompt_tokens: int = 512,
    completion_tokens: int = 512,
    generations: int = 8,
) -> FitQuestion:
    """`seq` is one length for all rows, or the length of every row that there is."""
    lengths = (seq,) if isinstance(seq, int) else tuple(sorted(seq))
    if algorithm == "grpo":
        # What is learned from is what was generated: a prompt and its answer.
        lengths = (prompt_tokens + completion_tokens,)
    _require_sense(lengths, batch_rows=batch_rows, epochs=epochs, rank=rank, machine=machine)
    return FitQuestion(
        model=model.name,
        shape=model.shape,
        architecture=model.architecture,
        method=method,
        algorithm=algorithm,
        engine=engine,
        lengths=lengths,
        rows=rows or (len(lengths) if len(lengths) > 1 else DEFAULT_ROWS),
        epochs=epochs,
        batch_rows=batch_rows,
        trained_share=trained_share,
        rank=rank,
        targets=targets or linear_names(model.shape),
        adapted_layers=min(adapted_layers or model.shape.layers, model.shape.layers),
        optimizer=optimizer,
        offload=offload,
        memory_limit_gib=memory_limit_gib,
        machine=machine,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        generations=generations,
    )


def _require_sense(
    lengths: tuple[int, ...], *, batch_rows: int, epochs: float, rank: int, machine: Machine
) -> None:
    """Numbers that no run can have are refused by name."""
    stated = {
        "--seq": min(lengths, default=0),
        "--batch": batch_rows,
        "--epochs": epochs,
        "--rank": rank,
        "--ram": machine.ram_gib,
        "--gpus": machine.gpus if machine.gpu is not None else 1,
    }
    for option, value in stated.items():
        if value <= 0:
            raise UserMistake(
                f"{option} is {value:g}",
                why="a run needs more than nothing of it",
                fix="give a number above 0",
                where=option,
            )
