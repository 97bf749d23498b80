"""Records as tables for people: one function a kind of record, found by its type."""

from rich.console import Console

from graftwork.records.base import Record


def show(console: Console, record: Record) -> None:
    """Print the record the way a person wants to see it."""
    from graftwork.cli.show import data, evaluation, releases, training

    for module in (data, training, evaluation, releases, training):
        printer = module.PRINTERS.get(type(record).__name__)
        if printer is not None:
            printer(console, record)
            return
    console.print_json(record.to_json())
