"""A release as a folder: read-only, every byte accounted for by its manifest.

In: the folder of a release. Out: its manifest, proven; or what is wrong with it. The folder is a plain PEFT
adapter, or a model's own weights where those were learned: PEFT, vLLM and the Hugging Face Hub take it as
it is. A signature may lie beside the manifest, which it signs.
"""

from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import Release
from graftwork.registry.adapter import learned_files, require_safetensors
from graftwork.registry.beside import BESIDE, MANIFEST, MINISIGN, SIGSTORE, is_half_signature
from graftwork.registry.blobs import BLOBS
from graftwork.registry.counting import Count, Listener, counted_digest, nobody
from graftwork.registry.names import FILE, require_name
from graftwork.registry.release import name_by_content

__all__ = [
    "BESIDE",
    "MANIFEST",
    "MINISIGN",
    "SIGSTORE",
    "files_of",
    "read_manifest",
    "release_folder",
    "verify_release",
]


def release_folder(root: Path, release_id: str) -> Path:
    """Where a release lies. The id cannot lead out of `root`."""
    if require_name(release_id, kind="release id") == BLOBS:
        raise UserMistake(f"{BLOBS!r} cannot be a release id", why="it is the store's own folder")
    return root / release_id


def read_manifest(folder: Path) -> Release:
    """The manifest, proven to be the one that its id names; the other files are not looked at."""
    path = folder / MANIFEST
    try:
        release = Release.from_json(path.read_bytes())
    except FileNotFoundError as error:
        if not folder.exists():
            raise _not_here(folder) from error
        raise _damaged("there is no manifest", "it is written last, so this is no release", path) from error
    except ValidationError as error:
        raise _damaged("the manifest cannot be read", str(error).splitlines()[0], path) from error
    except OSError as error:
        raise explain_os_error(error, path) from error
    if release.id != name_by_content(release):
        raise _damaged("the manifest was changed", "its id is not the hash of its content", path)
    return release


def verify_release(folder: Path, *, tell: Listener = nobody) -> Release:
    """Check every byte of the folder against its manifest, and that nothing was added."""
    release = read_manifest(folder)
    count = Count(tell, "check", sum(file.size for file in release.files))
    for file in release.files:
        if not FILE.fullmatch(file.path) or file.path in BESIDE:
            raise _damaged(f"the manifest names {file.path!r}", "that is not a file of a release", folder)
        if (folder / file.path).is_symlink():
            raise _damaged(f"{file.path} is a link", "it could point anywhere", folder / file.path)
        _require_bytes(folder / file.path, file.sha256, count)
    named = BESIDE | {file.path for file in release.files}
    strangers = sorted(
        path.name for path in folder.iterdir() if path.name not in named and not is_half_signature(path)
    )
    if strangers:
        raise _damaged(f"{strangers[0]} does not belong here", "the manifest does not name it", folder)
    require_safetensors(folder / learned_files(folder)[1])
    return release


def files_of(folder: Path) -> list[Path]:
    """What belongs to a verified release, by name: not what a killed signer may have left there."""
    return sorted(path for path in folder.iterdir() if not is_half_signature(path))


def _require_bytes(path: Path, sha256: str, count: Count) -> None:
    if not path.is_file():
        raise _damaged(f"{path.name} is missing", "its manifest names it", path)
    try:
        found = counted_digest(path, count)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if found != sha256:
        why = f"expected sha256 {sha256[:12]}…, found {found[:12]}…"
        raise _damaged(f"{path.name} has other bytes than its manifest says", why, path)


def _not_here(folder: Path) -> Damaged:
    return Damaged(
        f"the files of release {folder.name[:12]} are not in this store",
        why="they were collected as garbage, or the release was made on another machine",
        fix="bring them here (`graft release import`), or make the release again (`graft run`)",
        where=str(folder),
    )


def _damaged(what: str, why: str, where: Path) -> Damaged:
    return Damaged(
        what,
        why=why,
        fix="`graft release rollback` leaves it. To mend it, move its folder away, then bring it back from a "
        "copy (`graft release pull` or `import`) or make it again (`graft run`)",
        where=str(where),
    )
