"""Minisign signatures of releases (https://jedisct1.github.io/minisign/), and the key a project trusts.

A signature covers the manifest, and the hashes in the manifest cover every file. Reads signatures of the file
(`Ed`) and of its BLAKE2b hash (`ED`); writes the second kind. Sigstore bundles are recognized, not verified.
"""

import base64
import binascii
import hashlib
import hmac
import os
from pathlib import Path
from typing import NamedTuple

from graftwork.files.disk import explain_os_error, write_atomic
from graftwork.records.errors import Corrupted, NegativeResult, UserError
from graftwork.registry.folder import MANIFEST, MINISIGN, SIGSTORE

_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "


class PublicKey(NamedTuple):
    number: bytes
    """Eight bytes that identify the key."""
    key: bytes


class SecretKey(NamedTuple):
    number: bytes
    seed: bytes


class Signature(NamedTuple):
    kind: bytes
    number: bytes
    of_message: bytes
    trusted_comment: str
    of_comment: bytes


def read_public_key(text: str, *, where: str = "release.public_key") -> PublicKey:
    """A public key as minisign prints it, with or without its comment line."""
    raw = _decode(_last_line(text), length=42, what="a minisign public key", where=where)
    if raw[:2] != b"Ed":
        raise _unreadable("a minisign public key", "it is not an Ed25519 key", where)
    return PublicKey(raw[2:10], raw[10:])


def read_signature(text: str, *, where: str) -> Signature:
    lines = text.splitlines()
    if len(lines) < 4 or not lines[0].startswith(_UNTRUSTED) or not lines[2].startswith(_TRUSTED):
        raise _unreadable("a minisign signature", "it does not have four lines", where)
    raw = _decode(lines[1], length=74, what="a minisign signature", where=where)
    of_comment = _decode(lines[3], length=64, what="a minisign signature", where=where)
    return Signature(raw[:2], raw[2:10], raw[10:], lines[2].removeprefix(_TRUSTED), of_comment)


def is_valid_signature(signature: Signature, message: bytes, *, key: PublicKey) -> bool:
    """Whether the key signed this message and the trusted comment."""
    signed = {b"Ed": message, b"ED": hashlib.blake2b(message).digest()}.get(signature.kind)
    if signed is None or signature.number != key.number:
        return False
    comment = signature.of_message + signature.trusted_comment.encode()
    return verify_ed25519(signed, signature=signature.of_message, public=key.key) and verify_ed25519(
        comment, signature=signature.of_comment, public=key.key
    )


def verify_ed25519(message: bytes, *, signature: bytes, public: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign_ed25519(message: bytes, *, seed: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed).sign(message)


def public_bytes(seed: bytes) -> bytes:
    """The Ed25519 public key of a secret seed of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(message: bytes, *, key: SecretKey, trusted_comment: str) -> str:
    """The text of a signature file. The trusted comment is signed as well."""
    comment = " ".join(trusted_comment.splitlines())
    of_message = sign_ed25519(hashlib.blake2b(message).digest(), seed=key.seed)
    of_comment = sign_ed25519(of_message + comment.encode(), seed=key.seed)
    first, second = _encode(b"ED" + key.number + of_message), _encode(of_comment)
    return f"{_UNTRUSTED}signature by graftwork\n{first}\n{_TRUSTED}{comment}\n{second}\n"


def public_of(key: SecretKey) -> PublicKey:
    return PublicKey(key.number, public_bytes(key.seed))


def write_public_key(key: PublicKey) -> str:
    key_id = key.number[::-1].hex().upper()
    return f"{_UNTRUSTED}minisign public key {key_id}\n{_encode(b'Ed' + key.number + key.key)}\n"


def write_secret_key(key: SecretKey) -> str:
    """Without a password, as `minisign -G -W` writes it."""
    secret = key.number + key.seed + public_of(key).key
    checksum = hashlib.blake2b(b"Ed" + secret, digest_size=32).digest()
    body = b"Ed" + b"\0\0" + b"B2" + bytes(32 + 8 + 8) + secret + checksum
    return f"{_UNTRUSTED}minisign secret key, not encrypted\n{_encode(body)}\n"


def read_secret_key(text: str, *, password: str | None, where: str) -> SecretKey:
    """A secret key, decrypted with the password if it has one."""
    raw = _decode(_last_line(text), length=158, what="a minisign secret key", where=where)
    kind, kdf, checksum_kind = raw[:2], raw[2:4], raw[4:6]
    if kind != b"Ed" or checksum_kind != b"B2" or kdf not in (b"\0\0", b"Sc"):
        raise _unreadable("a minisign secret key", "it is not an Ed25519 key with a BLAKE2b checksum", where)
    salt, operations, memory, body = raw[6:38], raw[38:46], raw[46:54], raw[54:]
    if kdf == b"Sc":
        if password is None:
            raise UserError(
                "the secret key has a password",
                fix="set the environment variable GRAFT_SIGNING_PASSWORD",
                where=where,
            )
        stream = _stretch(
            password, salt, *(int.from_bytes(raw_limit, "little") for raw_limit in (operations, memory))
        )
        body = bytes(a ^ b for a, b in zip(body, stream, strict=True))
    secret, checksum = body[:72], body[72:]
    digest = hashlib.blake2b(kind + secret, digest_size=32).digest()
    if kdf == b"\0\0" and checksum == bytes(32):
        # minisign 0.11 leaves the checksum of a key without a password empty: compare its two halves instead.
        whole = public_bytes(secret[8:40]) == secret[40:]
    else:
        whole = hmac.compare_digest(digest, checksum)
    if not whole:
        raise _unreadable("the secret key", "the password is wrong, or the file is damaged", where)
    return SecretKey(secret[:8], secret[8:40])


def _stretch(password: str, salt: bytes, operations: int, memory: int) -> bytes:
    """scrypt with the cost parameters that libsodium chooses for these limits."""
    operations = max(operations, 32768)
    r, p = 8, 1
    if operations < memory // 32:
        n = _power_up_to(operations // (r * 4))
    else:
        n = _power_up_to(memory // (r * 128))
        p = min(operations // 4 // n, 0x3FFFFFFF) // r or 1
    return hashlib.scrypt(
        password.encode(),
        salt=salt,
        n=n,
        r=r,
        p=p,
        maxmem=min(2**31 - 1, 128 * r * (n + p + 2) + 2**20),
        dklen=104,
    )


def _power_up_to(limit: int) -> int:
    """The first power of two over half the limit, as libsodium computes the cost."""
    exponent = 1
    while exponent < 63 and 1 << exponent <= limit // 2:
        exponent += 1
    return 1 << exponent


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    return lines[-1] if lines else ""


def _decode(text: str, *, length: int, what: str, where: str) -> bytes:
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(what, "it is not base64", where) from error
    if len(raw) != length:
        raise _unreadable(what, f"it has {len(raw)} bytes, not {length}", where)
    return raw


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _unreadable(what: str, why: str, where: str) -> UserError:
    return UserError(f"{what} cannot be read", why=why, fix="use the file as minisign wrote it", where=where)


PASSWORD = "GRAFT_SIGNING_PASSWORD"


def require_signature(folder: Path, *, public_key: str) -> str:
    """Return the signed comment; raise if the key did not sign the release."""
    key = read_public_key(public_key)
    path = folder / MINISIGN
    if not path.is_file():
        if (folder / SIGSTORE).is_file():
            raise NegativeResult(
                f"release {folder.name[:12]} has a sigstore signature only",
                why="`release.public_key` requires a minisign signature; sigstore bundles are not verified",
                fix="verify it with the sigstore command, then sign it: `graft release edit ID --sign FILE`",
                where=str(folder / SIGSTORE),
            )
        raise NegativeResult(
            f"release {folder.name[:12]} is not signed",
            why="graft.yaml sets `release.public_key`: only signed releases are promoted, loaded and served",
            fix=f"sign it: `graft release edit {folder.name[:12]} --sign FILE`",
            where=str(path),
        )
    signature = read_signature(path.read_text(encoding="utf-8", errors="replace"), where=str(path))
    if signature.number != key.number:
        raise NegativeResult(
            f"release {folder.name[:12]} is signed with a different key",
            why=f"it is signed with key {_show(signature.number)}; graft.yaml trusts {_show(key.number)}",
            fix="sign it with the trusted key, import or pull a copy that is signed with it (its signature "
            "replaces this one), or change `release.public_key`",
            where=str(path),
        )
    if not is_valid_signature(signature, (folder / MANIFEST).read_bytes(), key=key):
        raise Corrupted(
            f"the signature of release {folder.name[:12]} is not valid",
            why="the manifest or the signature was changed after signing",
            fix="import or pull the release again from where it was signed: that replaces this signature",
            where=str(path),
        )
    return signature.trusted_comment


def is_signed_by(public_key: str, *, manifest: bytes, signature: bytes) -> bool:
    """Whether this key made this signature of this manifest. An unreadable signature is not one."""
    try:
        parsed = read_signature(signature.decode(errors="replace"), where=MINISIGN)
    except UserError:
        return False
    return is_valid_signature(parsed, manifest, key=read_public_key(public_key))


def sign_manifest(folder: Path, *, key: SecretKey, comment: str) -> bytes:
    return sign((folder / MANIFEST).read_bytes(), key=key, trusted_comment=comment).encode()


def load_public_key(text_or_path: str, *, root: Path) -> str:
    """The key as text. `release.public_key` is the key itself or the name of a file that contains it."""
    text = text_or_path.strip()
    if len(text) < 200 and "\n" not in text and (root / text).is_file():
        text = _read(root / text)
    read_public_key(text)
    return text


def load_secret_key(path: Path) -> SecretKey:
    password = os.environ.get(PASSWORD)
    return read_secret_key(_read(path), password=password, where=str(path))


def create_key_pair(folder: Path) -> tuple[Path, str]:
    """Create a key pair: the file of the secret key, and the public key as text for graft.yaml. An existing
    key is never overwritten: it may be the only copy."""
    secret_file, public_file = folder / "graft.key", folder / "graft.pub"
    secret = SecretKey(number=os.urandom(8), seed=os.urandom(32))
    public = write_public_key(public_of(secret))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UserError(
            "a key already exists here", fix="choose another folder, or use that key", where=str(secret_file)
        ) from error
    except OSError as error:
        raise explain_os_error(error, secret_file) from error
    with os.fdopen(descriptor, "w") as handle:
        handle.write(write_secret_key(secret))
    write_atomic(public_file, public)
    return secret_file, public.splitlines()[1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise explain_os_error(error, path) from error


def _show(number: bytes) -> str:
    return number[::-1].hex().upper()
