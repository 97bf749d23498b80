"""Hashes of files and folders: the names that content-addressed things go by."""

import hashlib
from pathlib import Path

from graftwork.records.errors import Damaged


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    """One hash over the relative names and contents of all files below `folder`."""
    outer = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        outer.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return outer.hexdigest()


def require_digest(path: Path, expected: str) -> None:
    """Refuse a file that is not the one its manifest names."""
    if not path.is_file():
        raise Damaged(
            f"{path.name} is missing",
            why="its manifest names it",
            fix="run the step that made it again",
            where=str(path),
        )
    actual = file_digest(path)
    if actual != expected:
        raise Damaged(
            f"{path.name} has other bytes than its manifest says",
            why=f"expected sha256 {expected[:12]}…, found {actual[:12]}…",
            fix="restore it, or run the step that made it again",
            where=str(path),
        )
