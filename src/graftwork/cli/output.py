"""Output: results to standard output, progress and errors to standard error."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from graftwork.records.errors import GraftError
from graftwork.views.document import safe

if TYPE_CHECKING:
    from graftwork.records.base import Record

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]

stdout = Console()
stderr = Console(stderr=True)


def print_json(value: "Record | dict[str, Any] | list[Any]") -> None:
    body = value if isinstance(value, dict | list) else value.model_dump(mode="json")
    sys.stdout.write(json.dumps(body, ensure_ascii=False, indent=2) + "\n")


def print_text(*lines: str) -> None:
    """Print plain lines without highlighting, wrapping or markup."""
    stdout.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def print_error(error: GraftError, *, as_json: bool) -> None:
    """What, where, why and fix, without a traceback. They may quote a log, a model or a server."""
    if as_json:
        print_json(error.as_json())
        return
    text = Text()
    text.append("✗ ", style="bold red").append(safe(error.what), style="bold")
    for label, value in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if value:
            text.append(f"\n  {label:<6}", style="dim").append(safe(value))
    stderr.print(text, highlight=False, soft_wrap=True)
