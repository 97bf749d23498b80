"""Captures as a log to train on: those that the rules of data preparation allow.

Input: the captures of an open project and its settings. Output: captures, and why others were left out. The
rules are those of `audit/row_checks.py`, so that training elsewhere on the export is as safe.
`ingest/captures.py` reads a capture as a row.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from graftwork.data.audit.row_checks import find_refusal, is_negative
from graftwork.data.project import PreparedData
from graftwork.data.settings import CaptureSettings
from graftwork.files.dataset import iterate_rows
from graftwork.files.disk import write_atomic
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.interaction import Capture, CaptureOrigin, user_texts
from graftwork.text.words import words

FeedbackFilter = Literal["not_negative", "positive", "negative", "all"]

HELD_OUT = "it asks a held-out question of the dataset"


class CaptureExport:
    """Iterate over it once; then `written` and `left_out` hold the counts."""

    def __init__(self, work: OpenProject, settings: CaptureSettings, *, feedback: FeedbackFilter) -> None:
        self._work = work
        self._settings = settings
        self._feedback = feedback
        self.written = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Capture]:
        held_out = _held_out_questions(self._work)
        for capture in self._work.captures.export():
            reason = self._why_not(capture)
            if reason is None and held_out.intersection(_questions_of(capture.request.get("messages"))):
                reason = HELD_OUT
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
        if self._feedback == "negative" and not is_negative(origin, self._settings):
            return "it has no negative feedback"
        return None


class ExportedCaptures(Record):
    """How many captures were written, and how many were left out for each reason."""

    file: str
    captures: int
    left_out: dict[str, int]


def export_captures(
    work: OpenProject, path: Path, settings: CaptureSettings, *, feedback: FeedbackFilter
) -> ExportedCaptures:
    """Write captures as a log file that only its owner can read."""
    settings = settings.model_copy(
        update={"feedback": "positive" if feedback == "positive" else "not_negative"}
    )
    export = CaptureExport(work, settings, feedback=feedback)
    write_atomic(path, "".join(capture.to_line() + "\n" for capture in export), private=True)
    return ExportedCaptures(file=str(path), captures=export.written, left_out=dict(export.left_out))


def _held_out_questions(work: OpenProject) -> set[str]:
    """What the test and validation rows of the project's dataset ask; nothing if there is none."""
    entry = work.ledger.get("prepare")
    folder = Path(PreparedData.model_validate(entry.output).folder) if entry is not None else None
    if folder is None or not folder.is_dir():
        return set()
    return {
        _question_of([message.model_dump() for message in row.messages])
        for split in ("validation", "test")
        for row in iterate_rows(folder, split)
    } - {""}


def _question_of(messages: Any) -> str:
    """The text of all user messages, without case, spacing and punctuation."""
    return " ".join(word for text in user_texts(messages) for word in words(text))


def _questions_of(messages: Any) -> Iterator[str]:
    """What each turn of a conversation asked: a held-out question may be followed by others."""
    question: list[str] = []
    for text in user_texts(messages):
        question += words(text)
        yield " ".join(question)
