"""How the pages of this room are made of their templates."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def open_templates(**filters: Callable[..., Any]) -> Environment:
    """Everything that is put in is escaped, and a name that is missing is an error, not a blank."""
    environment = Environment(
        loader=PackageLoader("graftwork", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment
