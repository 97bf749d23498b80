"""One thing that was looked at: how it stands, what was found, how to mend it."""

from typing import Literal

from graftwork.records.base import Record

Result = Literal["ok", "missing", "note"]


class Check(Record):
    """`missing` must be mended before work can begin; a `note` is worth knowing."""

    name: str
    result: Result
    found: str
    fix: str = ""
    group: str = ""


def decide(name: str, good: bool, found: str, fix: str, *, otherwise: Result = "missing") -> Check:
    """`ok` without a fix, or `otherwise` with it."""
    return Check(name=name, result="ok" if good else otherwise, found=found, fix="" if good else fix)
