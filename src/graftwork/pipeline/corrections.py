"""Corrected answers of captures: which there are, which contradict each other, and what judges learn of them.

In: an open project. Out: corrections with reviewer and time, conflicts, labels for judges. The training row
and the preference pair of a correction are made when captures are read as a log.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.turns import take_turns, to_messages
from graftwork.data.repair.targets import hash_prompt
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.correction import Correction, CorrectionConflict, Corrections, JudgeLabel
from graftwork.records.interaction import TRY_OUT_SESSION, Capture, Feedback, Message
from graftwork.store.captures import FeedbackStore
from graftwork.text.similarity import fold


def list_corrections(work: OpenProject) -> Corrections:
    """List the last correction of each reviewer for each capture, the oldest first."""
    last: dict[tuple[str, str | None], Correction] = {}
    for feedback, capture, messages in _read(work):
        if feedback.correction is not None:
            key = (capture.id, feedback.who)
            last.pop(key, None)
            last[key] = Correction(
                capture=capture.id,
                at=feedback.at,
                reviewer=feedback.who,
                release=capture.release,
                messages=messages,
                served=capture.reply,
                corrected=feedback.correction,
                prompt_hash=hash_prompt(messages),
            )
    found = tuple(last.values())
    return Corrections(corrections=found, conflicts=tuple(find_conflicts(found)))


def find_conflicts(corrections: tuple[Correction, ...]) -> Iterator[CorrectionConflict]:
    """Yield the prompts with several corrections that differ in more than case and spacing."""
    by_prompt: dict[str, list[Correction]] = defaultdict(list)
    for correction in corrections:
        by_prompt[correction.prompt_hash].append(correction)
    for prompt_hash, given in by_prompt.items():
        if len({fold(correction.corrected) for correction in given}) > 1:
            question = next((m.content for m in reversed(given[0].messages) if m.role == "user"), "")
            yield CorrectionConflict(prompt_hash=prompt_hash, question=question, corrections=tuple(given))


def list_judge_labels(work: OpenProject) -> Iterator[JudgeLabel]:
    """Yield what people think of answers: a correction makes the served answer bad and its own text good."""
    for feedback, capture, messages in _read(work):
        about: dict[str, Any] = {
            "messages": messages,
            "at": feedback.at,
            "reviewer": feedback.who,
            "capture": capture.id,
        }
        if feedback.correction is None:
            yield JudgeLabel(answer=capture.reply, score=feedback.score, **about)
        elif fold(feedback.correction) == fold(capture.reply):
            yield JudgeLabel(answer=capture.reply, score=1.0, source="correction", **about)
        else:
            yield JudgeLabel(answer=capture.reply, score=0.0, source="correction", **about)
            yield JudgeLabel(answer=feedback.correction, score=1.0, source="correction", **about)


def _read(work: OpenProject) -> Iterator[tuple[Feedback, Capture, tuple[Message, ...]]]:
    for entry in FeedbackStore(work.database, project=work.settings.project).all():
        if entry.capture.session == TRY_OUT_SESSION:
            continue
        messages = read_messages(entry.capture)
        if messages:
            yield entry.feedback, entry.capture, messages


def read_messages(capture: Capture) -> tuple[Message, ...]:
    """The messages of a capture as a row has them; empty where they cannot be read as text."""
    try:
        return to_messages(take_turns(capture.request.get("messages"), "messages"))
    except BadRow:
        return ()
