"""Base models for the terminal."""

from rich.console import Console

from graftwork.cli.show.tables import fit_words, print_line, quote, table
from graftwork.pipeline.models import LocalModels, PulledModel, RemovedModels


def show_pulled(console: Console, pulled: PulledModel) -> None:
    print_line(
        console,
        f"[bold]{quote(pulled.name)}[/] at {pulled.commit[:12]}: {pulled.files} files, "
        f"{_size(pulled.size_bytes)}",
    )
    print_line(console, f"[dim]{quote(pulled.folder)}[/]", soft_wrap=True)
    if pulled.moved_to:
        print_line(
            console,
            f"[yellow]![/] the revision has moved to {pulled.moved_to[:12]}; this project stays where it is. "
            "`graft model pull --update` moves it.",
        )


def show_models(console: Console, found: LocalModels) -> None:
    if not found.models:
        print_line(console, "no base model is on this machine; `graft model pull NAME` fetches one")
        return
    made = table("model", "commit", "size", "weights", "", right=("size",))
    for model in found.models:
        made.add_row(
            quote(model.name),
            (model.commit or "embedded")[:12],
            _size(model.size_bytes),
            "yes" if model.has_weights else "not fetched",
            "used by this project" if model.pinned else "",
        )
    console.print(fit_words(console, made))


def show_removed(console: Console, removed: RemovedModels) -> None:
    for name in removed.removed:
        print_line(console, f"removed [bold]{quote(name)}[/]", soft_wrap=True)
    print_line(console, f"{_size(removed.freed_bytes)} are free again")


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


PRINTERS = {"PulledModel": show_pulled, "LocalModels": show_models, "RemovedModels": show_removed}
