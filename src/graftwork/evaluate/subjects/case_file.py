"""Cases out of a user's own file: one JSON object a line.

In: a file. Out: cases, or what is wrong with which line. A line holds `messages` (or `prompt`, and with it
`system`), and may hold `reference` (or `reply`), `checks`, `group` (or `role`), `domain`, `session`,
`duration_ms` and `id`. A file that an evaluation wrote itself is read too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from graftwork.files.disk import explain_os_error
from graftwork.grading import CannotGrade, Check, GradeContext, read_case_checks
from graftwork.grading.own import require_named
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message, Origin, Role
from graftwork.records.report import Case

KNOWN = frozenset(
    [
        "id",
        "messages",
        "prompt",
        "system",
        "reference",
        "reply",
        "checks",
        "group",
        "role",
        "domain",
        "session",
        "duration_ms",
        "origin",
    ]
)


def read_case_file(path: Path, *, named: Sequence[Check] | None = None) -> tuple[Case, ...]:
    """Every case of the file, in its order; nothing where a single line is wrong.

    `named` are the checks of graft.yaml, where they are known: a case may ask for no other own function.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise explain_os_error(error, path) from error
    cases: dict[str, Case] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = Origin(file=path.name, line=number)
        case = _read_case(_read_object(line, where), where)
        _require_checks(case, named)
        if case.id in cases:
            first = cases[case.id].origin
            raise _wrong(f"the case {case.id!r} is there twice", f"it stands in line {first.line} too", where)
        cases[case.id] = case
    if not cases:
        raise UserMistake(
            "the file holds no cases",
            why="without them nothing can be measured",
            fix='write one JSON object a line: {"prompt": "…", "reference": "…"}',
            where=str(path),
        )
    return tuple(cases.values())


def _read_object(line: bytes, where: Origin) -> dict[str, Any]:
    try:
        value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise _wrong("the line is not JSON", str(error), where) from error
    if not isinstance(value, dict):
        raise _wrong("the line is no JSON object", f"it holds a {type(value).__name__}", where)
    unknown = sorted(set(value) - KNOWN)
    if unknown:
        raise _wrong(f"nobody reads the key {unknown[0]!r}", f"known: {', '.join(sorted(KNOWN))}", where)
    return value


def _read_case(value: dict[str, Any], where: Origin) -> Case:
    messages = _read_messages(value, where)
    reference = _text(value, "reference", where) or _text(value, "reply", where) or ""
    checks = value.get("checks") or []
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        raise _wrong("`checks` is not a list of objects", "each check is an object with its own keys", where)
    if not reference and not checks:
        raise _wrong(
            "nothing says what a right answer is", "there is neither `reference` nor `checks`", where
        )
    named = value.get("id")
    if named is not None and not isinstance(named, str | int):
        raise _wrong("`id` is neither text nor a number", f"it is {named!r}", where)
    asked = [[message.role, message.content] for message in messages]
    return Case(
        id=str(named) if named is not None else fingerprint([asked, reference])[:16],
        origin=where,
        messages=messages,
        reference=reference,
        group=_text(value, "group", where) or _text(value, "role", where),
        session=_text(value, "session", where),
        domain=_text(value, "domain", where),
        duration_ms=_number(value, "duration_ms", where),
        checks=tuple(checks),
    )


def _require_checks(case: Case, named: Sequence[Check] | None) -> None:
    """Refused here: found out while grading, every model would have answered first."""
    try:
        for check in read_case_checks(case):
            if named is not None:
                require_named(check.metric, GradeContext(checks={one.name: one for one in named}))
    except CannotGrade as error:
        raise _wrong("a check of the case makes no sense", str(error), case.origin) from error


def _read_messages(value: dict[str, Any], where: Origin) -> tuple[Message, ...]:
    turns = value.get("messages")
    if turns is None:
        prompt, system = _text(value, "prompt", where), _text(value, "system", where)
        if not prompt:
            raise _wrong("the case asks nothing", "there is neither `messages` nor `prompt`", where)
        opening = (Message(role="system", content=system),) if system else ()
        return (*opening, Message(role="user", content=prompt))
    if not isinstance(turns, list) or not turns:
        raise _wrong("`messages` is not a list of turns", "each turn has a role and a content", where)
    messages = tuple(_read_message(turn, where) for turn in turns)
    if messages[-1].role == "assistant":
        raise _wrong("the last turn is the assistant's", "what it should say belongs into `reference`", where)
    return messages


def _read_message(turn: Any, where: Origin) -> Message:
    roles = get_args(Role)
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
        raise _wrong("a turn has no text as its content", f"it is {json.dumps(turn)[:80]}", where)
    if turn.get("role") not in roles:
        raise _wrong(f"a turn has the role {turn.get('role')!r}", f"known: {', '.join(roles)}", where)
    return Message(role=turn["role"], content=turn["content"])


def _text(value: dict[str, Any], key: str, where: Origin) -> str | None:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise _wrong(f"`{key}` is not a text", f"it is {json.dumps(found)[:80]}", where)
    return found


def _number(value: dict[str, Any], key: str, where: Origin) -> float | None:
    found = value.get(key)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float) or found < 0):
        raise _wrong(f"`{key}` is not a number from 0 on", f"it is {json.dumps(found)[:80]}", where)
    return None if found is None else float(found)


def _wrong(what: str, why: str, where: Origin) -> UserMistake:
    return UserMistake(what, why=why, fix="mend the line; no case of the file was asked", where=str(where))
