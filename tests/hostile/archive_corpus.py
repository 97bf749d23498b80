"""Hostile archives of releases, made from one good release.

`make_corpus(good)` yields a name and the bytes of each archive. Some are broken as tar files, some lie about
their manifest, and some are consistent down to the last hash but hold what no release may hold. None may be
imported, and none may leave anything behind.
"""

import gzip
import hashlib
import json
import random
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from graftwork.records.base import fingerprint

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NOT_IN_ID = ("id", "created_at")

Files = dict[str, bytes]


class Good:
    """A good release: its manifest as JSON and the bytes of its files."""

    def __init__(self, manifest: dict[str, Any], files: Files) -> None:
        self.manifest, self.files = manifest, files

    @property
    def id(self) -> str:
        return str(self.manifest["id"])

    def rehashed(self, files: Files | None = None, **changes: Any) -> "Good":
        """The same with other files or fields, and an id that fits them: consistent, whatever it holds."""
        files = self.files if files is None else files
        listed = [
            {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            for name, data in sorted(files.items())
        ]
        manifest = {**self.manifest, "files": listed, **changes}
        return Good({**manifest, "id": name_by_content(manifest)}, files)

    def archive(self) -> bytes:
        return self.archive_with(json.dumps(self.manifest).encode())

    def archive_with(self, manifest: bytes) -> bytes:
        """An archive with this text as its manifest."""
        return pack([(f"{self.id}/manifest.json", manifest), *self.members()])

    def members(self) -> list[tuple[str, bytes]]:
        return [(f"{self.id}/{name}", data) for name, data in sorted(self.files.items())]


def name_by_content(manifest: dict[str, Any]) -> str:
    return fingerprint({key: value for key, value in manifest.items() if key not in NOT_IN_ID})


def header(name: str, size: int, *, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname, member.mode = size, kind, link, 0o444
    return member.tobuf(tarfile.GNU_FORMAT)


def pack(members: list[tuple[str, bytes]], *, end: bytes = END) -> bytes:
    return b"".join(header(name, len(data)) + padded(data) for name, data in members) + end


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def patched(block: bytes, at: int, value: bytes, *, checksum: bool = True) -> bytes:
    """A header with some bytes replaced, and a checksum that fits unless it is not to."""
    raw = bytearray(block)
    raw[at : at + len(value)] = value
    if checksum:
        raw[148:156] = b" " * 8
        raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


def safetensors(head: bytes, body: bytes = b"") -> bytes:
    return len(head).to_bytes(8, "little") + head + body


def make_corpus(good: Good) -> Iterator[tuple[str, bytes]]:
    """Every hostile archive, with a name that says what is wrong with it."""
    for name, make in {**_CONTAINERS, **_MEMBERS, **_MANIFESTS, **_CONSISTENT}.items():
        yield name, make(good)
    dice = random.Random(13)
    whole = good.archive()
    for number in range(12):
        # Behind the end of the archive nothing is read; before it, every byte counts or is padding.
        at = dice.randrange(len(header("x", 0)) + len(json.dumps(good.manifest)))
        yield f"a flipped bit {number}", whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :]


def _with_member(name: str, data: bytes = b"more", **more: Any) -> Callable[[Good], bytes]:
    def make(good: Good) -> bytes:
        extra = header(name.format(id=good.id), len(data), **more) + padded(data)
        return good.archive()[: -len(END)] + extra + END

    return make


def _renamed(name: str) -> Callable[[Good], bytes]:
    """The last file of the release under another name."""

    def make(good: Good) -> bytes:
        manifest = (f"{good.id}/manifest.json", json.dumps(good.manifest).encode())
        *rest, (_, data) = good.members()
        return pack([manifest, *rest, (name.format(id=good.id), data)])

    return make


def _manifest_text(change: Callable[[Good], str | bytes]) -> Callable[[Good], bytes]:
    """An archive with this text as its manifest, the id in its paths unchanged."""

    def make(good: Good) -> bytes:
        text = change(good)
        return good.archive_with(text.encode() if isinstance(text, str) else text)

    return make


def _field(key: str, text: str) -> Callable[[Good], bytes]:
    """The manifest with the JSON text of one value replaced."""
    mark = "\u0001mark\u0001"

    def change(good: Good) -> str:
        return json.dumps({**good.manifest, key: mark}).replace(json.dumps(mark), text)

    return _manifest_text(change)


def _consistent(change: Callable[[Good], Good]) -> Callable[[Good], bytes]:
    return lambda good: change(good).archive()


def _files(**changes: bytes | None) -> Callable[[Good], bytes]:
    """Other files, named and hashed by the manifest as they are. None leaves one out."""

    def change(good: Good) -> Good:
        files = {**good.files, **{_FILES.get(key, key): data for key, data in changes.items()}}
        return good.rehashed({name: data for name, data in files.items() if data is not None})

    return _consistent(change)


def _named(name: str) -> Callable[[Good], bytes]:
    """A consistent release with one more file, which no release may have."""
    return _consistent(lambda good: good.rehashed({**good.files, name: b"more"}))


def _relisted(good: Good, *, twice: bool = False, **changes: Any) -> bytes:
    """The list of files changed, and an id that fits it."""
    *rest, last = good.rehashed().manifest["files"]
    manifest = {**good.manifest, "files": [*rest, {**last, **changes}, *([last] if twice else [])]}
    return Good({**manifest, "id": name_by_content(manifest)}, good.files).archive()


_FILES = {"weights": WEIGHTS, "config": CONFIG}

_CONTAINERS: dict[str, Callable[[Good], bytes]] = {
    "nothing": lambda _good: b"",
    "an end and nothing before it": lambda _good: END,
    "noise": lambda _good: random.Random(1).randbytes(4096),
    "a gzip bomb": lambda _good: gzip.compress(bytes(64 * 2**20)),
    "a compressed archive": lambda good: gzip.compress(good.archive()),
    "a zlib stream": lambda good: zlib.compress(good.archive()),
    "a zip": lambda _good: b"PK\x03\x04" + bytes(1024),
    "cut in the manifest": lambda good: good.archive()[: BLOCK + 10],
    "cut in a header": lambda good: good.archive()[: -len(END) - BLOCK - 7],
    "cut before the end": lambda good: good.archive()[: -len(END)],
    "a wrong checksum": lambda good: (
        patched(good.archive()[:BLOCK], 0, b"x", checksum=False) + good.archive()[BLOCK:]
    ),
    "a size of eight TiB": lambda good: (
        patched(good.archive()[:BLOCK], 124, b"\x80" + (8 * 2**40).to_bytes(11, "big"))
        + good.archive()[BLOCK:]
    ),
    "a negative size": lambda good: (
        patched(good.archive()[:BLOCK], 124, b"\xff" * 12) + good.archive()[BLOCK:]
    ),
    "a size that is not a number": lambda good: (
        patched(good.archive()[:BLOCK], 124, b"9z9z9z9z9z9\0") + good.archive()[BLOCK:]
    ),
    "a name that is not UTF-8": lambda good: (
        patched(good.archive()[:BLOCK], 0, b"\xff\xfe") + good.archive()[BLOCK:]
    ),
    "ten thousand empty files": lambda good: (
        good.archive()[: -len(END)] + header(f"{good.id}/x", 0) * 10_000 + END
    ),
}

_MEMBERS: dict[str, Callable[[Good], bytes]] = {
    "a path that leads up": _with_member("../../escaped"),
    "a path that leads up from the id": _with_member("{id}/../escaped"),
    "an absolute path": _with_member("/tmp/escaped"),
    "a path with a backslash": _with_member("{id}\\..\\escaped"),
    "a path with a NUL": _with_member("{id}/a\0b"),
    "a folder below the release": _with_member("{id}/x/y"),
    "a symbolic link": _with_member("{id}/more", b"", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "a hard link": _with_member("{id}/more", b"", kind=tarfile.LNKTYPE, link="/etc/passwd"),
    "a character device": _with_member("{id}/more", b"", kind=tarfile.CHRTYPE),
    "a block device": _with_member("{id}/more", b"", kind=tarfile.BLKTYPE),
    "a pipe": _with_member("{id}/more", b"", kind=tarfile.FIFOTYPE),
    "a folder": _with_member("{id}/more", b"", kind=tarfile.DIRTYPE),
    "a sparse file": _with_member("{id}/more", b"", kind=tarfile.GNUTYPE_SPARSE),
    "a long GNU name": _with_member("././@LongLink", b"x" * 5000, kind=tarfile.GNUTYPE_LONGNAME),
    "an extended header": _with_member("pax", b"20 path=../escaped\n", kind=tarfile.XHDTYPE),
    "a global extended header": _with_member("pax", b"20 path=../escaped\n", kind=tarfile.XGLTYPE),
    "an unknown type": _with_member("{id}/more", kind=b"Q"),
    "a file that the manifest does not name": _with_member("{id}/more"),
    "a file of another release": _with_member("0" * 64 + "/README.md"),
    "a second manifest": _with_member("{id}/manifest.json", b"{}"),
    "a signature twice": lambda good: (
        good.archive()[: -len(END)] + (header(f"{good.id}/manifest.json.minisig", 1) + padded(b"x")) * 2 + END
    ),
    "a signature of a MiB": _with_member("{id}/manifest.json.minisig", bytes(2**20)),
    "a file renamed to lead up": _renamed("../verdict.json"),
    "a file renamed to upper case": _renamed("{id}/VERDICT.JSON"),
    "a file of the release as a link": lambda good: (
        pack(
            [(f"{good.id}/manifest.json", json.dumps(good.manifest).encode()), *good.members()[:-1]], end=b""
        )
        + header(good.members()[-1][0], 0, kind=tarfile.SYMTYPE, link="README.md")
        + END
    ),
    "a missing file": lambda good: pack(
        [(f"{good.id}/manifest.json", json.dumps(good.manifest).encode()), *good.members()[:-1]]
    ),
    "the manifest last": lambda good: pack(
        [*good.members(), (f"{good.id}/manifest.json", json.dumps(good.manifest).encode())]
    ),
    "no manifest": lambda good: pack(good.members()),
    "other bytes of the same length": lambda good: pack(
        [
            (f"{good.id}/manifest.json", json.dumps(good.manifest).encode()),
            *((name, bytes(len(data))) for name, data in good.members()),
        ]
    ),
    "more bytes": lambda good: pack(
        [
            (f"{good.id}/manifest.json", json.dumps(good.manifest).encode()),
            *((name, data + b"x") for name, data in good.members()),
        ]
    ),
}

_MANIFESTS: dict[str, Callable[[Good], bytes]] = {
    "an empty manifest": _manifest_text(lambda _good: ""),
    "a manifest that is a list": _manifest_text(lambda _good: "[]"),
    "a manifest that is null": _manifest_text(lambda _good: "null"),
    "a manifest that is not UTF-8": _manifest_text(lambda _good: b'{"id": "\xff"}'),
    "a manifest nested 100,000 deep": _manifest_text(lambda _good: "[" * 100_000),
    "settings nested 100,000 deep": _field("settings", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "a manifest of 20 MiB": _manifest_text(lambda _good: b" " * (20 * 2**20)),
    "a changed verdict": _field("decision", '"abort"'),
    "a changed project": _field("project", '"another"'),
    "an unknown key": _manifest_text(lambda good: json.dumps({**good.manifest, "run": "rm -rf /"})),
    "an id that is no hash": _field("id", '".."'),
    "an infinite number in the settings": _field("settings", '{"a": 1e999}'),
    "a number of 5,000 digits": _field("settings", '{"a": ' + "9" * 5000 + "}"),
    "half a surrogate pair": _field("settings", r'{"a": "\ud800"}'),
    "a size that is infinite": _field("files", '[{"path": "a", "sha256": "b", "size": 1e999}]'),
    "a format of the future": _field("format", "99"),
}  # fmt: skip

_CONSISTENT: dict[str, Callable[[Good], bytes]] = {
    "weights that are a pickle": _files(weights=b"\x80\x04cos\nsystem\n(S'id'\ntR."),
    "weights that are empty": _files(weights=b""),
    "weights whose header is longer than the file": _files(weights=(2**40).to_bytes(8, "little") + b"{}"),
    "weights whose header is a list": _files(weights=safetensors(b"[]")),
    "weights whose header is nested 100,000 deep": _files(weights=safetensors(b'{"a":' + b"[" * 100_000)),
    "no weights": _files(weights=None),
    "no files": _consistent(lambda good: good.rehashed({})),
    "a name that leads up": _named("../escaped"),
    "a name that leads up below the release": _named("x/../../escaped"),
    "an absolute name": _named("/tmp/escaped"),
    "a hidden name": _named(".hidden"),
    "a name with a slash": _named("a/b"),
    "a name with a newline": _named("a\nb"),
    "a name that is empty": _named(""),
    "a name of 200 letters": _named("x" * 200),
    "a manifest that names itself": _named("manifest.json"),
    "a manifest that names its signature": _named("manifest.json.minisig"),
    "a name twice": lambda good: _relisted(good, twice=True),
    "a hash that is no hash": lambda good: _relisted(good, sha256="../../../../tmp/x"),
    "a size that is wrong": lambda good: _relisted(good, size=1),
    "a negative size in the manifest": lambda good: _relisted(good, size=-1),
    "a manifest of format 1": lambda good: good.rehashed(format=1).archive(),
}  # fmt: skip
