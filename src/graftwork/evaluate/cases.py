"""The cases of an evaluation, from held-out rows or a user's file: which, in what order, and what is asked.

Input: the rows of a split, or a file with one JSON object per line (`messages` or `prompt` and `system`;
`reference` or `reply`, `checks`, `group` or `role`, `domain`, `session`, `duration_ms`, `id`). Output: cases
in a fixed order and their hash, the worked example that the base gets, the groups of equal questions that
count once, the cases to time, and the file that a worker reads. Does not know how a dataset is stored.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from graftwork.files.disk import explain_os_error, write_atomic
from graftwork.grading.answers import AnswerFields, read_answer
from graftwork.grading.checks import GradeCheck, read_case_checks
from graftwork.grading.custom import require_named
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin, Role
from graftwork.records.release import PromptVariant, replace_system
from graftwork.records.report import Case, EvalJob
from graftwork.text.words import normalize


def choose_cases(rows: Iterable[Row], *, most: int | None = None) -> tuple[Case, ...]:
    """Return the rows as cases. If there are more than `most`, draw them by hash of their ids: the same every
    time.
    """
    cases = [
        Case(
            id=row.id,
            origin=row.origin,
            messages=row.messages,
            reference=row.reply,
            group=row.group,
            session=row.session,
            domain=row.domain,
            duration_ms=row.duration_ms,
            rejected=row.rejected,
            reward=row.reward,
            usage=row.usage,
        )
        for row in rows
    ]
    if not cases:
        raise UserError(
            "there are no held-out cases to evaluate on",
            why="without them the adapter cannot be evaluated",
            fix="give the split a larger test share, or add more logs",
        )
    return draw_cases(cases, most=most)


def draw_cases(cases: Sequence[Case], *, most: int | None) -> tuple[Case, ...]:
    """Draw at most this many, in order; a larger number includes all of a smaller one."""
    if most is None or len(cases) <= most:
        return tuple(cases)
    by_hash = sorted(cases, key=lambda case: (hashlib.sha256(case.id.encode()).hexdigest(), case.id))
    drawn = {case.id for case in by_hash[:most]}
    return tuple(case for case in cases if case.id in drawn)


def choose_worked_example(rows: Sequence[Row], *, fields: AnswerFields) -> tuple[Message, ...]:
    """Choose question and reply of a typical training row: of median length among those that answer. A
    refusal would teach the base to refuse, and the longest row would fill its context.
    """
    answered = [row for row in rows if (a := read_answer(row.reply, fields=fields)) and not a.refused]
    ranked = sorted(answered or rows, key=lambda row: (len(row.tokens), row.id))
    if not ranked:
        return ()
    median_row = ranked[(len(ranked) - 1) // 2]
    turns = tuple(message for message in median_row.messages if message.role != "system")
    return (*turns, Message(role="assistant", content=median_row.reply))


def asked_messages(job: EvalJob, case: Case) -> tuple[Message, ...]:
    """Return what the subject of a job is asked: the case with the job's prompt and worked examples."""
    messages = case.messages
    if job.logged_system and case.logged_system is not None:
        messages = replace_system(messages, case.logged_system)
    return PromptVariant(instruction=job.instruction, examples=job.worked_example).apply(messages)


def hash_cases(cases: Sequence[Case]) -> str:
    """Hash what identifies the test: questions and what counts as correct, not the other fields."""
    fields = {"id", "origin", "messages", "reference", "group", "session"}
    return fingerprint(
        [
            case.model_dump(mode="json", include=fields | {"checks"} if case.checks else fields)
            for case in cases
        ]
    )


def question_key(case: Case) -> str:
    """Hash what the user asks, without case, spacing and punctuation; empty if nothing is asked. The system
    prompt and the reference are ignored: the same question under another id, with another prompt or from
    another file is the same question.
    """
    questions = [normalize(message.content) for message in case.messages if message.role == "user"]
    return fingerprint(questions)[:16] if any(questions) else ""


def clusters_of(cases: Sequence[Case]) -> dict[str, str]:
    """Return the cluster of each case that has one: its session, or the question that it repeats. Cases of
    one session succeed and fail together, and so do repetitions of one question under other ids: neither
    counts as independent evidence. Identical sessions are repetitions too. Sessions that share only a part,
    such as a greeting, stay apart.
    """
    units: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        unit_key = ("case", case.id) if case.session is None else ("session", case.session)
        units.setdefault(unit_key, []).append(case)
    questions_by_unit = {
        unit: tuple(sorted(question_key(case) for case in group)) for unit, group in units.items()
    }
    times = Counter(questions_by_unit.values())
    names: dict[tuple[str, ...], str] = {}
    clusters: dict[str, str] = {}
    for (kind, name), group in units.items():
        questions = questions_by_unit[kind, name]
        repeated = all(questions) and times[questions] > 1
        if kind == "session" or repeated:
            called = name if kind == "session" else f"question {questions[0]}"
            clusters |= dict.fromkeys(
                (case.id for case in group), names.setdefault(questions, called) if repeated else called
            )
    return clusters


def write_cases(path: Path, *, cases: Sequence[Case]) -> None:
    lines = []
    for case in cases:
        # Without these, files keep the bytes by which answers are found again.
        left_out = {name for name in ("usage", "logged_system") if getattr(case, name) is None}
        lines.append(case.model_dump_json(exclude=left_out) + "\n")
    write_atomic(path, "".join(lines))


def read_cases(path: Path) -> tuple[Case, ...]:
    return tuple(Case.from_json(line) for line in _read_lines(path) if line.strip())


def _read_lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise explain_os_error(error, path) from error


def cases_to_time(cases: Sequence[Case], *, most: int) -> list[Case]:
    """Return the cases that are timed one by one: the same for every subject, so that they can be paired.
    First one case of each session, then a second one: cases of one session are similar.
    """
    counts: Counter[str] = Counter()
    turns = []
    for case in cases:
        key = case.session if case.session is not None else f" {case.id}"
        turns.append(counts[key])
        counts[key] += 1
    ordered = sorted(zip(turns, cases, strict=True), key=lambda pair: pair[0])
    return [case for _, case in ordered[:most]]


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


def read_case_file(path: Path, *, named: Sequence[GradeCheck] | None = None) -> tuple[Case, ...]:
    """Read every case of the file, in order; refuse the file if a single line is wrong. `named` are the
    checks of graft.yaml, if known: a case may name no other function.
    """
    cases: dict[str, Case] = {}
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip():
            continue
        where = Origin(file=path.name, line=number)
        case = _read_case(line, where)
        try:
            # Refused here: found out while grading, every model would have answered first.
            for check in read_case_checks(case):
                if named is not None:
                    require_named(
                        check.metric,
                        GradeContext(checks={declared.name: declared for declared in named}),
                    )
        except CannotGrade as error:
            raise _wrong("a check of the case is not valid", str(error), where) from error
        if case.id in cases:
            first = cases[case.id].origin
            raise _wrong(
                f"the case id {case.id!r} is used twice", f"line {first.line} has the same id", where
            )
        cases[case.id] = case
    if not cases:
        raise UserError(
            "the file contains no cases",
            why="without them nothing can be measured",
            fix='write one JSON object per line: {"prompt": "…", "reference": "…"}',
            where=str(path),
        )
    return tuple(cases.values())


def _read_case(line: bytes, where: Origin) -> Case:
    try:
        value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise _wrong("the line is not JSON", str(error), where) from error
    if not isinstance(value, dict):
        raise _wrong("the line is not a JSON object", f"it contains a {type(value).__name__}", where)
    unknown = sorted(set(value) - KNOWN)
    if unknown:
        raise _wrong(f"unknown key {unknown[0]!r}", f"known: {', '.join(sorted(KNOWN))}", where)
    messages = _read_messages(value, where)
    reference = _text(value, "reference", where) or _text(value, "reply", where) or ""
    checks = value.get("checks") or []
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        raise _wrong("`checks` is not a list of objects", "each check is an object with its own keys", where)
    if not reference and not checks:
        raise _wrong("nothing defines the correct answer", "there is neither `reference` nor `checks`", where)
    case_id = value.get("id")
    if case_id is not None and not isinstance(case_id, str | int):
        raise _wrong("`id` is neither text nor a number", f"it is {case_id!r}", where)
    turns = [[message.role, message.content] for message in messages]
    duration = value.get("duration_ms")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    if duration is not None and not (is_number and duration >= 0):
        raise _wrong(
            "`duration_ms` must be a number of at least 0", f"it is {json.dumps(duration)[:80]}", where
        )
    return Case(
        id=str(case_id) if case_id is not None else fingerprint([turns, reference])[:16],
        origin=where,
        messages=messages,
        reference=reference,
        group=_text(value, "group", where) or _text(value, "role", where),
        session=_text(value, "session", where),
        domain=_text(value, "domain", where),
        duration_ms=None if duration is None else float(duration),
        checks=tuple(checks),
    )


def _read_messages(value: dict[str, Any], where: Origin) -> tuple[Message, ...]:
    turns = value.get("messages")
    if turns is None:
        prompt, system = _text(value, "prompt", where), _text(value, "system", where)
        if not prompt:
            raise _wrong("the case has no question", "there is neither `messages` nor `prompt`", where)
        opening = (Message(role="system", content=system),) if system else ()
        return (*opening, Message(role="user", content=prompt))
    if not isinstance(turns, list) or not turns:
        raise _wrong("`messages` is not a list of turns", "each turn has a role and a content", where)
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise _wrong("a turn has no text content", f"it is {json.dumps(turn)[:80]}", where)
        role, roles = turn.get("role"), get_args(Role)
        if role not in roles:
            raise _wrong(f"a turn has the role {role!r}", f"known: {', '.join(roles)}", where)
        messages.append(Message(role=role, content=turn["content"]))
    if messages[-1].role == "assistant":
        raise _wrong("the last turn is the assistant's", "its expected text belongs in `reference`", where)
    return tuple(messages)


def _text(value: dict[str, Any], key: str, where: Origin) -> str | None:
    content = value.get(key)
    if content is not None and not isinstance(content, str):
        raise _wrong(f"`{key}` is not a string", f"it is {json.dumps(content)[:80]}", where)
    return content


def _wrong(what: str, why: str, where: Origin) -> UserError:
    return UserError(what, why=why, fix="fix the line; no case of the file was evaluated", where=str(where))
