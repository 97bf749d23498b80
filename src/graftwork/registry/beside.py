"""What lies beside a manifest and may come later: its signatures.

In: the folder of a release and the bytes of a signature. Out: the signature in its place, whole or not at
all. Until it is whole it lies in the store's own folder, never among the files of a release: whoever verifies
the release beside a signer, or after one that was killed, finds nothing strange in it. Does not know what a
signature proves.
"""

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from graftwork.files.disk import create_file, explain_os_error, read_only_mode, sync_folder
from graftwork.registry.blobs import PART

MANIFEST = "manifest.json"
MINISIGN = f"{MANIFEST}.minisig"
SIGSTORE = f"{MANIFEST}.sigstore.json"
SIGNATURES = (MINISIGN, SIGSTORE)
BESIDE = frozenset({MANIFEST, *SIGNATURES})
"""What the manifest does not name: itself, and the signatures of it."""
_HALF_SIGNED = re.compile(rf"\.({re.escape(MINISIGN)}|{re.escape(SIGSTORE)})\.[0-9a-f]{{8}}{re.escape(PART)}")


def put_beside(root: Path, folder: Path, name: str, content: bytes) -> Path:
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


def add_missing(root: Path, folder: Path, signatures: Mapping[str, bytes]) -> None:
    """Give a release the signatures that it does not have; those that it has stay."""
    for name in SIGNATURES:
        if name in signatures and not (folder / name).exists():
            put_beside(root, folder, name, signatures[name])


def is_half_signature(path: Path) -> bool:
    """Whether this is what a killed signer left among the files of a release, as signers once did."""
    return bool(_HALF_SIGNED.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def half_signatures(folders: Iterable[Path]) -> Iterator[Path]:
    """What killed signers left in these folders, for whoever holds the store alone."""
    for folder in folders:
        try:
            yield from sorted(path for path in folder.iterdir() if is_half_signature(path))
        except OSError:
            # Whatever keeps us from looking is said where the release itself is looked at.
            continue
