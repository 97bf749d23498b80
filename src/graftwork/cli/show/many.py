"""All models of a project after training, and what was exported, as tables."""

from typing import TYPE_CHECKING

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table

if TYPE_CHECKING:
    from graftwork.pipeline.train_all import ModelResult, TrainedAll
    from graftwork.records.release import ExportedAdapter

COLOURS = {"trained": "green", "unchanged": "dim", "failed": "red"}


def show_trained_all(console: Console, trained: "TrainedAll") -> None:
    several = len({model.base for model in trained.models if model.base}) > 1
    rows = table(
        "model",
        *(["base"] if several else []),
        "rows",
        "steps",
        "loss on held-out rows",
        "minutes",
        "state",
        title=trained.project,
        right=("rows", "steps", "minutes"),
    )
    for model in trained.models:
        rows.add_row(model.model, *([quote(model.base)] if several else []), *_figures(model), _state(model))
    console.print(rows)
    for model in trained.failed:
        said = model.error or {}
        print_line(console, f"[red]{quote(model.model)}[/]: {quote(str(said.get('what', '')))}")
        for label in ("why", "fix", "where"):
            if said.get(label):
                print_line(console, f"  [dim]{label:<6}[/]{quote(str(said[label]))}")
    print_line(console, f"[dim]{len(trained.models)} models in {trained.seconds / 60:.1f} minutes[/]")


def _figures(model: "ModelResult") -> tuple[str, str, str, str]:
    if model.outcome is None:
        return "", "", "", ""
    outcome = model.outcome
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    if before is None or after is None:
        # Without held-out rows the first and the last step say what can be said.
        before, after = outcome.first_loss, outcome.final_loss
    return f"{outcome.rows:,}", f"{outcome.steps:,}", f"{before:.3f} → {after:.3f}", f"{model.minutes:.1f}"


def _state(model: "ModelResult") -> str:
    start = " from main" if model.outcome and model.outcome.started_from else ""
    return f"[{COLOURS[model.state]}]{model.state}{start}[/]"


def show_exported(console: Console, exported: "ExportedAdapter") -> None:
    print_line(console, f"run [bold]{exported.run_id}[/] as {exported.format} in {quote(exported.folder)}")
    if exported.merged is not None:
        found = exported.merged.agreement
        print_line(
            console,
            f"[green]proven[/]: {exported.merged.merged_weights} weights merged; on {found.positions} reply "
            f"tokens of {found.rows} held-out rows the logits differ by at most "
            f"{found.largest_difference:.2g} (largest logit {found.largest_logit:.1f}, {found.dtype}), "
            f"the first choice is the same at {found.same_first:.1%}",
        )
    if exported.gguf:
        said = exported.gguf
        print_line(
            console,
            f"[green]read back[/]: {said['tensors']} tensors, {said['blocks']} blocks, "
            f"{said['elements']:,} weights ({said['architecture']})",
        )
    for word in exported.words:
        print_line(console, f"[yellow]![/] {quote(word)}")
    print_line(console, "base files untouched (hashes before and after are the same)")
    for name, digest in exported.files.items():
        print_line(console, f"[dim]{digest[:12]}  {quote(name)}[/]")


PRINTERS = {"TrainedAll": show_trained_all, "ExportedAdapter": show_exported}
