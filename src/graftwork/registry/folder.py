"""A release as a folder: written once, read-only, every byte accounted for by its manifest.

In: a manifest, the adapter's files and the texts beside them. Out: `<root>/<id>/`, whole or not at
all. The folder is a plain PEFT adapter, or a model's own weights where those were learned: PEFT, vLLM
and the Hugging Face Hub take it as it is.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.digest import require_digest
from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.records.errors import Damaged
from graftwork.records.release import Release
from graftwork.registry.adapter import learned_files, require_safetensors
from graftwork.registry.names import NAME, require_name
from graftwork.registry.release import name_by_content

MANIFEST = "manifest.json"
_READ_ONLY = 0o444


def release_folder(root: Path, release_id: str) -> Path:
    """Where a release lies. The id cannot lead out of `root`."""
    return root / require_name(release_id, kind="release id")


def write_release(root: Path, *, release: Release, adapter_folder: Path, texts: Mapping[str, str]) -> Release:
    """Make the folder, the manifest last, and check what was made.

    A release that is there already stays as it is; it is checked and its manifest comes back.
    """
    target = release_folder(root, release.id)
    if not target.exists():
        with folder_made_whole(target) as folder:
            for name in learned_files(adapter_folder):
                # A copy, not a link: nothing that is done to the run can reach the release.
                shutil.copyfile(adapter_folder / name, folder / name)
            for name, text in texts.items():
                write_whole(folder / name, text)
            write_whole(folder / MANIFEST, release.to_json())
            for path in folder.iterdir():
                path.chmod(_READ_ONLY)
    return verify_release(target)


def read_manifest(folder: Path) -> Release:
    """The manifest, proven to be the one that its id names; the other files are not looked at."""
    path = folder / MANIFEST
    try:
        release = Release.from_json(path.read_bytes())
    except FileNotFoundError as error:
        raise _damaged("there is no manifest", "it is written last, so this is no release", path) from error
    except ValidationError as error:
        raise _damaged("the manifest cannot be read", str(error).splitlines()[0], path) from error
    if release.id != name_by_content(release):
        raise _damaged("the manifest was changed", "its id is not the hash of its content", path)
    return release


def verify_release(folder: Path) -> Release:
    """Check every byte of the folder against its manifest, and that nothing was added."""
    release = read_manifest(folder)
    for file in release.files:
        if not NAME.fullmatch(file.path.lower()):
            raise _damaged(f"the manifest names {file.path!r}", "that is not a file of a release", folder)
        if (folder / file.path).is_symlink():
            raise _damaged(f"{file.path} is a link", "it could point anywhere", folder / file.path)
        require_digest(folder / file.path, file.sha256)
    named = {MANIFEST, *(file.path for file in release.files)}
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in named)
    if strangers:
        raise _damaged(f"{strangers[0]} does not belong here", "the manifest does not name it", folder)
    require_safetensors(folder / learned_files(folder)[1])
    return release


def _damaged(what: str, why: str, where: Path) -> Damaged:
    return Damaged(
        what, why=why, fix="restore the folder from a copy, or make the release again", where=str(where)
    )
