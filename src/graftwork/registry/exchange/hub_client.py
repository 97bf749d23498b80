"""What the Hub's client has to be told, and what it tells, put into our words.

In: what the Hub says of a file; a count. Out: whether it is the same file; a progress bar that draws nothing;
a client that keeps quiet. Does not know what a release is.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graftwork.registry.counting import Count


def is_of(info: Any, content: bytes) -> bool:
    """Whether what the Hub says of a file is true of this content."""
    if info.lfs is not None:
        return bool(info.lfs.sha256 == hashlib.sha256(content).hexdigest())
    return bool(info.blob_id == git_hash(content))


def git_hash(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def quiet_client() -> Iterator[None]:
    """The client warns that an open file does not go over Xet: that is why it gets one."""
    log = logging.getLogger("huggingface_hub._commit_api")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class TooLong(OSError):
    """More arrives than the file may have."""


def bar_of(count: Count, *, largest: int) -> Any:
    """What the client takes for its progress bar: it draws nothing, counts, and ends what is too long.

    The client itself compares lengths only when all has arrived, which may fill the disk.
    """
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Counted(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})
            self._arrived = 0

        def update(self, n: float | None = 1) -> bool | None:
            self._arrived += int(n or 0)
            if self._arrived > largest:
                raise TooLong(f"more than {largest:,} bytes arrive")
            count.add(int(n or 0))
            return None

    return Counted
