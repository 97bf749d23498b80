"""`graft serve`: the releases behind one OpenAI-compatible endpoint."""

from typing import Annotated, Any

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any free one.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Serve the champion, the base and every release at /v1/chat/completions, and capture what is served.

    Example:  graft serve --port 8080
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.serving import serve_here
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.project.folder import open_project

    opened = open_project(project)
    given: dict[str, Any] = {"host": host, "port": port}
    changes = {key: value for key, value in given.items() if value is not None}
    settings = type(opened.settings.serve).model_validate({**opened.settings.serve.model_dump(), **changes})

    with open_workplace(opened, Silent()) as work:

        def ready(url: str) -> None:
            if json:
                print_json({"url": url, "aliases": work.releases.aliases()})
            else:
                stdout.print(f"serving at [bold]{url}/v1[/] (Ctrl-C ends it)", highlight=False)
            stdout.file.flush()

        serve_here(work, settings, on_ready=ready)
