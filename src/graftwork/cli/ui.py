"""`graft ui`: open the web page of the project."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json, print_json, stdout
from graftwork.records.errors import UserError, needs_extra


def ui(
    project: Folder = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on; 0.0.0.0 makes the page reachable from other machines."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port. Default: 8910, or the next free one."),
    ] = None,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Allow promoting, rolling back, stopping, running and reviewing. Default: read-only.",
        ),
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the browser.")] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print another link to the page that is running, and exit.")
    ] = False,
    json: Json = False,
) -> None:
    """Open a web page for the project: what runs, what is live, what failed, and the details.

    In a folder without a project, the page creates one from a log. The printed link signs one browser in.
    Requires the extra `ui`.

    Example:  graft ui --allow-actions
    """
    from graftwork.api.project import has_project, open_project
    from graftwork.project.folder import find_project

    root = (project or find_project() or Path()).absolute()
    if has_project(root) or not root.is_dir():
        root = open_project(root).root
    with needs_extra("ui", why="it serves the page of `graft ui`"):
        from graftwork.web.serve import PageAddress, find_running, serve_page

    running = find_running(root)
    if running is not None:
        _show(running, as_json=json, browser=not (no_open or link))
        return
    if link:
        raise UserError("no page of this project is running", fix="`graft ui` starts one", where=str(root))

    def show(address: PageAddress) -> None:
        _show(address, as_json=json, browser=not no_open)

    serve_page(root, host=host, port=port, allow_actions=allow_actions, on_ready=show)


def _show(address: object, *, as_json: bool, browser: bool) -> None:
    import sys

    url, link, already = (getattr(address, name) for name in ("url", "link", "already_running"))
    if as_json:
        print_json({"url": url, "link": link, "already_running": already})
    else:
        note = "already running" if already else "Ctrl-C stops it"
        stdout.print(f"{link}\n", highlight=False, soft_wrap=True, markup=False, end="")
        stdout.print(
            f"[dim]{note}; the link signs in one browser, `graft ui --link` prints another[/]",
            highlight=False,
        )
    sys.stdout.flush()
    if browser:
        import webbrowser

        webbrowser.open(link)
