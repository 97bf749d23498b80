"""`graft release push` and `pull`: to a URL, the Hub, the machine that serves, trackers; and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder, Model, Name, opened, opened_aloud
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.pipeline.open_project import OpenProject
    from graftwork.pipeline.release_transfer import ImportedRelease

ToUrl = Annotated[
    str | None,
    typer.Option("--to", help="An fsspec URL such as s3://bucket/folder; release.store by default."),
]
FromUrl = Annotated[
    str | None,
    typer.Option("--from", help="An fsspec URL such as s3://bucket/folder; release.store by default."),
]
ToHub = Annotated[str | None, typer.Option("--hub", help="A repository on the Hugging Face Hub: OWNER/NAME.")]
FromHub = Annotated[
    str | None,
    typer.Option("--hub", help="A repository on the Hub, with a revision or without: OWNER/NAME@TAG."),
]
ToMachine = Annotated[
    str | None, typer.Option("--ssh", help="A folder on the machine that serves: [user@]host:/folder.")
]
ToMlflow = Annotated[
    str | None,
    typer.Option("--mlflow", help="The name of a registered model in MLflow (MLFLOW_TRACKING_URI)."),
]
ToTrackio = Annotated[str | None, typer.Option("--trackio", help="A project of trackio.")]
Alias = Annotated[
    str | None,
    typer.Option("--alias", help="With --ssh: the alias to move there, once the hashes hold there."),
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
    """Send a release somewhere else. Checked before it leaves and after it has arrived.

    What is there already is not sent again. Over SSH, the alias moves there last, and only to what it points
    at here.

    Example:  graft release push champion --ssh gpu1:/srv/releases --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.records.errors import UserMistake

    ways = (to, hub, ssh, mlflow, trackio)
    if sum(way is not None for way in ways) > 1 or (alias is not None and ssh is None):
        raise UserMistake(
            "these options do not go together",
            why="a push goes to one place, and only a machine has aliases",
            fix="give one of --to, --hub, --ssh, --mlflow and --trackio; --alias goes with --ssh",
        )
    with opened_aloud(project) as work:
        if mlflow is not None or trackio is not None:
            told, words = _track(work, name, mlflow=mlflow, trackio=trackio)
        else:
            told, words = _send(work, name, to=to, hub=hub, ssh=ssh, alias=alias)
    print_json(told) if json else stdout.print(words, highlight=False, markup=False, soft_wrap=True)


def pull(
    name: Annotated[str | None, typer.Argument(help="The id of a release there, or its beginning.")] = None,
    from_: FromUrl = None,
    hub: FromHub = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Fetch a release from somewhere else into this project's store. Every byte is checked.

    Example:  graft release pull 3f2a --from s3://bucket/releases
    """
    from graftwork.cli.output import print_json, stdout

    with opened_aloud(project) as work:
        done = _fetch(work, name, url=from_, hub=hub)
    release = done.release
    if json:
        print_json({"id": release.id, "version": done.version, "new": done.new, "decision": release.decision})
    else:
        words = "is here now" if done.new else "was here already"
        stdout.print(
            f"{release.id[:12]} {words}: {release.model} {done.version or ''}, {release.decision}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _send(
    work: "OpenProject", name: str, *, to: str | None, hub: str | None, ssh: str | None, alias: str | None
) -> tuple[dict[str, Any], str]:
    """What was done, for machines and for people."""
    from graftwork.pipeline import release_transfer

    told: dict[str, Any]
    if hub is not None:
        on_hub = release_transfer.push_to_hub(work, name, repository=hub)
        told = {"id": on_hub.release.id, "hub": hub, "commit": on_hub.commit, "tag": on_hub.tag}
        return told, f"{on_hub.release.id[:12]} is at {hub}, commit {on_hub.commit[:12]}, tag {on_hub.tag}"
    if ssh is not None:
        there = release_transfer.push_to_machine(work, name, target=ssh, alias=alias)
        told = {"id": there.release.id, "ssh": ssh, "sent": there.sent, "alias": there.alias}
        words = f"{there.release.id[:12]} {'went' if there.sent else 'was there already'}: {ssh}"
        moved = f"; {there.alias} points at it there" if there.alias else ""
        return {**told, "previous": there.previous}, words + moved
    pushed = release_transfer.push_to_url(work, name, url=to)
    told = {"id": pushed.release.id, "sent": list(pushed.sent), "bytes": pushed.bytes}
    count, total = len(pushed.sent), len(pushed.release.files)
    return told, f"{pushed.release.id[:12]}: {count} of {total} files sent ({pushed.bytes:,} bytes)"


def _track(
    work: "OpenProject", name: str, *, mlflow: str | None, trackio: str | None
) -> tuple[dict[str, Any], str]:
    from graftwork.pipeline import release_transfer

    if mlflow is not None:
        entered = release_transfer.push_to_mlflow_registry(work, name, registered=mlflow)
        words = f"{mlflow} version {entered.version} in MLflow" + ("" if entered.new else ", as before")
        return {"mlflow": mlflow, "version": entered.version, "new": entered.new}, words
    assert trackio is not None
    run = release_transfer.push_to_trackio_project(work, name, project=trackio)
    told = {"trackio": trackio, "run": run.run, "artifact": run.artifact}
    return told, f"{run.artifact} in trackio project {trackio}, run {run.run}"


def _fetch(work: "OpenProject", name: str | None, *, url: str | None, hub: str | None) -> "ImportedRelease":
    from graftwork.pipeline import release_transfer
    from graftwork.records.errors import UserMistake

    if hub is not None and url is None and name is None:
        return release_transfer.pull_from_hub(work, hub)
    if hub is None and name is not None:
        return release_transfer.pull_from_url(work, name, url=url)
    raise UserMistake(
        "it is not clear which release is meant",
        why="at a URL a release goes by its id; on the Hub by repository and revision",
        fix="`graft release pull ID --from URL`, or `graft release pull --hub OWNER/NAME@TAG`",
    )


Target = Annotated[
    Path | None,
    typer.Option("--to", help="The tar file, or a folder for it; PROJECT-ID.tar in the project by default."),
]

BaseTarget = Annotated[
    Path | None,
    typer.Option("--base", help="Also write the exact base weights into this new folder, for transformers."),
]


def export(
    name: Name = "champion",
    to: Target = None,
    base: BaseTarget = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write a release as a tar file: the same bytes for the same release, every time.

    Every byte is checked first, and again where it is imported. `--base` writes the weights that the adapter
    was trained and evaluated on, which for the embedded base are not the official ones.

    Example:  graft release export champion --to champion.tar --base champion-base
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import export_base, export_release

    with opened_aloud(project) as work:
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


Source = Annotated[
    Path, typer.Argument(help="A tar file that `graft release export` wrote, or a PEFT folder.")
]


def import_(source: Source, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Bring a release in. Every byte is checked; what is not a plain file of a release is refused.

    A PEFT folder (safetensors only) becomes a release that nobody has judged: not enough evidence.

    Example:  graft release import champion.tar
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import import_release

    with opened_aloud(project, model) as work:
        done = import_release(work, source)
    if json:
        body = {"id": done.release.id, "version": done.version, "new": done.new}
        print_json({**body, "decision": done.release.decision, "remarks": list(done.remarks)})
        return
    words = "is here now" if done.new else "was here already"
    lines = [
        f"{done.release.id[:12]} {words}: {done.release.model} {done.version or ''}, {done.release.decision}"
    ]
    stdout.print("\n".join((*lines, *done.remarks)), highlight=False, markup=False, soft_wrap=True)


def sign(
    name: Name,
    key: Annotated[
        Path, typer.Option("--key", help="A minisign secret key; its password in GRAFT_SIGNING_PASSWORD.")
    ],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Sign a release. `minisign -V` verifies it, and so does Graftwork where graft.yaml names the key.

    Example:  graft release sign 3f2a --key ~/.minisign/minisign.key
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.open_project import timestamp
    from graftwork.pipeline.releases import open_store
    from graftwork.registry.aliases import find_release
    from graftwork.registry.signatures import load_secret_key, sign_manifest

    secret = load_secret_key(key)
    with opened(project) as work:
        release = find_release(work.releases, name)
        store = open_store(work)
        comment = f"release:{release.id} time:{timestamp()}"
        path = store.sign(release.id, sign_manifest(store.folder(release.id), key=secret, comment=comment))
    if json:
        print_json({"id": release.id, "signature": str(path)})
    else:
        stdout.print(f"{release.id[:12]}: signed, in {path}", highlight=False, soft_wrap=True)


def keygen(
    folder: Annotated[
        Path, typer.Argument(help="Where graft.key and graft.pub go; keep it out of the project.")
    ],
    json: Json = False,
) -> None:
    """Make a key pair for signing releases. The secret one has no password: guard the file.

    Example:  graft release keygen ~/.graft-keys
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.registry.signatures import create_key_pair

    pair = create_key_pair(folder)
    if json:
        print_json(
            {"secret_key": str(pair.secret), "public_key": pair.text, "public_key_file": str(pair.public)}
        )
    else:
        stdout.print(f"secret key: {pair.secret}", highlight=False, soft_wrap=True)
        stdout.print(f"for graft.yaml:\nrelease:\n  public_key: {pair.text}", highlight=False, soft_wrap=True)
