"""`graft release list`: the releases, by what is said of them."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import opened
from graftwork.cli.steps import Folder, Model

Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="How many at most; 0 lists all.")]


def list_(
    tag: Annotated[str | None, typer.Option("--tag", help="Only those with this tag.")] = None,
    decision: Annotated[
        str | None, typer.Option("--decision", help="deploy, iterate, abort or not_enough_evidence.")
    ] = None,
    model: Model = None,
    base: Annotated[str | None, typer.Option("--base", help="Only those on this base.")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Made since this date (2026-03-01) or this long ago (7d, 12h)."),
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="Text in id, version, base, run, tags or notes.")
    ] = None,
    collected: Annotated[
        bool, typer.Option("--collected", help="Also those whose files were collected as garbage.")
    ] = False,
    limit: Limit = 50,
    project: Folder = None,
    json: Json = False,
) -> None:
    """The releases, the newest first, with their aliases, versions and tags.

    Example:  graft release list --decision deploy --since 30d
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_entries
    from graftwork.pipeline.releases import make_query
    from graftwork.records.release import ReleaseQuery

    filters = ReleaseQuery(tag=tag, model=model, base=base, search=search, collected=collected)
    query = make_query(filters, decision=decision, since=since, limit=limit)
    with opened(project) as work:
        found, aliases = work.releases.entries(query), work.releases.aliases()
    more = limit and len(found) > limit
    shown = found[:limit] if more else found
    if json:
        body = {"releases": [one.model_dump(mode="json") for one in shown], "aliases": aliases}
        print_json({**body, "more": True} if more else body)
    else:
        show_entries(stdout, shown, more=bool(more))
