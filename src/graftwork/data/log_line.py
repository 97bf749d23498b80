"""Whether a line of a log is still the one that a dataset was made of.

In: where the line stood and its hash. Out: same, changed, gone or not checked, in words. The hash is
the first half of the SHA-256 of the line's bytes without the white space around them.
"""

from itertools import islice
from pathlib import Path
from typing import Literal

from graftwork.data.read import hash_line
from graftwork.records.base import Record
from graftwork.records.interaction import Origin

COMPRESSED = (".gz", ".zst", ".zstd")
WITHOUT_LINES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LogCheck(Record):
    state: Literal["same", "changed", "gone", "not_checked"]
    words: str


def check_line(origin: Origin, *, expected: str, root: Path) -> LogCheck:
    """Read the line again, where there are lines, and compare."""
    path = root / origin.file
    hindrance = _find_hindrance(origin, expected=expected)
    if hindrance is not None:
        return LogCheck(state="not_checked", words=f"not checked: {hindrance}")
    try:
        line = _read_line(path, origin.line)
        if line is not None and _has_hash(line, expected):
            return LogCheck(state="same", words="the log still says the same")
        if _is_array(path):
            return LogCheck(state="not_checked", words="not checked: the log is one JSON document")
    except FileNotFoundError:
        return LogCheck(state="gone", words="the log is no longer there")
    except OSError as error:
        return LogCheck(state="not_checked", words=f"not checked: {error.strerror or error}")
    return LogCheck(state="changed", words="the log has changed")


def _find_hindrance(origin: Origin, *, expected: str) -> str | None:
    suffix = Path(origin.file).suffix.lower()
    if not expected:
        return "the dataset holds no hash of the line"
    if suffix in COMPRESSED:
        return "the log is compressed"
    if origin.file == "-" or suffix in WITHOUT_LINES:
        return "the log has no lines of its own"
    return None


def _has_hash(line: bytes, expected: str) -> bool:
    return expected in (hash_line(line), hash_line(line.removeprefix(BYTE_ORDER_MARK)))


def _read_line(path: Path, number: int) -> bytes | None:
    with path.open("rb") as handle:
        return next(islice(handle, number - 1, None), None)


def _is_array(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
