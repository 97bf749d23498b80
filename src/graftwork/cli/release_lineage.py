"""`graft release lineage`: down to the log lines."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import Name, opened
from graftwork.cli.steps import Folder


def lineage(
    name: Name = "champion",
    dot: Annotated[bool, typer.Option("--dot", help="For Graphviz.")] = False,
    lines: Annotated[bool, typer.Option("--lines/--no-lines", help="Down to the lines of the logs.")] = True,
    project: Folder = None,
    json: Json = False,
) -> None:
    """What a release was made of: run, plan, base, dataset, log files and lines; and the releases before it.

    Example:  graft release lineage champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_lineage
    from graftwork.pipeline.release_lineage import to_dot, trace_release
    from graftwork.registry.aliases import find_release

    with opened(project) as work:
        graph = trace_release(work, find_release(work.releases, name), lines=lines)
    if json:
        print_json(graph)
    elif dot:
        typer.echo(to_dot(graph), nl=False)
    else:
        show_lineage(stdout, graph)
