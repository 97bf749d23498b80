"""What is said of a row, or of a file around rows, that could not be read."""

from typing import Literal, NamedTuple

from graftwork.records.base import Record
from graftwork.records.interaction import Origin

FaultCode = Literal["parse_error", "schema", "encoding"]


class ReadFault(Record):
    """A row that could not be read: where, and why. Never quotes the row."""

    origin: Origin
    code: FaultCode
    message: str


class Flaw(NamedTuple):
    """A fault as a container sees it, who does not know what the file is called."""

    line: int
    code: FaultCode
    message: str


def name_size(size: int) -> str:
    """A number of bytes as people say it."""
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size} bytes"


def too_long(line: int, size: int, *, longest: int) -> Flaw:
    return Flaw(
        line, "parse_error", f"the row has {name_size(size)}, and one row may have {name_size(longest)}"
    )
