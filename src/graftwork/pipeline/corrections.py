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
from graftwork.store.reviews import ReviewStore
from graftwork.text.words import fold


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
    """Yield what people think of answers: a correction makes the served answer bad and its own text good.

    Reviews of captures are feedback; those of rows of the log come last.
    """
    for feedback, capture, messages in _read(work):
        about: dict[str, Any] = {
            "messages": messages,
            "at": feedback.at,
            "reviewer": feedback.who,
            "capture": capture.id,
            "session": capture.session,
            "group": capture.model,
            "item": f"capture {capture.id}",
        }
        if feedback.correction is None:
            yield JudgeLabel(answer=capture.reply, score=feedback.score, **about)
        else:
            yield from _label_both(capture.reply, feedback.correction, source="correction", **about)
    for entry in ReviewStore(work.database, project=work.settings.project).standing():
        review, item = entry.review, entry.review.item
        if item.kind != "row" or review.action in ("skip", "undo") or not item.reply.strip():
            continue
        about = {
            "messages": item.messages,
            "at": review.at,
            "reviewer": review.who,
            "group": item.group,
            "item": item.key,
        }
        if review.action == "edit" and review.reply is not None:
            yield from _label_both(item.reply, review.reply, source="review", **about)
        else:
            yield JudgeLabel(
                answer=item.reply, score=float(review.action == "accept"), source="review", **about
            )


def _label_both(served: str, corrected: str, **about: Any) -> Iterator[JudgeLabel]:
    if fold(corrected) == fold(served):
        yield JudgeLabel(answer=served, score=1.0, **about)
        return
    yield JudgeLabel(answer=served, score=0.0, **about)
    yield JudgeLabel(answer=corrected, score=1.0, instead_of=served, **about)


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
