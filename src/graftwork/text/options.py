"""Options of a command over settings: the revised settings, or a user error that names the option."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from graftwork.records.errors import UserError
from graftwork.text.wording import explain_error

S = TypeVar("S", bound=BaseModel)


def apply_options(
    settings: S, changes: Mapping[str, Any], *, command: str, options: Mapping[str, str] | None = None
) -> S:
    """Settings with `changes`; `options` has the names of options that differ from those of the settings."""
    try:
        return type(settings).model_validate({**settings.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = next((part for part in reversed(first["loc"]) if isinstance(part, str)), "")
        option = f"--{(options or {}).get(name, name.replace('_', '-'))}" if name else ""
        raise UserError(
            f"{option} has an invalid value" if option else "the options do not fit together",
            why=explain_error(first),
            fix=f"`{command} --help` lists the accepted values",
            where=option,
        ) from error
