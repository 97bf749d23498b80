"""A release as a folder: read-only, every byte accounted for by its manifest.

In: the folder of a release. Out: its manifest, proven; or what is wrong with it. The folder is a plain PEFT
adapter, or a model's own weights where those were learned: PEFT, vLLM and the Hugging Face Hub take it as
it is. A signature may lie beside the manifest, which it signs.
"""

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import create_file, explain_os_error, read_only_mode, sync_folder
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import Release
from graftwork.registry.blobs import BLOBS, PART
from graftwork.registry.manifest import content_id
from graftwork.registry.names import FILE, require_name
from graftwork.registry.peft import find_weight_files, require_safetensors
from graftwork.registry.progress import ProgressCallback, ProgressCounter, digest_with_progress, no_progress

MANIFEST = "manifest.json"
MINISIGN = f"{MANIFEST}.minisig"
SIGSTORE = f"{MANIFEST}.sigstore.json"
SIGNATURES = (MINISIGN, SIGSTORE)
METADATA_FILES = frozenset({MANIFEST, *SIGNATURES})
"""What the manifest does not name: itself, and the signatures of it."""
_HALF_SIGNED = re.compile(rf"\.({re.escape(MINISIGN)}|{re.escape(SIGSTORE)})\.[0-9a-f]{{8}}{re.escape(PART)}")


def write_metadata(root: Path, folder: Path, name: str, content: bytes) -> Path:
    """Give a release a signature, in the place of one that it may have. Hold the store's `adding()`."""
    temporary = root / f".sign.{uuid.uuid4().hex[:8]}{PART}"
    target = folder / name
    try:
        with create_file(temporary) as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(read_only_mode(folder))
        temporary.replace(target)
        sync_folder(folder)
    except OSError as error:
        raise explain_os_error(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def add_missing_signatures(root: Path, folder: Path, signatures: Mapping[str, bytes]) -> None:
    """Give a release the signatures that it does not have; those that it has stay."""
    for name in SIGNATURES:
        if name in signatures and not (folder / name).exists():
            write_metadata(root, folder, name, signatures[name])


def is_partial_signature(path: Path) -> bool:
    """Whether this is what a killed signer left among the files of a release, as signers once did."""
    return bool(_HALF_SIGNED.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def find_partial_signatures(folders: Iterable[Path]) -> Iterator[Path]:
    """What killed signers left in these folders, for whoever holds the store alone."""
    for folder in folders:
        try:
            yield from sorted(path for path in folder.iterdir() if is_partial_signature(path))
        except OSError:
            # Whatever keeps us from looking is said where the release itself is looked at.
            continue


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
    if release.id != content_id(release):
        raise _damaged("the manifest was changed", "its id is not the hash of its content", path)
    return release


def verify_release(folder: Path, *, tell: ProgressCallback = no_progress) -> Release:
    """Check every byte of the folder against its manifest, and that nothing was added."""
    release = read_manifest(folder)
    count = ProgressCounter(tell, "check", sum(file.size for file in release.files))
    for file in release.files:
        if not FILE.fullmatch(file.path) or file.path in METADATA_FILES:
            raise _damaged(f"the manifest names {file.path!r}", "that is not a file of a release", folder)
        if (folder / file.path).is_symlink():
            raise _damaged(f"{file.path} is a link", "it could point anywhere", folder / file.path)
        _require_bytes(folder / file.path, file.sha256, count)
    named = METADATA_FILES | {file.path for file in release.files}
    strangers = sorted(
        path.name for path in folder.iterdir() if path.name not in named and not is_partial_signature(path)
    )
    if strangers:
        raise _damaged(f"{strangers[0]} does not belong here", "the manifest does not name it", folder)
    require_safetensors(folder / find_weight_files(folder)[1])
    return release


def release_files(folder: Path) -> list[Path]:
    """What belongs to a verified release, by name: not what a killed signer may have left there."""
    return sorted(path for path in folder.iterdir() if not is_partial_signature(path))


def _require_bytes(path: Path, sha256: str, count: ProgressCounter) -> None:
    if not path.is_file():
        raise _damaged(f"{path.name} is missing", "its manifest names it", path)
    try:
        found = digest_with_progress(path, count)
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
