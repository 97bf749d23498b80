"""A run of another tool, in the words that both formats share."""

import json
import math
from pathlib import Path
from typing import Any

from graftwork.files.disk import explain_os_error
from graftwork.records.base import Record
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.interaction import Message

MOST_BYTES = 2 << 30
"""A file, or what an archive unpacks to, may be as large as this."""
OWN_KEY = "graftwork"
"""Under this key our exports carry what the other format has no place for."""


class ForeignSample(Record):
    """One answer to one question, with the marks that the other tool gave it."""

    id: str
    messages: tuple[Message, ...]
    reference: str = ""
    text: str = ""
    scores: dict[str, float | None] = {}
    repeat: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    truncated: bool = False
    group: str | None = None
    domain: str | None = None
    session: str | None = None
    origin_file: str = ""
    origin_line: int = 0


class ForeignTotal(Record):
    """A figure without its samples: it can be shown and not compared in pairs."""

    metric: str
    value: float
    stderr: float | None
    n: int


class ForeignRun(Record):
    tool: str
    subject: str
    file: str
    samples: tuple[ForeignSample, ...]
    totals: tuple[ForeignTotal, ...] = ()
    settings: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    """What is missing, one sentence each."""


def read_document(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise too_large(path)
        return parse(path.read_bytes(), where=str(path))
    except OSError as error:
        raise explain_os_error(error, path) from error


def parse(content: bytes | str, *, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(
            "the file does not hold readable JSON",
            why=str(error) or "it is nested too deeply",
            fix="take the file as the other tool wrote it, and copy it whole",
            where=where,
        ) from error


def too_large(path: Path) -> UserMistake:
    return UserMistake(
        f"the file holds more than {MOST_BYTES >> 30} GiB",
        why="results are read into memory as a whole",
        fix="write fewer samples into one log",
        where=str(path),
    )


def not_as_expected(what: str, *, why: str, where: str) -> UserMistake:
    return UserMistake(
        what,
        why=why,
        fix="give an inspect-ai log (.json, .eval) or lm-eval's results_*.json or samples_*.jsonl",
        where=where,
    )


def number_of(value: Any) -> float | None:
    """A mark as a number; None where it is none."""
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    return None


def text_of(content: Any) -> str:
    """The text of a turn: plain, or in parts of which only those with text count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def make_messages(turns: Any) -> tuple[Message, ...]:
    """Turns as another tool wrote them; roles that we do not know count as the user's."""
    messages = []
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict):
            role = turn.get("role")
            known = role if role in ("system", "user", "assistant", "tool") else "user"
            messages.append(Message.model_validate({"role": known, "content": text_of(turn.get("content"))}))
    return tuple(messages)


def section(value: Any, key: str) -> dict[str, Any]:
    """What stands under the key where that is an object; an empty one else."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def named(value: Any, key: str) -> str | None:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else None


def whole_number(value: Any) -> int:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
