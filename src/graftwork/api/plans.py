"""Plans without a project: does a run fit a machine, and how long does it take?"""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from graftwork.pipeline.fit import FitRequest, answer_fit
from graftwork.records.errors import UserMistake
from graftwork.records.fit import FitAnswer


def plan_fit(
    model: str | None = None, *, on_progress: Callable[[str], None] = lambda _message: None, **options: Any
) -> FitAnswer:
    """Whether a training run fits, its best settings, memory and time: what `graft plan fit` answers.

    The options are those of the command, by the same names: `method`, `gpu`, `gpus`, `seq`, `rows` …
    """
    unknown = sorted(set(options) - set(FitRequest.model_fields))
    if unknown:
        raise UserMistake(
            f"plan_fit has no option {unknown[0]!r}",
            why=f"it takes: {', '.join(FitRequest.model_fields)}",
            fix="use one of these names",
            where=unknown[0],
        )
    try:
        if isinstance(options.get("seq"), int):
            options["seq"] = str(options["seq"])
        asked = FitRequest.model_validate({"model": model, **options})
    except ValidationError as refused:
        first = refused.errors()[0]
        name = str(first["loc"][0])
        raise UserMistake(
            f"--{name} is {first['input']!r}",
            why=first["msg"],
            fix="`graft plan fit --help` lists the accepted values",
            where=f"--{name}",
        ) from refused
    return answer_fit(asked, on_progress=on_progress)
