"""`graft release …`: list, check, make, edit, promote, compare, export, transfer and deploy releases."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graftwork.cli.command import (
    Alias,
    Folder,
    Model,
    Name,
    Reason,
    opened,
    opened_with_progress,
    print_record,
    reporting,
)
from graftwork.cli.output import Json, print_json, print_text, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT, UserError
from graftwork.text.wording import plural
from graftwork.views.terminal import print_document, print_line

if TYPE_CHECKING:
    from graftwork.project.open_project import OpenProject

ToUrl = Annotated[
    str | None,
    typer.Option(
        "--to", help="An fsspec URL such as s3://bucket/folder. Default: release.store in graft.yaml."
    ),
]
FromUrl = Annotated[
    str | None,
    typer.Option(
        "--from", help="An fsspec URL such as s3://bucket/folder. Default: release.store in graft.yaml."
    ),
]
ToHub = Annotated[str | None, typer.Option("--hub", help="A repository on the Hugging Face Hub: OWNER/NAME.")]
FromHub = Annotated[
    str | None,
    typer.Option("--hub", help="A Hub repository, with an optional revision: OWNER/NAME@TAG."),
]
ToMachine = Annotated[
    str | None, typer.Option("--ssh", help="A folder on the serving machine: [user@]host:/folder.")
]
ToMlflow = Annotated[
    str | None,
    typer.Option("--mlflow", help="A registered model in MLflow (MLFLOW_TRACKING_URI)."),
]
PushedAlias = Annotated[
    str | None,
    typer.Option("--alias", help="With --ssh: the alias to move there after the hashes are verified."),
]


def push(
    name: Name = "champion",
    to: ToUrl = None,
    hub: ToHub = None,
    ssh: ToMachine = None,
    mlflow: ToMlflow = None,
    alias: PushedAlias = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Push a release to another place. Every byte is verified before and after the transfer.

    Files that are already there are not sent again. Over SSH the alias moves last, and only to the release
    that it points at here.

    Example:  graft release push champion --ssh gpu1:/srv/releases --alias champion
    """

    ways = (to, hub, ssh, mlflow)
    if sum(way is not None for way in ways) > 1 or (alias is not None and ssh is None):
        raise UserError(
            "these options cannot be combined",
            why="a push has one destination, and only a serving machine has aliases",
            fix="use one of --to, --hub, --ssh and --mlflow; --alias requires --ssh",
        )
    with opened_with_progress(project) as work:
        body, text = _send(work, name, to=to, hub=hub, ssh=ssh, mlflow=mlflow, alias=alias)
    print_json(body) if json else print_text(text)


def pull(
    name: Annotated[
        str | None, typer.Argument(help="The id of the release there, or its first characters.")
    ] = None,
    from_: FromUrl = None,
    hub: FromHub = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Pull a release from another place into this project. Every byte is verified.

    Example:  graft release pull 3f2a --from s3://bucket/releases
    """

    from graftwork.registry import deploy

    on_hub = hub is not None and from_ is None and name is None
    if not on_hub and (hub is not None or name is None):
        raise UserError(
            "the release is ambiguous",
            why="a release at a URL is named by its id, on the Hub by repository and revision",
            fix="`graft release pull ID --from URL`, or `graft release pull --hub OWNER/NAME@TAG`",
        )
    with opened_with_progress(project) as work:
        if hub is not None:
            done = deploy.pull_from_hub(work, hub)
        elif name is not None:
            done = deploy.pull_from_url(work, name, url=from_)
    release = done.release
    if json:
        print_json({"id": release.id, "version": done.version, "new": done.new, "decision": release.decision})
    else:
        state = "imported" if done.new else "already here"
        print_text(f"{release.id[:12]} {state}: {release.model} {done.version or ''}, {release.decision}")


def deploy(
    name: Name = "champion",
    ssh: Annotated[
        str | None,
        typer.Option("--ssh", help="A project on the serving machine: [user@]host:/folder. Default: here."),
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", help="The alias to move. Default: the one in graft.yaml.")
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests that the endpoint must answer; 0 for none.", min=0)
    ] = 3,
    questions: Annotated[
        str | None,
        typer.Option(
            help="A JSON file with a list of questions, each a list of messages; - for standard input."
        ),
    ] = None,
    graft: Annotated[str, typer.Option(help="With --ssh: the command `graft` there.")] = "graft",
    project: Folder = None,
    json: Json = False,
) -> None:
    """Put a release into service: move the alias, send test requests, roll back if they fail.

    With --ssh the release is pushed and verified first, and `graft release deploy` runs there. Exit code 1:
    the first requests failed, and the alias points at the old release again.

    Example:  graft release deploy champion --ssh gpu1:/srv/helpdesk
    """
    from graftwork.registry.deploy import HERE
    from graftwork.registry.deploy import deploy as put_into_service

    with opened_with_progress(project) as work:
        done = put_into_service(
            work,
            name,
            to=ssh or HERE,
            alias=alias,
            graft=graft,
            requests=requests,
            questions=_read_questions(questions),
        )
    if json:
        print_json(done)
    else:
        moved = f"is {done.alias}"
        if not done.ok:
            moved = (
                f"was rolled back; {done.alias} is unchanged"
                if done.taken_back
                else f"failed and is still {done.alias}: there was no other release to roll back to"
            )
        why = f": {done.why}" if done.why else f", {done.asked} requests answered"
        print_text(f"{done.release[:12]} {moved} at {done.to}{why}")
    raise typer.Exit(0 if done.ok else EXIT_NEGATIVE_RESULT)


def _read_questions(source: str | None) -> list[list[dict[str, str]]]:
    import json
    import sys

    if source is None:
        return []
    try:
        found = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
        return [[{str(k): str(v) for k, v in turn.items()} for turn in question] for question in found]
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(
            "the questions cannot be read",
            why=str(error),
            fix='write a list of questions, each a list of messages: [[{"role": "user", "content": "…"}]]',
            where="--questions",
        ) from error


def _send(
    work: "OpenProject",
    name: str,
    *,
    to: str | None,
    hub: str | None,
    ssh: str | None,
    mlflow: str | None,
    alias: str | None,
) -> tuple[dict[str, Any], str]:
    """What was sent: as JSON and as text."""
    from graftwork.registry import deploy

    body: dict[str, Any]
    if mlflow is not None:
        version, is_new = deploy.push_to_mlflow_registry(work, name, registered=mlflow)
        text = f"{mlflow} version {version} in MLflow" + ("" if is_new else ", unchanged")
        return {"mlflow": mlflow, "version": version, "new": is_new}, text
    if hub is not None:
        release, commit, tag = deploy.push_to_hub(work, name, repository=hub)
        body = {"id": release.id, "hub": hub, "commit": commit, "tag": tag}
        return body, f"{release.id[:12]} is at {hub}, commit {commit[:12]}, tag {tag}"
    if ssh is not None:
        there = deploy.push_to_machine(work, name, target=ssh, alias=alias)
        body = {"id": there.release.id, "ssh": ssh, "sent": there.sent, "alias": there.alias}
        text = f"{there.release.id[:12]} {'sent' if there.sent else 'already there'}: {ssh}"
        moved = f"; {there.alias} points at it there" if there.alias else ""
        return {**body, "previous": there.previous}, text + moved
    release, sent = deploy.push_to_url(work, name, url=to)
    size = sum(file.size for file in sent)
    body = {"id": release.id, "sent": [file.path for file in sent], "bytes": size}
    return body, f"{release.id[:12]}: {len(sent)} of {len(release.files)} files sent ({size:,} bytes)"


Target = Annotated[
    Path | None,
    typer.Option("--to", help="The tar file, or a folder for it. Default: PROJECT-ID.tar in the project."),
]

BaseTarget = Annotated[
    Path | None,
    typer.Option("--base", help="Also write the exact base weights into this new folder, for transformers."),
]


Format = Annotated[
    Literal["tar", "ollama", "vllm", "merged", "gguf", "adapter"],
    typer.Option(
        help="tar: the release itself. ollama: a merged GGUF file with a Modelfile. vllm: a folder with "
        "base, adapter and command line. Of a run: merged (base and adapter as one transformers folder, "
        "checked to give the same output), gguf (the merged model, converted by llama.cpp) or adapter (the "
        "PEFT folder).",
    ),
]


def export(
    name: Annotated[
        str,
        typer.Argument(help="An alias, a version, an id; `run` for the last run of the model, or run:ID."),
    ] = "champion",
    to: Target = None,
    base: BaseTarget = None,
    format: Format = "tar",
    precision: Annotated[
        Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q4_1"] | None,
        typer.Option(help="With --format ollama. Default: q8_0."),
    ] = None,
    model: Model = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Export a release or a run: as a tar file, for Ollama or vLLM, merged into its base, as GGUF or PEFT.

    The same release always gives the same bytes.

    Every byte is verified on export and on import. `--base` also writes the weights that the adapter was
    trained and evaluated on; for the embedded base these are not the official weights.

    Example:  graft release export champion --to champion.tar --base champion-base
    Example:  graft release export champion --format ollama --to champion-ollama
    Example:  graft release export run --format merged --to merged
    """
    of_run = name == "run" or name.startswith("run:")
    if of_run != (format in ("merged", "gguf", "adapter")):
        raise typer.BadParameter(
            "merged, gguf and adapter are formats of a run (`run` or run:ID) and only of it"
        )
    if model is not None and not of_run:
        raise typer.BadParameter("--model is for a run; the name of a release includes its model")
    if precision is not None and format != "ollama":
        raise typer.BadParameter("--precision is for --format ollama")
    if format != "tar" and (base is not None or to is None):
        raise typer.BadParameter(f"--format {format} needs --to FOLDER, and cannot be combined with --base")
    if to is not None and format in ("merged", "gguf", "adapter"):
        from graftwork.registry.export import export_run

        with reporting(project, model) as opened_project, opened_project.open() as work:
            exported = export_run(work, run=name.partition(":")[2] or None, to=to.absolute(), format=format)
        print_record(exported, as_json=json)
    elif to is not None and format in ("ollama", "vllm"):
        from graftwork.registry.export import export_for_program

        with opened_with_progress(project) as work:
            program = export_for_program(work, name, format=format, to=to, precision=precision or "q8_0")
        if json:
            print_json(program)
        else:
            notes = [f"! {note}" for note in program.notes]
            print_text(f"{program.release_id[:12]} is in {program.folder}", program.command, *notes)
    else:
        _export_archive(name, to, base, project=project, as_json=json)


def _export_archive(
    name: str, to: Path | None, base: Path | None, *, project: Path | None, as_json: bool
) -> None:
    from graftwork.registry.deploy import export_base, export_release

    with opened_with_progress(project) as work:
        release, path, sha256 = export_release(work, name, target=to)
        base_bytes = None if base is None else export_base(work, name, target=base)
    size = path.stat().st_size
    if as_json:
        body: dict[str, Any] = {"id": release.id, "file": str(path), "sha256": sha256, "bytes": size}
        print_json(body if base_bytes is None else {**body, "base": str(base), "base_bytes": base_bytes})
        return
    print_text(
        f"{release.id[:12]} is in {path} ({size:,} bytes)",
        f"sha256 {sha256}",
    )
    if base_bytes is not None:
        print_text(f"its base is in {base} ({base_bytes:,} bytes)")


Source = Annotated[
    Path, typer.Argument(help="A tar file written by `graft release export`, or a PEFT folder.")
]


def import_(source: Source, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Import a release. Every byte is verified; anything but a plain release file is refused.

    A PEFT folder (safetensors only) becomes a release with the verdict "not enough evidence".

    Example:  graft release import champion.tar
    """
    from graftwork.registry.deploy import import_release

    with opened_with_progress(project, model) as work:
        done = import_release(work, source)
    if json:
        body = {"id": done.release.id, "version": done.version, "new": done.new}
        print_json({**body, "decision": done.release.decision, "remarks": list(done.remarks)})
        return
    state = "imported" if done.new else "already here"
    print_text(
        f"{done.release.id[:12]} {state}: {done.release.model} {done.version or ''}, {done.release.decision}",
        *done.remarks,
    )


First = Annotated[str | None, typer.Argument(help="The release to beat: an alias, a version or an id.")]
Second = Annotated[str | None, typer.Argument(help="The release that challenges it.")]
Traffic = Annotated[
    str,
    typer.Option(
        "--traffic",
        help="captures: live exchanges of both, as captured by the endpoint. shadow: copies of live requests "
        "that the second answered without users noticing (serve.shadow).",
    ),
]
Cases = Annotated[Path | None, typer.Option("--cases", help="A JSONL file of cases that both answer.")]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric", help="A metric, or `feedback` for user feedback. Default: the primary metric of the gate."
    ),
]
Experiment = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        help="An experiment id or a part of it. Default: the latest experiment with both releases.",
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Repeat until the comparison is decided.")]
Every = Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two checks.")]
Canary = Annotated[
    str | None,
    typer.Option("--canary", help="Share of live sessions that the release answers first.", metavar="5%"),
]
Sessions = Annotated[
    int | None, typer.Option("--sessions", min=1, help="End an undecided canary after this many sessions.")
]
Hours = Annotated[
    float | None, typer.Option("--hours", min=0.0, help="End an undecided canary after this many hours.")
]


def show_(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """Show a release: what it was made from, its verdict, version, tags and notes.

    Example:  graft release show champion
    """
    from graftwork.registry.index import find_release
    from graftwork.registry.project import read_verdict
    from graftwork.views.release import view_known

    with opened(project) as work:
        release = find_release(work.releases, name)
        entry, notes = work.releases.entry(release.id), work.releases.notes(release.id)
        verdict = read_verdict(work, release)
    if json:
        known = entry.model_dump(mode="json", include={"version", "tags", "aliases", "collected_at"})
        written = [note.model_dump(mode="json") for note in notes]
        found = None if verdict is None else verdict.model_dump(mode="json")
        print_json({**release.model_dump(mode="json"), **known, "notes": written, "verdict": found})
        return
    print_document(stdout, view_known(release, entry, notes))
    for line in () if verdict is None else (verdict.reason, *(rule.sentence for rule in verdict.rules)):
        stdout.print(f"  {line}", highlight=False, markup=False)


def verify(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """Verify every byte of a release, and its signature if graft.yaml names a public key.

    Example:  graft release verify champion
    """
    from graftwork.registry.deploy import report_bytes
    from graftwork.registry.index import find_release
    from graftwork.registry.project import open_store

    with opened_with_progress(project) as work:
        found = find_release(work.releases, name)
        release = open_store(work).verify(found.id, progress=report_bytes(work.reporter))
        signed = work.settings.release.public_key is not None
    size = sum(file.size for file in release.files)
    if json:
        print_json(
            {"id": release.id, "files": len(release.files), "bytes": size, "signature_checked": signed}
        )
    else:
        what = "files and signature verified" if signed else "files verified"
        stdout.print(f"{release.id[:12]}: all {len(release.files)} {what} ({size:,} bytes)", highlight=False)


def log(alias: Alias = None, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Show the history of an alias: who moved it, when, why, and on which verdict.

    Example:  graft release log --alias champion
    """
    from graftwork.registry.project import full_alias
    from graftwork.views.release import view_log

    with opened(project, model) as work:
        full = full_alias(work, alias)
        moves = work.releases.alias_log(full)
        decisions = {release.id: release.decision for release in work.releases.list()}
    if json:
        print_json({"alias": full, "moves": [move.model_dump(mode="json") for move in moves]})
    else:
        print_document(stdout, view_log(full, moves, decisions=decisions))


def lineage(
    name: Name = "champion",
    dot: Annotated[bool, typer.Option("--dot", help="Print Graphviz DOT.")] = False,
    lines: Annotated[bool, typer.Option("--lines/--no-lines", help="Include the lines of the logs.")] = True,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Show what a release was made from: run, plan, base, dataset, log lines, and earlier releases.

    Example:  graft release lineage champion
    """
    from graftwork.registry.index import find_release
    from graftwork.registry.project import to_dot, trace_release

    with opened(project) as work:
        graph = trace_release(work, find_release(work.releases, name), lines=lines)
    if dot and not json:
        typer.echo(to_dot(graph), nl=False)
    else:
        print_record(graph, as_json=json)


def promote(
    name: Name,
    alias: Alias = None,
    reason: Reason = "",
    force: Annotated[
        bool, typer.Option("--force", help="Promote against the verdict; requires --reason.")
    ] = False,
    canary: Canary = None,
    metric: Metric = None,
    sessions: Sessions = None,
    hours: Hours = None,
    every: Every = 5.0,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Point an alias at a release. Requires a deploy verdict, or --force with a reason.

    Every byte is verified first. The alias belongs to the model of the release.

    With --canary the release first answers a share of the sessions of the running endpoint. A sequential test
    promotes it if it is better by the metric, and rolls it back if it is worse or fails more often.
    Exit codes: 0 promoted, 1 rolled back, 12 not decided within --sessions or --hours; the alias stays.

    Example:  graft release promote 3f2a --alias champion
    Example:  graft release promote 3f2a --canary 5% --metric feedback --hours 24
    """
    if canary is not None:
        from graftwork.evaluate.live.canary import parse_share

        with reporting(project) as opened_project:
            report = opened_project.promote_canary(
                name,
                share=parse_share(canary),
                alias=alias,
                metric=metric,
                reason=reason,
                force=force,
                max_sessions=sessions,
                max_seconds=None if hours is None else 3600 * hours,
                every_seconds=every,
            )
        print_record(report, as_json=json)
        raise typer.Exit(report.exit_code)
    if metric is not None or sessions is not None or hours is not None:
        raise typer.BadParameter("--metric, --sessions and --hours need --canary")
    from graftwork.registry.project import promote_release

    with opened(project) as work:
        release, full, move = promote_release(work, name, alias=alias, reason=reason, force=force)
    if move is not None:
        print_record(move, as_json=json)
    elif json:
        print_json({"alias": full, "release_id": release.id, "moved": False})
    else:
        stdout.print(f"{full} already points at {release.id[:12]}", highlight=False)


def rollback(
    alias: Alias = None, reason: Reason = "", model: Model = None, project: Folder = None, json: Json = False
) -> None:
    """Point an alias at the previous release.

    Example:  graft release rollback --reason "answers nonsense since 3 a.m."
    """
    from graftwork.registry.project import rollback_alias

    with opened(project, model) as work:
        move = rollback_alias(work, alias=alias, reason=reason)
    print_record(move, as_json=json)


Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="Maximum number of releases; 0 for all.")]


def list_(
    tag: Annotated[str | None, typer.Option("--tag", help="Only releases with this tag.")] = None,
    decision: Annotated[
        str | None, typer.Option("--decision", help="deploy, iterate, abort or not_enough_evidence.")
    ] = None,
    model: Model = None,
    base: Annotated[str | None, typer.Option("--base", help="Only releases on this base.")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Created since this date (2026-03-01) or within this period (7d, 12h)."),
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="Text in id, version, base, run, tags or notes.")
    ] = None,
    collected: Annotated[
        bool, typer.Option("--collected", help="Include releases whose files were garbage collected.")
    ] = False,
    limit: Limit = 50,
    index: Annotated[
        bool,
        typer.Option(
            "--index",
            help="First add releases on disk to the index, for example after state.db was lost. Each is "
            "verified byte by byte; aliases, tags and notes do not come back.",
        ),
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """List releases, newest first, with their aliases, versions and tags.

    Example:  graft release list --decision deploy --since 30d
    """
    from graftwork.records.release import ReleaseQuery
    from graftwork.registry.project import count_unindexed, index_releases, make_query
    from graftwork.views.release import view_entries

    filters = ReleaseQuery(tag=tag, model=model, base=base, search=search, collected=collected)
    query = make_query(filters, decision=decision, since=since, limit=limit)
    with opened_with_progress(project) as work:
        added, refused = index_releases(work) if index else ((), ())
        found, aliases = work.releases.entries(query), work.releases.aliases()
        unindexed = 0 if found else count_unindexed(work)
    more = limit and len(found) > limit
    shown = found[:limit] if more else found
    if json:
        body = {"releases": [entry.model_dump(mode="json") for entry in shown], "aliases": aliases}
        body |= {"indexed": {"added": added, "refused": refused}} if index else {}
        print_json({**body, "more": True} if more else body)
    else:
        print_document(stdout, view_entries(shown, more=bool(more)))
        if unindexed:
            on_disk = f"{plural(unindexed, 'release')} on disk"
            print_line(
                stdout, f"[yellow]![/] {on_disk} not in the index: `graft release list --index` adds them"
            )
        for release_id in refused:
            print_line(stdout, f"[yellow]![/] {release_id} does not verify: it is not added")
        if index:
            print_line(stdout, f"{plural(len(added), 'release')} added to the index")
            if added and not aliases:
                print_line(stdout, "no alias is set: `graft release promote ID` sets one")


def make(
    prompt: Annotated[
        bool,
        typer.Option(
            "--prompt",
            help="Release the prompted base instead: worked examples before each request, no adapter.",
        ),
    ] = False,
    model: Model = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Release a model: run the steps that are out of date, gate the adapter, move the alias.

    With --prompt nothing is trained: the base with worked examples is measured, gated and released.

    Example:  graft release make --model tagger
    """
    with reporting(project, model) as found:
        release = found.release_prompt() if prompt else found.release()
    print_record(release, as_json=json)


def collect(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Keep the newest N releases of each model.")
    ] = None,
    keep_days: Annotated[
        int | None, typer.Option("--keep-days", min=0, help="Keep releases younger than N days.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Remove the files of releases that are no longer needed.

    Releases stay if an alias points at them or can be rolled back to them, if a server uses them, if they are
    tagged `keep`, or if they are new or being written. The index keeps a record of what was removed.

    Example:  graft release gc --dry-run
    """
    from graftwork.registry.project import collect_garbage

    with opened_with_progress(project) as work:
        found = collect_garbage(work, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    print_record(found, as_json=json)


def edit(
    name: Annotated[
        str | None,
        typer.Argument(help="An alias, a version or an id. Only a key can be created without one."),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="Add a tag; `keep` protects a release from gc.")
    ] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", help="Remove a tag.")] = None,
    note: Annotated[
        str | None,
        typer.Option("--note", help="Add a note. `list --search` finds notes. They cannot be removed."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Replace the automatic version, for example by 2.0.0."),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="KEY",
            help="Sign with this minisign secret key. Its password is read from GRAFT_SIGNING_PASSWORD.",
        ),
    ] = None,
    new_key: Annotated[
        Path | None,
        typer.Option(
            "--new-key",
            metavar="FOLDER",
            help="Create graft.key, which has no password, and graft.pub in this folder, and sign the named "
            "release with them. Keep it outside the project.",
        ),
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Change what is written about a release: its tags, notes and version, and its signature.

    `minisign -V` verifies a signature; so does Graftwork if graft.yaml names the public key.

    Example:  graft release edit champion --tag keep --note "answers in French since the March logs"
    Example:  graft release edit 3f2a --sign ~/.minisign/minisign.key
    """
    from graftwork.registry.project import ReleaseEdit, edit_release
    from graftwork.registry.signatures import create_key_pair

    if not any((tag, untag, note is not None, version, sign, new_key)):
        raise typer.BadParameter("specify a change: --tag, --untag, --note, --version, --sign or --new-key")
    if note is not None and not note.strip():
        raise typer.BadParameter("the note is empty, and notes cannot be removed")
    if sign is not None and new_key is not None:
        raise typer.BadParameter("choose one of --sign and --new-key")
    if name is None:
        if new_key is None or any((tag, untag, note is not None, version)):
            raise typer.BadParameter("specify a release: without one only --new-key works")
        secret_key, public_key = create_key_pair(new_key)
        created = {"secret_key": str(secret_key), "public_key": public_key}
        print_json(created) if json else print_text(*_signature_lines(created))
        return
    changes = ReleaseEdit(
        version=version, tag=tag or (), untag=untag or (), note=note, secret_key=sign, new_key=new_key
    )
    with opened(project) as work:
        entry, notes, signed = edit_release(work, name, changes)
    if json:
        shown_release = entry.model_dump(mode="json", include={"id", "model", "version", "tags"})
        print_json(
            {**shown_release, "notes": [written.model_dump(mode="json") for written in notes], **signed}
        )
        return
    tags = ", ".join(entry.tags) or "no tags"
    edited = f"{entry.id[:12]}: version {entry.version}, {tags}, {plural(len(notes), 'note')}"
    print_text(edited, *_signature_lines(signed))


def _signature_lines(signed: dict[str, str]) -> list[str]:
    """The files of a key pair and a signature, and the line for graft.yaml with a new public key."""
    lines = [f"{what.replace('_', ' ')}: {value}" for what, value in signed.items()]
    if "public_key" in signed:
        lines += ["for graft.yaml:", "release:", f"  public_key: {signed['public_key']}"]
    return lines


def ab(
    a: First = None,
    b: Second = None,
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
    """Compare two releases with a sequential test: you may look at the result at any time.

    Exit codes: 0 decided, 12 not enough evidence yet.

    On live traffic, only exchanges assigned by `graft serve --challenger` count, once per session.

    `--traffic shadow` without releases compares the challenger of serve.shadow with what users got, by every
    check of the project. Exit code 1: a check is significantly worse.

    Example:  graft release ab champion challenger --metric feedback --watch
    Example:  graft release ab champion challenger --cases replay.jsonl --metric json_valid
    Example:  graft release ab --traffic shadow --json | jq '.checks[] | {check, low, high}'
    """
    from graftwork.evaluate.live.traffic import ABRequest, compare

    asked = ABRequest(
        a=a,
        b=b,
        traffic=traffic,
        cases=cases.absolute() if cases is not None else None,
        metric=metric,
        experiment=experiment,
        watch=watch,
        every_seconds=every,
    )
    with reporting(project, model) as opened_project, opened_project.open() as work:
        result = compare(work, asked)
    print_record(result, as_json=json)
    raise typer.Exit(result.exit_code)


app = typer.Typer(
    help="Manage releases: list, verify, promote, roll back, share, compare.", no_args_is_help=True
)


@app.callback()
def _begin() -> None:
    # These commands are short and mostly import code. Collecting garbage after every 700 allocations, as
    # Python does by default, takes five to ten per cent of a rollback.
    gc.set_threshold(50_000, 20, 50)


app.command("list")(list_)
app.command("show")(show_)
app.command("verify")(verify)
app.command("log")(log)
app.command("lineage")(lineage)
app.command("make")(make)
app.command("promote")(promote)
app.command("rollback")(rollback)
app.command("edit")(edit)
app.command("gc")(collect)
app.command("export")(export)
app.command("import")(import_)
app.command("push")(push)
app.command("pull")(pull)
app.command("deploy")(deploy)
app.command("ab")(ab)
