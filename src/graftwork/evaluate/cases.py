"""What is asked: cases from held-out rows, and the worked example that the base is shown.

In: the rows of a split. Out: cases in a fixed order, and the file that a worker reads them from.
Does not know how a dataset lies on the disk; a user's own file of cases is read in `case_file`.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.files.whole import explain_os_error, write_whole
from graftwork.grading.fields import AnswerFields, read_answer
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message
from graftwork.records.report import Case
from graftwork.text.similarity import normalise


def choose_cases(rows: Iterable[Row], *, most: int | None = None) -> tuple[Case, ...]:
    """The rows as cases. Where there are more than `most`, ids drawn by hash: the same every time."""
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
        )
        for row in rows
    ]
    if not cases:
        raise UserMistake(
            "there are no held-out cases to evaluate on",
            why="without them nothing can be said about the adapter",
            fix="give the split a larger test share, or bring more logs",
        )
    return draw_cases(cases, most=most)


def draw_cases(cases: Sequence[Case], *, most: int | None) -> tuple[Case, ...]:
    """At most so many of them, in their order; a larger number takes all that a smaller one took."""
    if most is None or len(cases) <= most:
        return tuple(cases)
    drawn = {case.id for case in sorted(cases, key=_drawing_order)[:most]}
    return tuple(case for case in cases if case.id in drawn)


def choose_worked_example(rows: Sequence[Row], *, fields: AnswerFields) -> tuple[Message, ...]:
    """Question and reply of a typical training row: of median length among those that answer.

    A refusal would teach the base to refuse, and the longest row would eat its context.
    """
    telling = [row for row in rows if (a := read_answer(row.reply, fields=fields)) and not a.refused]
    ranked = sorted(telling or rows, key=lambda row: (len(row.tokens), row.id))
    if not ranked:
        return ()
    chosen = ranked[(len(ranked) - 1) // 2]
    shown = tuple(message for message in chosen.messages if message.role != "system")
    return (*shown, Message(role="assistant", content=chosen.reply))


def insert_example(messages: Sequence[Message], *, example: Sequence[Message]) -> tuple[Message, ...]:
    """The worked example, right behind the opening system turns."""
    opening = 0
    while opening < len(messages) and messages[opening].role == "system":
        opening += 1
    return (*messages[:opening], *example, *messages[opening:])


def hash_cases(cases: Sequence[Case]) -> str:
    """What makes it the same test: questions and what counts as right, not what is told beside them."""
    asked = {"id", "origin", "messages", "reference", "group", "session"}
    return fingerprint(
        [case.model_dump(mode="json", include=asked | {"checks"} if case.checks else asked) for case in cases]
    )


def question_key(case: Case) -> str:
    """A hash of what the user asks, without case, spacing and punctuation; empty where nothing is asked.

    The system prompt and the reference take no part: the same question under another id, with another
    prompt or out of another file is the same question.
    """
    asked = [normalise(message.content) for message in case.messages if message.role == "user"]
    return fingerprint(asked)[:16] if any(asked) else ""


def clusters_of(cases: Sequence[Case]) -> dict[str, str]:
    """The cluster of each case that has one: its session, or the question that it repeats.

    Cases of one session succeed and fail together, and so do repetitions of one question under other ids:
    neither counts as independent evidence. Sessions that ask just the same are repetitions too. Sessions
    that share only a part, such as a greeting, stay apart.
    """
    units: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        own = ("case", case.id) if case.session is None else ("session", case.session)
        units.setdefault(own, []).append(case)
    asked = {unit: tuple(sorted(question_key(case) for case in group)) for unit, group in units.items()}
    times = Counter(asked.values())
    names: dict[tuple[str, ...], str] = {}
    found: dict[str, str] = {}
    for (kind, name), group in units.items():
        questions = asked[kind, name]
        repeated = all(questions) and times[questions] > 1
        if kind == "session" or repeated:
            called = name if kind == "session" else f"question {questions[0]}"
            found |= dict.fromkeys(
                (case.id for case in group), names.setdefault(questions, called) if repeated else called
            )
    return found


def write_cases(path: Path, *, cases: Sequence[Case]) -> None:
    write_whole(path, "".join(case.model_dump_json() + "\n" for case in cases))


def read_cases(path: Path) -> tuple[Case, ...]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise explain_os_error(error, path) from error
    return tuple(Case.from_json(line) for line in lines if line.strip())


def _drawing_order(case: Case) -> tuple[str, str]:
    return hashlib.sha256(case.id.encode()).hexdigest(), case.id


def cases_to_time(cases: Sequence[Case], *, most: int) -> list[Case]:
    """Those whose seconds are measured one by one: the same for every subject, so that they can be paired.

    First one case of each session, then the second ones: what is asked in one session is much alike.
    """
    seen: Counter[str] = Counter()
    turns = []
    for case in cases:
        key = case.session if case.session is not None else f" {case.id}"
        turns.append(seen[key])
        seen[key] += 1
    ordered = sorted(zip(turns, cases, strict=True), key=lambda pair: pair[0])
    return [case for _, case in ordered[:most]]
