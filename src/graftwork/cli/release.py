"""`graft release …`: what was released, what is live, and back."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli import release_exchange
from graftwork.cli.command import Alias, Folder, Model, Name, Reason, opened, opened_aloud
from graftwork.cli.output import Json


def show_(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """One release: what it was made of, its verdict, version, tags and notes.

    Example:  graft release show champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_known
    from graftwork.pipeline.releases import read_verdict
    from graftwork.registry.aliases import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        entry, notes = work.releases.entry(release.id), work.releases.notes(release.id)
        verdict = read_verdict(work, release)
    if json:
        known = entry.model_dump(mode="json", include={"version", "tags", "aliases", "collected_at"})
        said = [note.model_dump(mode="json") for note in notes]
        found = None if verdict is None else verdict.model_dump(mode="json")
        print_json({**release.model_dump(mode="json"), **known, "notes": said, "verdict": found})
        return
    show_known(stdout, release, entry, notes)
    for line in () if verdict is None else (verdict.reason, *(rule.sentence for rule in verdict.rules)):
        stdout.print(f"  {line}", highlight=False, markup=False)


def verify(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """Check every byte of a release, and its signature where graft.yaml names a key.

    Example:  graft release verify champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import report_bytes
    from graftwork.pipeline.releases import open_store
    from graftwork.registry.aliases import find_release

    with opened_aloud(project) as work:
        found = find_release(work.releases, name)
        release = open_store(work).verify(found.id, progress=report_bytes(work.reporter))
        signed = work.settings.release.public_key is not None
    size = sum(file.size for file in release.files)
    if json:
        print_json(
            {"id": release.id, "files": len(release.files), "bytes": size, "signature_checked": signed}
        )
    else:
        words = "and its signature hold" if signed else "hold"
        stdout.print(
            f"{release.id[:12]}: all {len(release.files)} files ({size:,} bytes) {words}", highlight=False
        )


def log(alias: Alias = None, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Every move of an alias: who, when, why, and on which verdict.

    Example:  graft release log --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_log
    from graftwork.pipeline.releases import full_alias

    with opened(project, model) as work:
        full = full_alias(work, alias)
        moves = work.releases.alias_log(full)
        decisions = {release.id: release.decision for release in work.releases.list()}
    if json:
        print_json({"alias": full, "moves": [move.model_dump(mode="json") for move in moves]})
    else:
        show_log(stdout, full, moves, decisions=decisions)


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


def promote(
    name: Name,
    alias: Alias = None,
    reason: Reason = "",
    force: Annotated[bool, typer.Option("--force", help="Against the verdict; needs a reason.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Point an alias at a release. Refused without a deploy verdict, unless forced with a reason.

    Every byte is checked first. The alias is that of the release's own model.

    Example:  graft release promote 3f2a --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.pipeline.releases import promote_release

    with opened(project) as work:
        done = promote_release(work, name, alias=alias, reason=reason, force=force)
    if done.move is not None:
        print_json(done.move) if json else show_move(stdout, done.move)
    elif json:
        print_json({"alias": done.alias, "release_id": done.release.id, "moved": False})
    else:
        stdout.print(f"{done.alias} points at {done.release.id[:12]} already", highlight=False)


def rollback(
    alias: Alias = None, reason: Reason = "", model: Model = None, project: Folder = None, json: Json = False
) -> None:
    """Point an alias at the release before the present one.

    Example:  graft release rollback --reason "answers nonsense since 3 a.m."
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.pipeline.releases import rollback_alias

    with opened(project, model) as work:
        move = rollback_alias(work, alias=alias, reason=reason)
    print_json(move) if json else show_move(stdout, move)


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


def make(model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Release a model: what is out of date is brought up to date, the gate decides, the alias moves.

    Example:  graft release make --model tagger
    """
    from graftwork.cli.command import run_upto
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.records.errors import AnswerIsNo
    from graftwork.records.verdict import Verdict

    made = run_upto("release", project=project, model=model)
    release = made.outputs.get("release")
    if release is None:
        verdict = made.get("gate", Verdict)
        raise AnswerIsNo(
            "nothing was released",
            why=f"the gate said {verdict.decision.replace('_', ' ')}: {verdict.reason}",
            fix="`graft gate` shows each rule and what would help",
        )
    print_json(release) if json else show(stdout, release)


def collect(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Keep this many newest of each model.")
    ] = None,
    keep_days: Annotated[int | None, typer.Option("--keep-days", min=0, help="Keep what is younger.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Take away the files of releases that nobody needs.

    What an alias points at or can be rolled back to, what a server holds, what is tagged `keep`, what is new
    and what is being written stays. The index remembers what was taken.

    Example:  graft release gc --dry-run
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.releases import show_garbage
    from graftwork.cli.show.tables import print_line
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.releases import collect_garbage
    from graftwork.project.load import open_project

    with RichReporter(tables=False) as reporter, use_project(open_project(project), reporter) as work:
        found = collect_garbage(work, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    if json:
        print_json(found)
        return
    show_garbage(stdout, found)
    if found.readers_unseen:
        print_line(
            stdout,
            f"[yellow]readers cannot be seen here[/]: {len(found.readers_unseen)} releases stay, for this "
            "file system does not say whether a server that cannot write the store holds them; collect as "
            "the owner of the files",
        )


def tag(
    name: Name,
    tags: Annotated[list[str], typer.Argument(help="The tags; `keep` saves a release from gc.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take them off.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Tag a release, or take tags off.

    Example:  graft release tag champion keep audited-2026-03
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.registry.aliases import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        now = work.releases.tag(release.id, tags, remove=remove)
    if json:
        print_json({"id": release.id, "tags": list(now)})
    else:
        stdout.print(f"{release.id[:12]}: {', '.join(now) or 'no tags'}", highlight=False)


def note(
    name: Name,
    text: Annotated[str, typer.Argument(help="What there is to say.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Add a note to a release. Notes are searched by `list --search` and never changed.

    Example:  graft release note champion "answers in French since the March logs"
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.open_project import current_user, timestamp
    from graftwork.registry.aliases import find_release

    if not text.strip():
        raise typer.BadParameter("a note cannot be taken back: say something in it")
    with opened(project) as work:
        release = find_release(work.releases, name)
        work.releases.note(release.id, text, who=current_user(), when=timestamp())
        notes = work.releases.notes(release.id)
    if json:
        print_json({"id": release.id, "notes": [one.model_dump(mode="json") for one in notes]})
    else:
        stdout.print(f"{release.id[:12]}: noted", highlight=False)


def version(
    name: Name,
    number: Annotated[str, typer.Argument(help="The version, like 2.0.0.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Give a release another version than the one that it got by rule.

    Example:  graft release version champion 2.0.0
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.registry.aliases import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        work.releases.set_version(release.id, number)
    if json:
        print_json({"id": release.id, "model": release.model, "version": number})
    else:
        stdout.print(f"{release.id[:12]} is version {number} of {release.model}", highlight=False)


First = Annotated[str, typer.Argument(help="The release to beat: an alias, a version or an id.")]
Second = Annotated[str, typer.Argument(help="The release that may be better.")]
Traffic = Annotated[str, typer.Option("--traffic", help="captures: what the endpoint kept of both.")]
Cases = Annotated[Path | None, typer.Option("--cases", help="A JSONL file of cases that both are asked.")]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="The gate's primary metric by default; feedback: what users said."),
]
Experiment = Annotated[
    str | None,
    typer.Option("--experiment", help="Its id or a part of it; by default the latest one of these two."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Look again and again until it is decided.")]
Every = Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")]


def ab(
    a: First,
    b: Second,
    traffic: Traffic = "captures",
    cases: Cases = None,
    metric: Metric = None,
    experiment: Experiment = None,
    watch: Watch = False,
    every: Every = 5.0,
    model: Model = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare two releases, and stop when it is decided, not before. Look as often as you like.

    Exit codes: 0 decided, 12 not enough evidence yet.

    On live traffic, the exchanges count that `graft serve --challenger` dealt by lot, once a session.

    Example:  graft release ab champion challenger --metric feedback --watch
    Example:  graft release ab champion challenger --cases replay.jsonl --metric json_valid
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.releases import show_ab
    from graftwork.pipeline.ab import compare_live, compare_replayed, watch_live
    from graftwork.pipeline.open_project import use_project
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project
    from graftwork.records.errors import UserMistake

    if traffic != "captures":
        raise UserMistake(
            f"{traffic!r} is no traffic", fix="give --traffic captures, or --cases FILE", where="--traffic"
        )
    if cases is not None and (watch or experiment is not None):
        raise UserMistake(
            "cases are asked, not watched",
            why="--watch and --experiment are for live traffic",
            fix="leave out --cases, or the other two",
            where="--cases",
        )
    with (
        stoppable(),
        RichReporter(tables=False) as reporter,
        use_project(open_project(project), reporter, model=model) as work,
    ):
        if cases is not None:
            found = compare_replayed(work, a, b, cases_file=cases.absolute(), metric=metric)
        elif watch:
            found = watch_live(work, a, b, metric=metric, experiment=experiment, every_seconds=every)
        else:
            found = compare_live(work, a, b, metric=metric, experiment=experiment)
    if json:
        print_json(found)
    else:
        show_ab(stdout, found)
    raise typer.Exit(found.exit_code)


app = typer.Typer(help="What was released, what is live, and the way back.", no_args_is_help=True)


@app.callback()
def _begin() -> None:
    # These verbs are short and mostly load code: objects by the ten thousand, of which none is garbage yet.
    # Looking for some after every 700, as Python does, takes five to ten per cent of a rollback.
    gc.set_threshold(50_000, 20, 50)


app.command("list")(list_)
app.command("show")(show_)
app.command("verify")(verify)
app.command("log")(log)
app.command("lineage")(lineage)
app.command("make")(make)
app.command("promote")(promote)
app.command("rollback")(rollback)
app.command("tag")(tag)
app.command("note")(note)
app.command("version")(version)
app.command("sign")(release_exchange.sign)
app.command("keygen")(release_exchange.keygen)
app.command("gc")(collect)
app.command("export")(release_exchange.export)
app.command("import")(release_exchange.import_)
app.command("push")(release_exchange.push)
app.command("pull")(release_exchange.pull)
app.command("ab")(ab)
