"""Human review: rows to look at, corrections, and the judge compared with them.

Input: an open project: its captures, the last evaluation, the last audit, the dataset. Output: items and
decisions; corrections with reviewer and time, and which contradict each other; one JudgeCalibration for each
mode of the judge. Decisions are stored at once. Those about captures become feedback when the session ends;
those about rows of the log are written to a log of their own, which replaces the rows. Labels go to the judge
without the reference wherever that would be the labeled answer itself.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from graftwork.data.audit.row_checks import NEGATIVE_BELOW
from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.turns import take_turns, to_messages
from graftwork.data.project import PreparedData
from graftwork.data.repair.project import default_out
from graftwork.data.repair.run import hash_prompt
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.cases import choose_cases, clusters_of
from graftwork.evaluate.judge import Judge, open_judge
from graftwork.evaluate.judge_statistics import (
    JudgeCalibration,
    LabeledAnswer,
    LabeledPair,
    Mode,
    calibrate,
    opinions_of_marks,
    opinions_of_pairs,
)
from graftwork.evaluate.live.drift import find_unlike
from graftwork.evaluate.project import JUDGED_FOLDER, Evaluated, calibration_file, judge_identity
from graftwork.evaluate.settings import JudgeSettings
from graftwork.files.dataset import iterate_rows, read_manifest, read_rows
from graftwork.files.disk import make_folder, write_atomic
from graftwork.grading.metrics import Review
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import Record, fingerprint
from graftwork.records.dataset import (
    SPLITS,
    Audit,
    Correction,
    CorrectionConflict,
    Corrections,
    JudgeLabel,
    OtherAnswer,
    ReviewAction,
    ReviewDecision,
    ReviewItem,
    ReviewReason,
    Row,
    key_of_capture,
)
from graftwork.records.errors import GraftError, UserError
from graftwork.records.interaction import (
    TRY_OUT_SESSION,
    AnswerOrigin,
    Capture,
    Feedback,
    Message,
    Origin,
    find_question,
)
from graftwork.records.report import Case
from graftwork.store.captures import FeedbackStore, ReviewStore
from graftwork.text.words import fold

REVIEWED_FILE = "reviewed.jsonl"
WEIGHTS: dict[ReviewReason, float] = {
    "disagreement": 8.0,
    "low_reward": 6.0,
    "gate_failure": 5.0,
    "wrong_label": 4.0,
    "drift": 3.0,
    "rare_group": 2.0,
    "unrated": 1.0,
}
"""What a look is worth; the reasons of an item add up."""
MOST_CAPTURES = 2000
MOST_ROWS = 50_000
SMALL_GROUP = 10
MOST_OTHERS = 8


class ReviewQueue:
    """Returns undecided items, the most helpful first."""

    def __init__(self, work: OpenProject, *, who: str) -> None:
        self._work, self._who = work, who
        self._store = ReviewStore(work.database, project=work.settings.project)
        self._items = list_items(work)
        self._undone: list[ReviewItem] = []

    @property
    def waiting(self) -> int:
        decided = self._store.decided()
        return sum(item.keys.isdisjoint(decided) for item in self._items)

    def next(self) -> ReviewItem | None:
        """The next item. Items that another reviewer has decided in the meantime are left out."""
        decided = self._store.decided()
        candidates = [*reversed(self._undone), *self._items]
        return next((item for item in candidates if item.keys.isdisjoint(decided)), None)

    def decide(self, item: ReviewItem, action: ReviewAction, *, reply: str | None = None) -> bool:
        """Store a decision; False if another reviewer was faster."""
        return decide_item(self._work, item, action, who=self._who, reply=reply)

    def undo(self) -> ReviewItem | None:
        """Take back the last decision that is not applied yet; the item comes next again."""
        last = self._store.undo(self._who, at=timestamp())
        if last is None:
            return None
        self._undone.append(last.item)
        return last.item

    def apply(self, *, out: Path | None = None) -> tuple[int, int, Path | None]:
        return apply_reviews(self._work, out=out)


def decide_item(
    work: OpenProject, item: ReviewItem, action: ReviewAction, *, who: str, reply: str | None = None
) -> bool:
    """Store a decision; False if another reviewer was faster."""
    if action == "edit" and (reply is None or not reply.strip() or reply.strip() == item.reply.strip()):
        raise UserError(
            "the answer was not changed",
            why="an edit must differ",
            fix="accept the answer as it is, or edit it",
        )
    decision = ReviewDecision(item=item, action=action, who=who, at=timestamp(), reply=reply)
    return ReviewStore(work.database, project=work.settings.project).add(decision)


def list_items(work: OpenProject) -> list[ReviewItem]:
    """List everything worth reviewing, the most helpful first, without what is decided."""
    reviews = ReviewStore(work.database, project=work.settings.project).standing()
    decided = {_content(entry.review.item) for entry in reviews}
    rows = _read_rows(work)
    sizes = Counter(row.group for row in rows)
    by_content: dict[str, ReviewItem] = {}
    for item in (*_list_captures(work, sizes), *_list_rows(work, rows, sizes)):
        content = _content(item)
        if content in decided:
            continue
        earlier = by_content.get(content)
        if earlier is not None:
            are_similar = (
                (*earlier.alike, item.capture) if item.key != earlier.key and item.capture else earlier.alike
            )
            reasons, alternative = {**item.reasons, **earlier.reasons}, earlier.other or item.other
            by_content[content] = earlier.model_copy(
                update={"reasons": reasons, "other": alternative, "alike": are_similar}
            )
        else:
            by_content[content] = item
    return sorted(
        by_content.values(), key=lambda item: (-sum(WEIGHTS[reason] for reason in item.reasons), item.key)
    )


def _content(item: ReviewItem) -> str:
    """Captures with the same prompt and reply are one item; rows are those of the log."""
    if item.kind == "row":
        return item.key
    return fingerprint([hash_prompt(item.messages), item.reply])


def _is_rare(group: str | None, sizes: Counter[str | None]) -> bool:
    return group is not None and len(sizes) > 1 and 0 < sizes[group] < SMALL_GROUP


def _list_captures(work: OpenProject, sizes: Counter[str | None]) -> Iterator[ReviewItem]:
    """Captures that people rated low, disagree about or have not rated, or that differ from training rows."""
    disputed = {
        correction.capture: conflict
        for conflict in list_corrections(work).conflicts
        for correction in conflict.corrections
    }
    served = (capture for capture in work.captures.export() if capture.shadow_of is None)
    newest = heapq.nlargest(MOST_CAPTURES, enumerate(served), key=lambda pair: pair[0])
    captures = [capture for _, capture in newest if capture.session != TRY_OUT_SESSION]
    different = find_unlike(work, captures)
    readable = [(capture, messages) for capture in captures if (messages := read_messages(capture))]
    # The distinct answers to each prompt, and to prompts that differ only in case and punctuation.
    answers: dict[str, dict[str, None]] = defaultdict(dict)
    alike: dict[str, dict[str, OtherAnswer]] = defaultdict(dict)
    for capture, messages in readable:
        answers[hash_prompt(messages)].setdefault(capture.reply)
        answer = OtherAnswer(reply=capture.reply, capture=capture.id, question=messages[-1].content)
        alike[_fold_prompt(messages)].setdefault(capture.reply, answer)
    for capture, messages in readable:
        reasons: dict[ReviewReason, str] = {}
        others = [
            answer.model_copy(update={"question": ""}) if answer.question == messages[-1].content else answer
            for reply, answer in alike[_fold_prompt(messages)].items()
            if reply != capture.reply
        ]
        if capture.id in disputed:
            reasons["disagreement"] = "people corrected this prompt in different ways"
            corrections = disputed[capture.id].corrections
            others = [
                OtherAnswer(reply=entry.corrected, capture=entry.capture, reviewer=entry.reviewer or "")
                for entry in corrections
            ]
        elif capture.correction is not None:
            continue
        elif len(answers[hash_prompt(messages)]) > 1:
            reasons["disagreement"] = "the same prompt was answered in different ways"
        if capture.feedback is not None and capture.feedback < NEGATIVE_BELOW:
            reasons["low_reward"] = f"users gave it {capture.feedback:g}"
        if capture.id in different:
            reasons["drift"] = "it is unlike any training prompt"
        if capture.feedback is None:
            reasons["unrated"] = "not rated"
        if reasons and _is_rare(capture.model, sizes):
            reasons["rare_group"] = f"its role has {sizes[capture.model]} rows"
        if reasons:
            yield ReviewItem(
                key=key_of_capture(capture.id),
                kind="capture",
                messages=messages,
                reply=capture.reply,
                reasons=reasons,
                group=capture.model,
                capture=capture.id,
                others=tuple(others[:MOST_OTHERS]),
            )


def _read_rows(work: OpenProject) -> list[Row]:
    prepared = work.ledger.get("prepare")
    if prepared is None:
        return []
    folder = Path(prepared.output["folder"])
    try:
        read_manifest(folder)
        return [row for split in SPLITS for row in islice(iterate_rows(folder, split), MOST_ROWS)]
    except GraftError:
        return []  # the dataset is gone: only captures can be looked at


def _list_rows(work: OpenProject, rows: list[Row], sizes: Counter[str | None]) -> Iterator[ReviewItem]:
    """Rows of the dataset that the adapter failed at, or that the audit doubts."""
    if not rows:
        return
    failed, doubts, contradicting = _find_failures(work), _find_doubts(work), _find_contradicting(work, rows)
    for row in rows:
        if row.capture is not None or "." in row.id:
            continue  # captures are in the queue themselves; a part of a conversation is not a row of the log
        reasons: dict[ReviewReason, str] = dict(doubts.get(row.origin, {}))
        if row.id in failed:
            reasons["gate_failure"] = "the adapter fails this held-out case"
        if _is_rare(row.group, sizes) and (reasons or row.answered):
            teacher_note = ", and a teacher wrote the reply" if row.answered else ""
            reasons["rare_group"] = f"its role has {sizes[row.group]} rows{teacher_note}"
        if reasons:
            yield ReviewItem(
                key=f"row:{row.input_hash}:{hash_prompt(row.messages)[:16]}",
                kind="row",
                messages=row.messages,
                reply=row.reply,
                reasons=reasons,
                group=row.group,
                origin=row.origin,
                input_hash=row.input_hash,
                other=failed.get(row.id, ""),
                others=tuple(
                    answer for answer in contradicting.get(row.origin, ()) if answer.reply != row.reply
                ),
            )


def _fold_prompt(messages: Sequence[Message]) -> str:
    return "\n".join(fold(message.content) for message in messages)


def _find_contradicting(work: OpenProject, rows: list[Row]) -> dict[Origin, list[OtherAnswer]]:
    """What other rows of the log answer to the same prompt, or to nearly the same one."""
    audit = _read_audit(work)
    if audit is None:
        return {}
    kept = {row.origin: row for row in rows}
    found: dict[Origin, list[OtherAnswer]] = defaultdict(list)
    for cluster in audit.clusters:
        if cluster.kind == "conflicting_answers":
            for origin in cluster.rows:
                found[origin] += [
                    OtherAnswer(reply=shown.reply, origin=shown.origin)
                    for shown in cluster.shown
                    if shown.origin != origin
                ]
    for doubt in audit.label_noise.suspicious:
        near = kept.get(doubt.near) if doubt.near is not None else None
        if near is not None:
            answer = OtherAnswer(reply=near.reply, origin=near.origin, question=near.messages[-1].content)
            found[doubt.origin].append(answer)
    return found


def _read_audit(work: OpenProject) -> Audit | None:
    entry = work.ledger.get("audit")
    return None if entry is None else Audit.model_validate(entry.output)


def _find_failures(work: OpenProject) -> dict[str, str]:
    """What the adapter said to the held-out cases that it fails, by the id of the case."""
    entry = work.ledger.get("evaluate")
    if entry is None:
        return {}
    evaluated = Evaluated.model_validate(entry.output)
    primary = work.settings.gate.primary_rule
    metric = evaluated.report.candidate.metrics.get(primary.metric) if primary is not None else None
    if metric is None:
        return {}
    failed = {case for case, score in metric.scores.items() if score is not None and score < 0.5}
    folder = evaluated.folders.get(evaluated.report.candidate.subject)
    try:
        answers = read_answers(Path(folder)) if folder else []
    except (GraftError, OSError):
        answers = []
    said = {answer.case_id: answer.text for answer in answers}
    return {case: said.get(case, "") for case in failed}


def _find_doubts(work: OpenProject) -> dict[Origin, dict[ReviewReason, str]]:
    audit = _read_audit(work)
    if audit is None:
        return {}
    reasons: dict[Origin, dict[ReviewReason, str]] = defaultdict(dict)
    for doubt in audit.label_noise.suspicious:
        reasons[doubt.origin]["wrong_label"] = f"the rest of the log suggests {doubt.suggested!r}"
    for cluster in audit.clusters:
        if cluster.kind == "conflicting_answers":
            for origin in cluster.rows:
                reasons[origin]["disagreement"] = "other rows of the log answer the same prompt differently"
    return reasons


def apply_reviews(work: OpenProject, *, out: Path | None = None) -> tuple[int, int, Path | None]:
    """Turn decisions about captures into feedback, once, and write the log of reviewed rows.

    Returns how many captures got feedback, and the rows of the log and its file if there are any.
    """
    store = ReviewStore(work.database, project=work.settings.project)
    feedback_count, lines = 0, []
    for entry in store.standing():
        review = entry.review
        if review.item.kind == "row":
            line = write_review(review)
            lines += [line] if line is not None else []
        elif not entry.applied:
            feedback: list[Feedback] = []
            if review.action != "skip":
                texts = {"accept": review.item.reply, "reject": None, "edit": review.reply}
                correction, score = texts[review.action], 1.0 if review.action == "accept" else 0.0
                # On the capture, and on those that are alike.
                feedback = [
                    Feedback(
                        capture=capture, at=review.at, score=score, who=review.who, correction=correction
                    )
                    for capture in (review.item.capture, *review.item.alike)
                ]
            feedback_count += store.apply(entry, feedback)
    path = out or default_out(work).with_name(REVIEWED_FILE)
    if lines or path.exists():
        write_atomic(path, b"".join(lines), private=True)
    return feedback_count, len(lines), path if lines else None


def write_review(review: ReviewDecision) -> bytes | None:
    """The line of the log that replaces a row; None if the row stays as it is."""
    if review.action not in ("reject", "edit"):
        return None
    item, edited = review.item, review.reply if review.action == "edit" else None
    origin = AnswerOrigin(
        by="reviewer",
        name=review.who,
        at=review.at,
        prompt_hash=hash_prompt(item.messages),
        replaces=item.input_hash,
        reason=", ".join(item.reasons),
        rejected=edited is None,
    )
    values = {
        "id": f"reviewed-{item.input_hash[:16]}",
        "messages": [{"role": turn.role, "content": turn.content} for turn in item.messages],
        "reply": item.reply if edited is None else edited,
        "rejected": item.reply if edited is not None and item.reply.strip() else None,
        "group": item.group,
        "answered": origin.model_dump(mode="json"),
    }
    return orjson.dumps({key: value for key, value in values.items() if value is not None}) + b"\n"


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
    corrections = tuple(last.values())
    return Corrections(corrections=corrections, conflicts=tuple(find_conflicts(corrections)))


def find_conflicts(corrections: tuple[Correction, ...]) -> Iterator[CorrectionConflict]:
    """Yield the prompts with several corrections that differ in more than case and spacing."""
    by_prompt: dict[str, list[Correction]] = defaultdict(list)
    for correction in corrections:
        by_prompt[correction.prompt_hash].append(correction)
    for prompt_hash, answers in by_prompt.items():
        if len({fold(correction.corrected) for correction in answers}) > 1:
            question = find_question(answers[0].messages)
            yield CorrectionConflict(prompt_hash=prompt_hash, question=question, corrections=tuple(answers))


def list_judge_labels(work: OpenProject) -> Iterator[JudgeLabel]:
    """Yield what people think of answers: a correction makes the served answer bad and its own text good.

    Reviews of captures are feedback; those of rows of the log come last.
    """
    for feedback, capture, messages in _read(work):
        label: dict[str, Any] = {
            "messages": messages,
            "at": feedback.at,
            "reviewer": feedback.who,
            "capture": capture.id,
            "session": capture.session,
            "group": capture.model,
            "item": f"capture {capture.id}",
        }
        if feedback.correction is None:
            yield JudgeLabel(answer=capture.reply, score=feedback.score, **label)
        else:
            yield from _label_both(capture.reply, feedback.correction, source="correction", **label)
    for entry in ReviewStore(work.database, project=work.settings.project).standing():
        review, item = entry.review, entry.review.item
        if item.kind != "row" or review.action in ("skip", "undo") or not item.reply.strip():
            continue
        label = {
            "messages": item.messages,
            "at": review.at,
            "reviewer": review.who,
            "group": item.group,
            "item": item.key,
        }
        if review.action == "edit" and review.reply is not None:
            yield from _label_both(item.reply, review.reply, source="review", **label)
        else:
            yield JudgeLabel(
                answer=item.reply, score=float(review.action == "accept"), source="review", **label
            )


def _label_both(served: str, corrected: str, **about: Any) -> Iterator[JudgeLabel]:
    if fold(corrected) == fold(served):
        yield JudgeLabel(answer=served, score=1.0, **about)
        return
    yield JudgeLabel(answer=served, score=0.0, **about)
    yield JudgeLabel(answer=corrected, score=1.0, instead_of=served, **about)


def _read(work: OpenProject) -> Iterator[tuple[Feedback, Capture, tuple[Message, ...]]]:
    for feedback, capture in FeedbackStore(work.database, project=work.settings.project).all():
        if capture.session == TRY_OUT_SESSION:
            continue
        messages = read_messages(capture)
        if messages:
            yield feedback, capture, messages


def read_messages(capture: Capture) -> tuple[Message, ...]:
    """The messages of a capture as a row has them; empty if they cannot be read as text."""
    try:
        return to_messages(take_turns(capture.request.get("messages"), "messages"))
    except BadRow:
        return ()


GOOD_FROM = 0.5
"""People's scores are from 0 (bad) to 1 (good)."""


class CalibratedJudge(Record):
    """The judge of graft.yaml, each of its modes with what people's labels say of it."""

    model: str
    modes: tuple[JudgeCalibration, ...]

    @property
    def sufficient(self) -> bool:
        return all(mode.sufficient for mode in self.modes)


def calibrate_judge(work: OpenProject, *, limit: int | None = None) -> CalibratedJudge:
    """Ask the judge about everything that people labeled. Replies are kept: asking again costs nothing."""
    settings = work.settings.evaluate.judge
    if settings is None:
        raise UserError(
            "graft.yaml does not configure a judge",
            why="there is no judge to compare with people's labels",
            fix="specify its endpoint under evaluate.judge: {url: https://host/v1, model: NAME}",
            where="evaluate.judge",
        )
    answers, pairs = gather_labels(work)
    labels = answers[:limit], pairs[:limit]
    folder = work.project.state / JUDGED_FOLDER
    make_folder(folder)
    judge = open_judge(settings, folder=folder)
    calibrations = []
    for mode in settings.modes:
        calibration = _calibrate_mode(work, judge, settings, mode, *labels)
        write_atomic(calibration_file(work, settings, mode), calibration.to_json())
        calibrations.append(calibration)
    return CalibratedJudge(model=settings.model, modes=tuple(calibrations))


def _calibrate_mode(
    work: OpenProject,
    judge: Judge,
    settings: JudgeSettings,
    mode: Mode,
    answers: list[LabeledAnswer],
    pairs: list[LabeledPair],
) -> JudgeCalibration:
    def report(done: int, total: int) -> None:
        work.reporter.progress("asking the judge", done, total, seconds_left=None, detail={})

    if mode == "pointwise":
        texts = {answer.case.id: answer.text for answer in answers}
        marks = judge.rate_all([answer.case for answer in answers], texts, progress=report)
        opinions, unjudged = opinions_of_marks(answers, marks)
    else:
        verdicts = judge.compare(
            [pair.case for pair in pairs],
            baseline={pair.case.id: pair.other for pair in pairs},
            candidate={pair.case.id: pair.preferred for pair in pairs},
            progress=report,
        )
        opinions, unjudged = opinions_of_pairs(pairs, verdicts)
    calibration = calibrate(
        opinions,
        settings=settings,
        identity=judge_identity(settings, mode),
        mode=mode,
        confidence=work.settings.evaluate.confidence,
        unjudged=unjudged,
    )
    return calibration.model_copy(update={"made_at": timestamp()})


def gather_labels(work: OpenProject) -> tuple[list[LabeledAnswer], list[LabeledPair]]:
    """Rewards, preference pairs, feedback, corrections and reviews, each labeled answer under its own id."""
    prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
    rows = [row for split in SPLITS for row in read_rows(Path(prepared.folder), split)]
    # The scale of the log's rewards, as a check on reviewer_score states it.
    rules = (check.rule for check in work.settings.evaluate.checks if check.metric == "reviewer_score")
    scale = next((rule for rule in rules if isinstance(rule, Review)), Review())
    answers: list[LabeledAnswer] = []
    pairs: list[LabeledPair] = []
    dataset_pairs: set[tuple[str, str, str]] = set()
    cases = choose_cases(rows) if rows else ()
    clusters = clusters_of(cases)
    for case in cases:
        cluster = clusters.get(case.id, case.id)
        if case.reward is not None and scale.least <= case.reward <= scale.most:
            share = (case.reward - scale.least) / ((scale.most - scale.least) or 1.0)
            answers.append(LabeledAnswer(_blind(case), case.reference, share >= GOOD_FROM, cluster))
        if case.rejected is not None and case.rejected.strip() != case.reference.strip():
            pairs.append(LabeledPair(_blind(case), case.reference, case.rejected, cluster))
            dataset_pairs.add(_name_pair(case.messages, case.reference, case.rejected))
    # What each person thought last of each item. People may disagree: each of them is a label.
    last: dict[tuple[str, str | None], list[JudgeLabel]] = {}
    for label in list_judge_labels(work):
        labels = last.setdefault((label.item, label.reviewer), [])
        if labels and label.at != labels[-1].at:
            labels.clear()
        labels.append(label)
    for number, label in enumerate(label for labels in last.values() for label in labels):
        case = Case(
            id=f"{label.item} {number}",
            origin=Origin(file="labels", line=number + 1),
            messages=label.messages,
            reference="",
            group=label.group,
        )
        cluster = label.session or label.item
        answers.append(LabeledAnswer(case, label.answer, label.score >= GOOD_FROM, cluster))
        # An edited row is a pair of the log too, where data.logs names the log of reviews.
        if (
            label.instead_of
            and _name_pair(label.messages, label.answer, label.instead_of) not in dataset_pairs
        ):
            pairs.append(LabeledPair(case, label.answer, label.instead_of, cluster))
    return answers, pairs


def _name_pair(messages: Sequence[Message], preferred: str, other: str) -> tuple[str, str, str]:
    return find_question(messages), preferred.strip(), other.strip()


def _blind(case: Case) -> Case:
    """Without the reference, which is the very answer that is labeled."""
    return case.model_copy(update={"reference": ""})
