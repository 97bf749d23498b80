"""Whether a release is signed by the key that the project trusts.

In: the folder of a release and a public key. Out: nothing, or a refusal. The signature covers the manifest,
and the manifest's hashes cover every file. Signatures of sigstore are recognised, not verified.
"""

import os
from pathlib import Path
from typing import NamedTuple

from graftwork.files.disk import explain_os_error, write_atomic
from graftwork.records.errors import AnswerIsNo, Damaged, UserMistake
from graftwork.registry import minisign
from graftwork.registry.folder import MANIFEST, MINISIGN, SIGSTORE
from graftwork.registry.minisign import SecretKey

PASSWORD = "GRAFT_SIGNING_PASSWORD"


def require_signature(folder: Path, *, public_key: str) -> str:
    """Refuse a release that the key did not sign; else the comment that was signed with it."""
    key = minisign.read_public_key(public_key)
    path = folder / MINISIGN
    if not path.is_file():
        raise _unsigned(folder)
    found = minisign.read_signature(path.read_text(encoding="utf-8", errors="replace"), where=str(path))
    if found.number != key.number:
        raise AnswerIsNo(
            f"release {folder.name[:12]} is signed with another key",
            why=f"the signature names key {_show(found.number)}, graft.yaml trusts {_show(key.number)}",
            fix="sign it with the trusted key, import or pull a copy that is (its signature takes the place "
            "of this one), or change `release.public_key`",
            where=str(path),
        )
    if not minisign.holds(found, (folder / MANIFEST).read_bytes(), key=key):
        raise Damaged(
            f"the signature of release {folder.name[:12]} does not hold",
            why="the manifest or the signature was changed after signing",
            fix="import or pull the release again from where it was signed: a signature that holds takes the "
            "place of this one",
            where=str(path),
        )
    return found.trusted_comment


def is_signed_by(public_key: str, *, manifest: bytes, signature: bytes) -> bool:
    """Whether this key made this signature of this manifest; what cannot be read is not a signature."""
    try:
        found = minisign.read_signature(signature.decode(errors="replace"), where=MINISIGN)
    except UserMistake:
        return False
    return minisign.holds(found, manifest, key=minisign.read_public_key(public_key))


def sign_manifest(folder: Path, *, key: SecretKey, comment: str) -> bytes:
    """A signature of the manifest in this folder."""
    return minisign.sign((folder / MANIFEST).read_bytes(), key=key, trusted_comment=comment).encode()


def load_public_key(given: str, *, root: Path) -> str:
    """The key as text: `release.public_key` holds it, or names the file that does."""
    text = given.strip()
    if len(text) < 200 and "\n" not in text and (root / text).is_file():
        text = _read(root / text)
    minisign.read_public_key(text)
    return text


def load_secret_key(path: Path) -> SecretKey:
    password = os.environ.get(PASSWORD)
    return minisign.read_secret_key(_read(path), password=password, where=str(path))


class KeyPair(NamedTuple):
    """Where the two keys lie, and the public one as graft.yaml takes it."""

    secret: Path
    public: Path
    text: str


def write_keys(folder: Path) -> KeyPair:
    """Make a pair of keys. What is there already is not overwritten: it may be the only key to something."""
    secret_file, public_file = folder / "graft.key", folder / "graft.pub"
    secret = SecretKey(number=os.urandom(8), seed=os.urandom(32))
    public = minisign.write_public_key(minisign.public_of(secret))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UserMistake(
            "there is a key already", fix="name another folder, or use that key", where=str(secret_file)
        ) from error
    except OSError as error:
        raise explain_os_error(error, secret_file) from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(minisign.write_secret_key(secret))
    write_atomic(public_file, public)
    return KeyPair(secret_file, public_file, public.splitlines()[1])


def _unsigned(folder: Path) -> AnswerIsNo:
    if (folder / SIGSTORE).is_file():
        return AnswerIsNo(
            f"release {folder.name[:12]} has a sigstore signature only",
            why="`release.public_key` asks for one by minisign; sigstore bundles are kept, not verified here",
            fix="verify it with the sigstore command, then sign it: `graft release sign ID --key FILE`",
            where=str(folder / SIGSTORE),
        )
    return AnswerIsNo(
        f"release {folder.name[:12]} is not signed",
        why="graft.yaml names a `release.public_key`: only signed releases are promoted, loaded and served",
        fix=f"sign it: `graft release sign {folder.name[:12]} --key FILE`",
        where=str(folder / MINISIGN),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise explain_os_error(error, path) from error


def _show(number: bytes) -> str:
    return number[::-1].hex().upper()
