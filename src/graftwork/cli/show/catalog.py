"""The catalog as tables: one for each kind, with the date of every row and a mark where it is old."""

from typing import Any

from rich.console import Console

from graftwork.cli.show.tables import PlainTable, print_line, quote, table

Rows = list[dict[str, Any]]


def show_catalog(console: Console, listed: dict[str, Rows]) -> None:
    """All that was listed, kind by kind, then what is old."""
    makers = {
        "models": _models,
        "gpus": _gpus,
        "cpus": _cpus,
        "prices": _prices,
        "quoted": _prices,
        "places": _places,
    }
    for kind, rows in listed.items():
        console.print(makers[kind](kind, rows))
        for row in rows if kind == "places" else ():
            print_line(console, f"[bold]{quote(row['title'])}[/]: {quote(row['notes'])}", soft_wrap=True)
    old = sum(row.get("stale", False) for rows in listed.values() for row in rows)
    if old:
        print_line(
            console,
            f"[yellow]{old} rows are old (marked !): look the prices up and put them into your own "
            "prices.csv, named with `--catalog` or GRAFT_CATALOG[/]",
            soft_wrap=True,
        )


def _models(kind: str, rows: Rows) -> PlainTable:
    made = table("model", "on the Hub", "family", "parameters", "dated", title=kind, right=("parameters",))
    for row in rows:
        count = f"{row['parameters']['value'] / 1e9:.3f} B"
        made.add_row(
            quote(row["name"]), quote(row["hf_id"]), quote(row["architecture"]), count, quote(row["dated"])
        )
    return made


def _gpus(kind: str, rows: Rows) -> PlainTable:
    numbers = ("GiB", "TFLOPS", "FP8", "GB/s", "W")
    made = table("card", *numbers, "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("memory_gib", "half_tflops", "eight_tflops", "bandwidth_gb_s", "watts")
        made.add_row(
            quote(row["name"]),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            quote(row["dated"]),
        )
    return made


def _cpus(kind: str, rows: Rows) -> PlainTable:
    numbers = ("cores", "GFLOPS", "in bfloat16", "GB/s", "W")
    made = table("processor", *numbers, "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("cores", "gflops", "half_gflops", "bandwidth_gb_s", "watts")
        made.add_row(
            quote(row["name"]),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            quote(row["dated"]),
        )
    return made


def _prices(kind: str, rows: Rows) -> PlainTable:
    title = "prices" if kind == "prices" else "prices as teams quoted them (not reckoned with)"
    numbers = ("$ an hour", "spot", "$ a month", "hours a month")
    made = table("place", "card", *numbers, "source", "dated", title=title, right=numbers)
    for row in rows:
        columns = ("usd_per_hour", "spot_usd_per_hour", "usd_per_month", "hours_a_month")
        card = row["gpu"] if row["gpus"] == 1 else f"{row['gpus']} × {row['gpu']}"
        made.add_row(
            quote(row["place"]),
            quote(card),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            _dated(row),
        )
    return made


def _places(kind: str, rows: Rows) -> PlainTable:
    numbers = ("session h", "set-up min", "$/GiB month", "$/GiB out")
    made = table("place", *numbers, "driven", "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("session_hours", "setup_minutes", "storage_usd_gib_month", "egress_usd_gib")
        made.add_row(
            quote(row["title"]),
            *(_number(row[column]) for column in columns),
            quote(row["driven_by"]),
            quote(row["source"]),
            _dated(row),
        )
    return made


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _dated(row: dict[str, Any]) -> str:
    return f"[yellow]{quote(row['dated'])} ![/]" if row["stale"] else quote(row["dated"])
