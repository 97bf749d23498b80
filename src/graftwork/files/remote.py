"""File systems behind a URL: the one place that opens fsspec.

In: a URL such as s3://bucket/folder, file:///mnt/backup or memory://name. Out: the file system and the path
in it, or an error without the login that the URL may hold. Reads and writes nothing.
"""

from typing import Any

from graftwork.records.base import hide_login
from graftwork.records.errors import EnvironmentLacks, UserMistake, needs_extra, pip_install
from graftwork.text.messages import redact_login

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"})
"""Protocols whose first name is a bucket, which must exist, and which need no folders."""


def open_url(url: str, *, kind: str, setting: str) -> tuple[Any, str]:
    """Open the file system of a `kind` (mirror, store) that the `setting` of graft.yaml names."""
    with needs_extra("mirror", why=f"`{setting}` is a URL"):
        from fsspec.core import url_to_fs
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise EnvironmentLacks(
            f"a package for this kind of {kind} is not installed: {redact_login(error, url)}",
            fix=f"install it: {pip_install('s3')} for s3://, gcsfs for gs://",
            where=hide_login(url),
        ) from error
    except Exception as error:  # whatever a network library may raise
        raise UserMistake(
            f"the address of the {kind} cannot be used: {redact_login(error, url)}",
            fix="write it like s3://bucket/folder or file:///mnt/backup",
            where=setting,
        ) from error
    return files, str(root)


def has_buckets(files: Any) -> bool:
    names = files.protocol
    return bool(BUCKETS.intersection({names} if isinstance(names, str) else names))
