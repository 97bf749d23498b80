"""`graft serve`: the releases behind one OpenAI-compatible endpoint."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.serve.settings import ServeSettings

Challenger = Annotated[
    str | None,
    typer.Option(help="Alias of the release that gets a share of the champion's sessions, drawn by lot."),
]
Share = Annotated[
    float | None, typer.Option(help="Share of sessions for the challenger, between 0 and 1; 0.1 by default.")
]
Experiment = Annotated[
    str | None, typer.Option(help="A name for the experiment: another name assigns every session again.")
]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any free one.")] = None,
    challenger: Challenger = None,
    share: Share = None,
    experiment: Experiment = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Serve the champion, the base and every release at /v1/chat/completions, and capture what is served.

    With a challenger, it answers a share of the sessions that ask for the champion, drawn by lot: look at
    `graft release ab champion challenger --watch`. What users say of an answer goes to /v1/feedback.

    Example:  graft serve --port 8080
    Example:  graft serve --challenger challenger --share 0.1
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.serving import describe_experiment, serve_here
    from graftwork.project.load import open_project

    opened = open_project(project)
    before = opened.settings.serve
    changes: dict[str, Any] = _given(host=host, port=port)
    split = _given(challenger=challenger, share=share, experiment=experiment)
    if split:
        changes["split"] = {**(before.split.model_dump() if before.split is not None else {}), **split}
    settings = _revise(before, changes)

    with use_project(opened, NullReporter()) as work:

        def ready(url: str) -> None:
            dealt = describe_experiment(work, settings)
            if json:
                told = {"url": url, "aliases": work.releases.aliases()}
                print_json(told if dealt is None else {**told, "split": dealt})
            else:
                stdout.print(f"serving at [bold]{url}/v1[/] (Ctrl-C ends it)", highlight=False)
                if dealt is not None:
                    stdout.print(dealt, highlight=False, markup=False, soft_wrap=True)
            stdout.file.flush()

        serve_here(work, settings, on_ready=ready)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _revise(settings: "ServeSettings", changes: dict[str, Any]) -> "ServeSettings":
    from pydantic import ValidationError

    from graftwork.records.errors import UserMistake

    try:
        return type(settings).model_validate({**settings.model_dump(), **changes})
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_input=False)[0]
        option = str(first["loc"][-1]) if first["loc"] else "split"
        option = "challenger" if option == "split" else option
        raise UserMistake(
            f"--{option} cannot be that",
            why=str(first["msg"]),
            fix="`graft serve --help` says what it takes",
            where=f"--{option}",
        ) from refused
