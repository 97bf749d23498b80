"""A release as a read-only folder whose manifest names the hash of every file.

The folder is a plain PEFT adapter, or the weights of a model after full fine-tuning, so PEFT, vLLM and the
Hugging Face Hub can load it. Signatures of the manifest are stored next to it.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import create_file, explain_os_error, read_only_mode, sync_folder
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import PROMPT_FILE, Release
from graftwork.registry.blobs import (
    BLOBS,
    PART,
    ProgressCallback,
    ProgressCounter,
    digest_with_progress,
    no_progress,
)
from graftwork.registry.manifest import content_id
from graftwork.registry.names import FILE, require_name
from graftwork.registry.peft import find_weight_files, require_safetensors
from graftwork.registry.prompt_release import is_prompt, require_prompt

MANIFEST = "manifest.json"
MINISIGN = f"{MANIFEST}.minisig"
SIGSTORE = f"{MANIFEST}.sigstore.json"
SIGNATURES = (MINISIGN, SIGSTORE)
METADATA_FILES = frozenset({MANIFEST, *SIGNATURES})
"""Files that the manifest does not name: itself and its signatures."""


def write_metadata(root: Path, folder: Path, name: str, content: bytes) -> Path:
    """Write or replace the manifest or a signature atomically. Hold the shared lock of the store.

    The temporary file is in the root of the store, so a killed writer leaves nothing in the release.
    """
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
    """Add the signatures that the release does not have. Existing ones are kept."""
    for name in SIGNATURES:
        if name in signatures and not (folder / name).exists():
            write_metadata(root, folder, name, signatures[name])


def release_folder(root: Path, release_id: str) -> Path:
    """The folder of a release. The id cannot lead out of `root`."""
    if require_name(release_id, kind="release id") == BLOBS:
        raise UserMistake(f"{BLOBS!r} cannot be a release id", why="it is the store's own folder")
    return root / release_id


def read_manifest(folder: Path) -> Release:
    """The manifest, checked against its id. The other files are not checked."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if not folder.exists():
            raise Damaged(
                f"the files of release {folder.name[:12]} are not in this store",
                why="garbage collection removed them, or the release was made on another machine",
                fix="import them (`graft release import`), or make the release again (`graft run`)",
                where=str(folder),
            ) from error
        raise _damaged("there is no manifest", "it is written last: this is not a release", path) from error
    except OSError as error:
        raise explain_os_error(error, path) from error
    return parse_manifest(text, lambda what, why: _damaged(what, why, path))


Refusal = Callable[[str, str], Damaged]
"""The error of one place where releases are, from what is wrong and why."""


def parse_manifest(text: bytes, refuse: Refusal, *, named: str | None = None) -> Release:
    """The manifest, checked against its id, and against the one that it is `named` by."""
    try:
        release = Release.from_json(text)
    except ValidationError as error:
        raise refuse("the manifest cannot be read", str(error).splitlines()[0]) from error
    if release.id != content_id(release) or named not in (None, release.id):
        raise refuse("the manifest was changed", "its id is not the hash of its content")
    return release


def require_own_files(release: Release, refuse: Refusal) -> None:
    """Refuse a manifest that names a file which no release may have."""
    for file in release.files:
        if not FILE.fullmatch(file.path) or file.path in METADATA_FILES:
            raise refuse(f"the manifest names {file.path[:80]!r}", "that is not a file of a release")


def verify_release(folder: Path, *, progress: ProgressCallback = no_progress) -> Release:
    """Check every byte of the folder against its manifest, and that there are no other files."""
    release = read_manifest(folder)
    require_own_files(release, lambda what, why: _damaged(what, why, folder))
    counter = ProgressCounter(progress, "check", sum(file.size for file in release.files))
    for file in release.files:
        if (folder / file.path).is_symlink():
            raise _damaged(f"{file.path} is a link", "it could point anywhere", folder / file.path)
        _require_bytes(folder / file.path, file.sha256, counter)
    named = METADATA_FILES | {file.path for file in release.files}
    unexpected = sorted(path.name for path in folder.iterdir() if path.name not in named)
    if unexpected:
        raise _damaged(f"{unexpected[0]} does not belong here", "the manifest does not name it", folder)
    if is_prompt({file.path for file in release.files}):
        require_prompt(folder / PROMPT_FILE, where=folder)
    else:
        require_safetensors(folder / find_weight_files(folder)[1])
    return release


def _require_bytes(path: Path, sha256: str, counter: ProgressCounter) -> None:
    if not path.is_file():
        raise _damaged(f"{path.name} is missing", "its manifest names it", path)
    try:
        found = digest_with_progress(path, counter)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if found != sha256:
        why = f"expected sha256 {sha256[:12]}…, found {found[:12]}…"
        raise _damaged(f"{path.name} does not match its hash in the manifest", why, path)


def _damaged(what: str, why: str, where: Path) -> Damaged:
    return Damaged(
        what,
        why=why,
        fix="`graft release rollback` goes back one release. To repair it, move its folder away, "
        "then get a copy (`graft release pull` or `import`) or make it again (`graft run`)",
        where=str(where),
    )
