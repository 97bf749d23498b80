"""The captures of a project as a log: chosen by what users said, and without held-out questions.

In: an open project, the settings, which feedback is wanted. Out: captures, and how many were left out
for which reason. The same rules as in the preparation, applied earlier: who trains elsewhere on the
export is as safe. Changes nothing.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from graftwork.data.captures import find_refusal, is_negative
from graftwork.data.settings import CaptureSettings
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.steps.data import PreparedData
from graftwork.records.interaction import Capture, CaptureOrigin
from graftwork.text.normalise import words

Feedback = Literal["not_negative", "positive", "negative", "all"]

HELD_OUT = "it asks a held-out question of the dataset"


class CaptureExport:
    """Iterate over it once; then `written` and `left_out` hold the counts."""

    def __init__(self, work: OpenProject, settings: CaptureSettings, *, feedback: Feedback) -> None:
        self._work = work
        self._settings = settings
        self._feedback = feedback
        self.written = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Capture]:
        held_out = _held_out_questions(self._work)
        for capture in self._work.captures.export():
            reason = self._refuse(capture)
            if reason is None and _question_of(capture.request.get("messages")) in held_out:
                reason = HELD_OUT
            if reason is None:
                self.written += 1
                yield capture
            else:
                self.left_out[reason] += 1

    def _refuse(self, capture: Capture) -> str | None:
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
            return "nobody said that it is bad"
        return None


def _held_out_questions(work: OpenProject) -> set[str]:
    """What the test and validation rows of the project's dataset ask; nothing where there is none."""
    entry = work.ledger.get("prepare")
    if entry is None:
        return set()
    folder = Path(PreparedData.model_validate(entry.output).folder)
    if not folder.is_dir():
        return set()
    from graftwork.files.dataset import iterate_rows

    return {
        _question_of([message.model_dump() for message in row.messages])
        for split in ("validation", "test")
        for row in iterate_rows(folder, split)
    } - {""}


def _question_of(messages: Any) -> str:
    """All that the user says, but for case, spacing and punctuation."""
    if not isinstance(messages, list):
        return ""
    said = [
        message["content"]
        for message in messages
        if isinstance(message, dict)
        and message.get("role") == "user"
        and isinstance(message.get("content"), str)
    ]
    return " ".join(word for text in said for word in words(text))
