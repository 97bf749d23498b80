"""File systems behind a URL: the one place that opens fsspec.

Input: a URL such as s3://bucket/folder, file:///mnt/backup or memory://name. Output: the file system and the
path in it, or an error without the login that the URL may hold; `RemoteFiles` reads and writes below it. What
its network library raises is translated by those who know what the files are.
"""

from pathlib import Path
from typing import Any

from graftwork.records.base import hide_login
from graftwork.records.errors import EnvironmentFailure, UserError, needs_extra, pip_install
from graftwork.text.redact import redact_login

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"})
"""Protocols whose first name is a bucket, which must exist, and which need no folders."""


def open_url(url: str, *, kind: str, setting: str) -> tuple[Any, str]:
    """Open the file system of a `kind` (mirror, store) that the `setting` of graft.yaml names."""
    with needs_extra("mirror", why=f"`{setting}` is a URL"):
        from fsspec.core import url_to_fs
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise EnvironmentFailure(
            f"a package for this kind of {kind} is not installed: {redact_login(error, url)}",
            fix=f"install it: {pip_install('s3')} for s3://, gcsfs for gs://",
            where=hide_login(url),
        ) from error
    except Exception as error:  # whatever a network library may raise
        raise UserError(
            f"the address of the {kind} cannot be used: {redact_login(error, url)}",
            fix="write it like s3://bucket/folder or file:///mnt/backup",
            where=setting,
        ) from error
    return files, str(root)


class RemoteFiles:
    """The files below one URL, by their names relative to it."""

    def __init__(self, url: str, *, kind: str, setting: str, folder: str = "") -> None:
        self.system, root = open_url(url, kind=kind, setting=setting)
        self.root = f"{root.rstrip('/')}/{folder}".rstrip("/")
        protocols = self.system.protocol
        self.has_buckets = bool(
            BUCKETS.intersection({protocols} if isinstance(protocols, str) else protocols)
        )

    def path(self, name: str) -> str:
        """The name of a file as its file system knows it."""
        return f"{self.root}/{name}"

    def size(self, name: str) -> int | None:
        """The bytes of a file as they are now; None if there is no such file."""
        self.system.invalidate_cache()
        try:
            return int(self.system.info(self.path(name))["size"])
        except FileNotFoundError:
            return None

    def put(self, source: Path, name: str, **options: Any) -> None:
        self.system.put_file(str(source), self._prepared(name), **options)

    def write(self, name: str, content: bytes) -> None:
        self.system.pipe_file(self._prepared(name), content)

    def read(self, name: str) -> bytes:
        return bytes(self.system.cat_file(self.path(name)))

    def has_bucket(self) -> bool:
        """Whether the bucket exists, where the protocol has any."""
        bucket = self.root.partition("/")[0]
        return not self.has_buckets or bool(bucket and self.system.exists(bucket))

    def _prepared(self, name: str) -> str:
        path = self.path(name)
        if not self.has_buckets:
            self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path
