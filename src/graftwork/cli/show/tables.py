"""The one look of all tables."""

from rich import box
from rich.table import Table


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
