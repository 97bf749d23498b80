"""`graft release sign` and `keygen`: signatures in the format of minisign."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import Name, opened
from graftwork.cli.steps import Folder


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
    from graftwork.pipeline.release_store import open_store
    from graftwork.registry.promote import find_release
    from graftwork.registry.signature import load_secret_key, sign_manifest

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
    from graftwork.registry.signature import write_keys

    pair = write_keys(folder)
    if json:
        print_json(
            {"secret_key": str(pair.secret), "public_key": pair.text, "public_key_file": str(pair.public)}
        )
    else:
        stdout.print(f"secret key: {pair.secret}", highlight=False, soft_wrap=True)
        stdout.print(f"for graft.yaml:\nrelease:\n  public_key: {pair.text}", highlight=False, soft_wrap=True)
