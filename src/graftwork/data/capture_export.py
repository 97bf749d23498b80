"""Captures that a person selects: listed, or written as a log to train on or as held-out cases.

Input: the captures of an open project, its settings and what is selected. Output: captures, and why others
were left out. The rules are those of `audit/row_checks.py`, so that training elsewhere on the export is as
safe. `ingest/captures.py` reads a capture as a row.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from graftwork.data.audit.row_checks import find_refusal, find_time_objection, is_negative
from graftwork.data.ingest.fields import BadRow, first_of
from graftwork.data.ingest.turns import require_user, take_turns, to_messages
from graftwork.data.settings import CaptureSettings, Moment
from graftwork.evaluate.cases import read_case_file
from graftwork.files.dataset import iterate_rows
from graftwork.files.disk import write_atomic
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record
from graftwork.records.interaction import Capture, CaptureOrigin, Message, user_texts
from graftwork.text.words import words

FeedbackFilter = Literal["not_negative", "positive", "negative", "all"]

HELD_OUT = "it asks a held-out question of the dataset"
NOT_CORRECTED = "no person has corrected it, so it has no reference: `graft data review`"
NO_QUESTION = "its messages are not text that ends with a question or a result"
OutputFormat = Literal["log", "cases"]


class CaptureQuery(Record):
    """What a person selects captures by; an empty field selects all."""

    text: str = ""
    """Part of a message or of the reply, whatever its case; or the id of a capture."""
    models: tuple[str, ...] = ()
    """Names that the client asked for."""
    checks: tuple[str, ...] = ()
    """Checks of `serve.escalate` that the answer failed."""
    min_score: float | None = Field(None, ge=0, le=1)
    max_score: float | None = Field(None, ge=0, le=1)
    """Bounds of the feedback; a capture without feedback has no score and is not selected by either."""
    release: str = ""
    """The start of the id of the release that answered."""
    since: Moment | None = None
    until: Moment | None = None

    def selects(self, capture: Capture) -> bool:
        score = capture.feedback
        bounded = self.min_score is not None or self.max_score is not None
        low, high = self.min_score or 0.0, 1.0 if self.max_score is None else self.max_score
        return (
            (not self.models or capture.model in self.models)
            and (not self.checks or capture.failed_check in self.checks)
            and (not bounded or (score is not None and low <= score <= high))
            and capture.release.startswith(self.release)
            and find_time_objection(capture.at, since=self.since, until=self.until) is None
            and (self.text in ("", capture.id) or self.text.casefold() in _text_of(capture).casefold())
        )


def _text_of(capture: Capture) -> str:
    messages = capture.request.get("messages")
    try:
        texts = [turn.content for turn in take_turns(messages, "messages")]
    except BadRow:
        texts = [json.dumps(messages, ensure_ascii=False)]
    return "\n".join((*texts, capture.reply, capture.correction or ""))


class CaptureExport:
    """Iterate over it once; then `written` and `left_out` hold the counts."""

    def __init__(
        self,
        work: OpenProject,
        settings: CaptureSettings,
        *,
        feedback: FeedbackFilter,
        query: CaptureQuery | None = None,
        output_format: OutputFormat = "log",
    ) -> None:
        self._work = work
        self._settings = settings
        self._feedback = feedback
        self._query = query or CaptureQuery()
        self._format = output_format
        self.written = 0
        self.left_out: Counter[str] = Counter()

    def judged(self) -> Iterator[tuple[Capture, str | None]]:
        """Each selected capture with the reason why it is not exported; None if it is."""
        held_out = _held_out_questions(self._work) if self._format == "log" else set()
        for capture in self._work.captures.export():
            if not self._query.selects(capture):
                continue
            reason = self._why_not(capture)
            if reason is None and self._format == "cases":
                reason = _why_no_case(capture)
            if reason is None and held_out.intersection(_questions_of(capture.request.get("messages"))):
                reason = HELD_OUT
            yield capture, reason

    def __iter__(self) -> Iterator[Capture]:
        for capture, reason in self.judged():
            if reason is None:
                self.written += 1
                yield capture
            else:
                self.left_out[reason] += 1

    def _why_not(self, capture: Capture) -> str | None:
        if capture.shadow_of is not None:
            return "no user got it: it is a shadow answer"
        origin = CaptureOrigin(
            id=capture.id,
            release=capture.release,
            at=capture.at,
            feedback=capture.feedback,
            corrected=capture.correction is not None,
        )
        judged = self._feedback in ("not_negative", "positive")
        refusal = find_refusal(origin, capture.session, self._settings, judged=judged)
        if refusal is not None:
            return refusal.reason
        if self._feedback == "negative" and not is_negative(origin):
            return "it has no negative feedback"
        return None


class ExportedCaptures(Record):
    """How many captures were written, and how many were left out for each reason."""

    file: str
    captures: int
    left_out: dict[str, int]


class ListedCapture(Record):
    id: str
    at: str
    model: str
    release: str
    score: float | None
    question: str
    reply: str
    left_out: str = ""
    """Why it would not be exported."""


class SelectedCaptures(Record):
    """The newest of the captures that a query selects."""

    count: int
    captures: tuple[ListedCapture, ...]


def export_captures(
    work: OpenProject,
    path: Path,
    settings: CaptureSettings,
    *,
    feedback: FeedbackFilter,
    query: CaptureQuery,
    output_format: OutputFormat,
) -> ExportedCaptures:
    """Write captures as a file that only its owner can read."""
    export = CaptureExport(
        work, _of_feedback(settings, feedback), feedback=feedback, query=query, output_format=output_format
    )
    to_line = Capture.to_line if output_format == "log" else _to_case
    write_atomic(path, "".join(to_line(capture) + "\n" for capture in export), private=True)
    return ExportedCaptures(file=str(path), captures=export.written, left_out=dict(export.left_out))


def list_captures(
    work: OpenProject,
    settings: CaptureSettings,
    *,
    feedback: FeedbackFilter,
    query: CaptureQuery,
    limit: int = 20,
    page: int = 1,
) -> SelectedCaptures:
    """The newest first, each with the reason for which an export would leave it out; the first page is 1."""
    export = CaptureExport(work, _of_feedback(settings, feedback), feedback=feedback, query=query)
    newest: deque[ListedCapture] = deque(maxlen=limit * page)
    count = 0
    for capture, reason in export.judged():
        count += 1
        questions = list(user_texts(capture.request.get("messages")))
        newest.appendleft(
            ListedCapture(
                id=capture.id,
                at=capture.at,
                model=capture.model,
                release=capture.release,
                score=capture.feedback,
                question=questions[-1] if questions else "",
                reply=capture.correction or capture.reply,
                left_out=reason or "",
            )
        )
    return SelectedCaptures(count=count, captures=tuple(newest)[limit * (page - 1) :])


def _of_feedback(settings: CaptureSettings, feedback: FeedbackFilter) -> CaptureSettings:
    return settings.model_copy(update={"feedback": "positive" if feedback == "positive" else "not_negative"})


def _why_no_case(capture: Capture) -> str | None:
    if not capture.correction:
        return NOT_CORRECTED
    messages = read_prompt(capture)
    return None if messages and messages[-1].role != "assistant" else NO_QUESTION


def read_prompt(capture: Capture) -> tuple[Message, ...]:
    """The prompt as a row has it, with its tools; empty if it cannot be read as text."""
    try:
        turns = take_turns(capture.request.get("messages"), "messages")
        require_user(turns, "messages")
        return to_messages(turns, tools=first_of(capture.request, "tools", "functions"))
    except BadRow:
        return ()


def _to_case(capture: Capture) -> str:
    """A line of a file for `evaluate.cases`: the correction is the reference."""
    case = {
        "id": capture.id,
        "messages": [message.model_dump() for message in read_prompt(capture)],
        "reference": capture.correction,
        **({"session": capture.session} if capture.session else {}),
    }
    return json.dumps(case, ensure_ascii=False)


def _held_out_questions(work: OpenProject) -> set[str]:
    """What the test and validation rows of the datasets of all models ask, and the file of cases."""
    questions = set()
    case_file = work.settings.evaluate.cases
    if case_file is not None and (path := work.project.root / case_file).is_file():
        questions = {
            _question_of([message.model_dump() for message in case.messages]) for case in read_case_file(path)
        }
    steps = (name_entry(work, "prepare", model=model) for model in work.project.settings.all_models)
    outputs = [entry.output for step in steps if (entry := work.ledger.get(step)) is not None]
    folders = {folder for output in outputs for folder in (output["folder"], *output["folders"].values())}
    questions |= {
        _question_of([message.model_dump() for message in row.messages])
        for folder in folders
        if Path(folder).is_dir()
        for split in ("validation", "test")
        for row in iterate_rows(Path(folder), split)
    }
    return questions - {""}


def _question_of(messages: Any) -> str:
    """The text of all user messages, without case, spacing and punctuation."""
    return " ".join(word for text in user_texts(messages) for word in words(text))


def _questions_of(messages: Any) -> Iterator[str]:
    """What each turn of a conversation asked: a held-out question may be followed by others."""
    question: list[str] = []
    for text in user_texts(messages):
        question += words(text)
        yield " ".join(question)
