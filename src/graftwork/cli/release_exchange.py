"""`graft release push`, `pull`, `deploy`, `export` and `import`: releases outside the project."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder, Model, Name, opened_with_progress, print_record, reporting
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.pipeline.open_project import OpenProject
    from graftwork.pipeline.release_transfer import ImportedRelease

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
ToTrackio = Annotated[str | None, typer.Option("--trackio", help="A trackio project.")]
Alias = Annotated[
    str | None,
    typer.Option("--alias", help="With --ssh: the alias to move there after the hashes are verified."),
]


def push(
    name: Name = "champion",
    to: ToUrl = None,
    hub: ToHub = None,
    ssh: ToMachine = None,
    mlflow: ToMlflow = None,
    trackio: ToTrackio = None,
    alias: Alias = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Push a release to another place. Every byte is verified before and after the transfer.

    Files that are already there are not sent again. Over SSH the alias moves last, and only to the release
    that it points at here.

    Example:  graft release push champion --ssh gpu1:/srv/releases --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.records.errors import UserMistake

    ways = (to, hub, ssh, mlflow, trackio)
    if sum(way is not None for way in ways) > 1 or (alias is not None and ssh is None):
        raise UserMistake(
            "these options cannot be combined",
            why="a push has one destination, and only a machine has aliases",
            fix="use one of --to, --hub, --ssh, --mlflow and --trackio; --alias requires --ssh",
        )
    with opened_with_progress(project) as work:
        if mlflow is not None or trackio is not None:
            body, text = _track(work, name, mlflow=mlflow, trackio=trackio)
        else:
            body, text = _send(work, name, to=to, hub=hub, ssh=ssh, alias=alias)
    print_json(body) if json else stdout.print(text, highlight=False, markup=False, soft_wrap=True)


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
    from graftwork.cli.output import print_json, stdout

    with opened_with_progress(project) as work:
        done = _fetch(work, name, url=from_, hub=hub)
    release = done.release
    if json:
        print_json({"id": release.id, "version": done.version, "new": done.new, "decision": release.decision})
    else:
        state = "imported" if done.new else "already here"
        stdout.print(
            f"{release.id[:12]} {state}: {release.model} {done.version or ''}, {release.decision}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


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
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.deploy import HERE
    from graftwork.pipeline.deploy import deploy as put_into_service
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

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
                f"was taken back; {done.alias} is as before"
                if done.taken_back
                else f"failed and is still {done.alias}: there was no other release to go back to"
            )
        why = f": {done.why}" if done.why else f", {done.asked} requests answered"
        text = f"{done.release[:12]} {moved} at {done.to}{why}"
        stdout.print(text, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if done.ok else EXIT_ANSWER_IS_NO)


def _read_questions(source: str | None) -> list[list[dict[str, str]]]:
    import json
    import sys

    from graftwork.records.errors import UserMistake

    if source is None:
        return []
    try:
        found = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
        return [[{str(k): str(v) for k, v in turn.items()} for turn in question] for question in found]
    except (ValueError, AttributeError, TypeError) as error:
        raise UserMistake(
            "the questions cannot be read",
            why=str(error),
            fix='write a list of questions, each a list of messages: [[{"role": "user", "content": "…"}]]',
            where="--questions",
        ) from error


def _send(
    work: "OpenProject", name: str, *, to: str | None, hub: str | None, ssh: str | None, alias: str | None
) -> tuple[dict[str, Any], str]:
    """What was done: as JSON and as text."""
    from graftwork.pipeline import release_transfer

    body: dict[str, Any]
    if hub is not None:
        on_hub = release_transfer.push_to_hub(work, name, repository=hub)
        body = {"id": on_hub.release.id, "hub": hub, "commit": on_hub.commit, "tag": on_hub.tag}
        return body, f"{on_hub.release.id[:12]} is at {hub}, commit {on_hub.commit[:12]}, tag {on_hub.tag}"
    if ssh is not None:
        there = release_transfer.push_to_machine(work, name, target=ssh, alias=alias)
        body = {"id": there.release.id, "ssh": ssh, "sent": there.sent, "alias": there.alias}
        text = f"{there.release.id[:12]} {'sent' if there.sent else 'already there'}: {ssh}"
        moved = f"; {there.alias} points at it there" if there.alias else ""
        return {**body, "previous": there.previous}, text + moved
    pushed = release_transfer.push_to_url(work, name, url=to)
    body = {"id": pushed.release.id, "sent": list(pushed.sent), "bytes": pushed.bytes}
    count, total = len(pushed.sent), len(pushed.release.files)
    return body, f"{pushed.release.id[:12]}: {count} of {total} files sent ({pushed.bytes:,} bytes)"


def _track(
    work: "OpenProject", name: str, *, mlflow: str | None, trackio: str | None
) -> tuple[dict[str, Any], str]:
    from graftwork.pipeline import release_transfer

    if mlflow is not None:
        entered = release_transfer.push_to_mlflow_registry(work, name, registered=mlflow)
        text = f"{mlflow} version {entered.version} in MLflow" + ("" if entered.new else ", unchanged")
        return {"mlflow": mlflow, "version": entered.version, "new": entered.new}, text
    assert trackio is not None
    run = release_transfer.push_to_trackio_project(work, name, project=trackio)
    body = {"trackio": trackio, "run": run.run, "artifact": run.artifact}
    return body, f"{run.artifact} in trackio project {trackio}, run {run.run}"


def _fetch(work: "OpenProject", name: str | None, *, url: str | None, hub: str | None) -> "ImportedRelease":
    from graftwork.pipeline import release_transfer
    from graftwork.records.errors import UserMistake

    if hub is not None and url is None and name is None:
        return release_transfer.pull_from_hub(work, hub)
    if hub is None and name is not None:
        return release_transfer.pull_from_url(work, name, url=url)
    raise UserMistake(
        "the release is ambiguous",
        why="a release at a URL is named by its id, on the Hub by repository and revision",
        fix="`graft release pull ID --from URL`, or `graft release pull --hub OWNER/NAME@TAG`",
    )


Target = Annotated[
    Path | None,
    typer.Option("--to", help="The tar file, or a folder for it. Default: PROJECT-ID.tar in the project."),
]

BaseTarget = Annotated[
    Path | None,
    typer.Option("--base", help="Also write the exact base weights into this new folder, for transformers."),
]


class ReleaseFormat(StrEnum):
    """As what a release can be exported."""

    tar = "tar"
    ollama = "ollama"
    vllm = "vllm"
    merged = "merged"
    gguf = "gguf"
    adapter = "adapter"


OF_RUNS = (ReleaseFormat.merged, ReleaseFormat.gguf, ReleaseFormat.adapter)


Format = Annotated[
    ReleaseFormat,
    typer.Option(
        help="tar: the release itself. ollama: a merged GGUF file with a Modelfile. vllm: a folder with "
        "base, adapter and command line. Of a run: merged (base and adapter as one transformers folder, "
        "checked to give the same output), gguf (the merged model, converted by llama.cpp) or adapter (the "
        "PEFT folder).",
    ),
]
Precision = Annotated[
    str, typer.Option(help="With --format ollama: f32, f16, bf16, q8_0, q5_1 or q4_1.", metavar="TYPE")
]


def export(
    name: Annotated[
        str,
        typer.Argument(help="An alias, a version, an id; `run` for the last run of the model, or run:ID."),
    ] = "champion",
    to: Target = None,
    base: BaseTarget = None,
    format: Format = ReleaseFormat.tar,
    precision: Precision = "q8_0",
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
    if of_run != (format in OF_RUNS):
        raise typer.BadParameter(
            "merged, gguf and adapter are formats of a run (`run` or run:ID) and only of it"
        )
    if format is not ReleaseFormat.tar:
        if base is not None or to is None:
            raise typer.BadParameter(
                f"--format {format.value} needs --to FOLDER, and cannot be combined with --base"
            )
        if of_run:
            _export_run(name, to, format, project=project, model=model, as_json=json)
        else:
            _export_for_program(name, to, format, precision, project=project, as_json=json)
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import export_base, export_release

    with opened_with_progress(project) as work:
        done = export_release(work, name, target=to)
        size = None if base is None else export_base(work, name, target=base)
    if json:
        written = {"id": done.release.id, "file": str(done.path), "sha256": done.sha256, "bytes": done.bytes}
        print_json(written if size is None else {**written, "base": str(base), "base_bytes": size})
    else:
        stdout.print(
            f"{done.release.id[:12]} is in {done.path} ({done.bytes:,} bytes)\nsha256 {done.sha256}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if size is not None:
            stdout.print(
                f"its base is in {base} ({size:,} bytes)", highlight=False, markup=False, soft_wrap=True
            )


def _export_run(
    name: str, to: Path, format: ReleaseFormat, *, project: Path | None, model: str | None, as_json: bool
) -> None:
    from typing import get_args

    from graftwork.pipeline.export import export_run
    from graftwork.records.release import ExportFormat

    chosen = next(known for known in get_args(ExportFormat) if known == format)
    with reporting(project, model) as found, found.open() as work:
        exported = export_run(work, run=name.partition(":")[2] or None, to=to.absolute(), format=chosen)
    print_record(exported, as_json=as_json)


def _export_for_program(
    name: str, to: Path, format: ReleaseFormat, precision: str, *, project: Path | None, as_json: bool
) -> None:
    from typing import get_args

    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_formats import export_for_program
    from graftwork.records.release import GgufPrecision

    chosen = next((known for known in get_args(GgufPrecision) if known == precision), None)
    if chosen is None:
        raise typer.BadParameter(f"--precision takes one of {', '.join(get_args(GgufPrecision))}")
    with opened_with_progress(project) as work:
        done = export_for_program(
            work, name, format="ollama" if format is ReleaseFormat.ollama else "vllm", to=to, precision=chosen
        )
    if as_json:
        print_json(done)
        return
    text = [
        f"{done.release_id[:12]} is in {done.folder}",
        done.command,
        *(f"! {note}" for note in done.notes),
    ]
    stdout.print("\n".join(text), highlight=False, markup=False, soft_wrap=True)


Source = Annotated[
    Path, typer.Argument(help="A tar file written by `graft release export`, or a PEFT folder.")
]


def import_(source: Source, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Import a release. Every byte is verified; anything but a plain release file is refused.

    A PEFT folder (safetensors only) becomes a release with the verdict "not enough evidence".

    Example:  graft release import champion.tar
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import import_release

    with opened_with_progress(project, model) as work:
        done = import_release(work, source)
    if json:
        body = {"id": done.release.id, "version": done.version, "new": done.new}
        print_json({**body, "decision": done.release.decision, "remarks": list(done.remarks)})
        return
    state = "imported" if done.new else "already here"
    lines = [
        f"{done.release.id[:12]} {state}: {done.release.model} {done.version or ''}, {done.release.decision}"
    ]
    stdout.print("\n".join((*lines, *done.remarks)), highlight=False, markup=False, soft_wrap=True)
