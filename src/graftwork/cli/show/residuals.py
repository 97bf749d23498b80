"""Past residuals as tables."""

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.cli.show.training import NAMES, number
from graftwork.pipeline.past_residuals import PastResiduals


def show_past(console: Console, found: PastResiduals) -> None:
    """Each run's figures, then what they have in common."""
    if not found.runs:
        print_line(console, "no run of this project has ended yet: `graft train` makes the first")
        return
    rows = table("run", "on", "figure", "planned", "range", "came out", "off", right=("planned", "off"))
    for run in found.runs:
        first = (f"{quote(run.run_id)}\n[dim]{quote(run.recorded_at[:16])}[/]", quote(run.device))
        for residual in run.residuals:
            planned = residual.planned
            if "." in residual.name or planned.low == planned.high == residual.actual:
                # Parts are in the JSON and on the run's page; what is exact is no estimate.
                continue
            colour = "green" if residual.inside else "yellow"
            rows.add_row(
                *first,
                NAMES.get(residual.name, residual.name),
                f"{number(planned.value)} {planned.unit}".strip(),
                f"{number(planned.low)} … {number(planned.high)}",
                f"[{colour}]{number(residual.actual)}[/]",
                f"{100 * residual.off:+.0f} %",
            )
            first = ("", "")
    console.print(rows)
    biases = table("bias over past runs", "runs", "median", "from … to", "within the range", right=("runs",))
    for bias in found.biases:
        biases.add_row(
            _title(bias.figure),
            str(bias.runs),
            f"{100 * bias.off.value:+.0f} %",
            f"{100 * bias.off.low:+.0f} … {100 * bias.off.high:+.0f} %",
            f"{100 * bias.inside.value:.0f} %",
        )
    console.print(biases)


def _title(figure: str) -> str:
    whole, _, part = figure.partition(".")
    title = NAMES.get(whole, whole)
    return f"[dim]{title}: {quote(part)}[/]" if part else title
