"""Runs a repair: plans it with its cost, asks the teacher, and writes the accepted rows as a log.

In: targets, a teacher, rules. Out: a `RepairPlan`, or a `RepairOutcome` and a JSONL file in which each prompt
occurs once. The file is written from the journal of answers: a killed run loses and repeats nothing. An
answer is accepted by the row's own checks, the project's, agreement and a judge; checks that compare with
the logged reply are left out: that reply is what is wrong.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN, UNMATCHED_CALL, find_fault
from graftwork.data.repair.targets import RepairQuestion, RepairTargets, to_row
from graftwork.data.repair.teacher import (
    Teacher,
    count_spending,
    estimate_tokens,
    key_of,
    price,
)
from graftwork.data.settings import DataSettings, RepairSettings, TeacherSettings
from graftwork.files.disk import write_atomic
from graftwork.grading.checks import right_or_wrong
from graftwork.grading.interface import CannotGrade, GradeContext, Rater
from graftwork.process.asking import BudgetSpent, KeptReply, NoReply, ReplyJournal, ask_many
from graftwork.records.dataset import AUGMENT, CUT_OFF, RepairOutcome, RepairPlan, RepairRow, RepairState
from graftwork.records.interaction import AnswerOrigin
from graftwork.records.report import Case
from graftwork.text.shape import find_garble
from graftwork.text.words import words


class RepairDecision(NamedTuple):
    state: RepairState
    why: str = ""
    reply: KeptReply | None = None


@dataclass(frozen=True)
class AcceptanceRules:
    settings: DataSettings
    grading: GradeContext = field(default_factory=GradeContext)
    """With the checks of the project."""
    judge: Rater | None = None

    def decide(self, question: RepairQuestion, replies: Sequence[KeptReply]) -> RepairDecision:
        reasons = [self._find_reason(question, reply) for reply in replies]
        passed = [reply for reply, reason in zip(replies, reasons, strict=True) if reason is None]
        if not passed:
            return RepairDecision("refused", next(reason for reason in reasons if reason is not None))
        best = passed[0]
        if len(replies) > 1:
            best, agreement = choose_agreed(passed, samples=len(replies))
            least = self.settings.repair.agreement
            if agreement < least:
                return RepairDecision("refused", f"samples agree by {agreement:.2f}, less than {least:g}")
        refusal = self._judge(question, best)
        if refusal is not None:
            return RepairDecision("refused", refusal)
        return RepairDecision("accepted", reply=best)

    def _find_reason(self, question: RepairQuestion, reply: KeptReply) -> str | None:
        """Why a reply is not accepted by its own form or by a check of the project."""
        if reply.finish_reason == "length":
            return f"{CUT_OFF} after {reply.tokens_out:,} tokens"
        row = question.row.model_copy(
            update={
                "reply": reply.text,
                "status": None,
                "finish_reason": None,
                "max_tokens": None,
                "capture": None,
                "extra": {},
            }
        )
        fault = find_fault(row, self.settings)
        if fault is not None and fault.code != UNMATCHED_CALL:  # that is the prompt's
            return f"{fault.code}: {fault.reason}"
        garble = find_garble(reply.text)
        if garble:
            return f"damaged text: {garble}"
        for check in right_or_wrong(self.grading.checks.values()):
            if check.against_reference:
                continue
            try:
                grade = check.grade(to_case(question), reply.text, self.grading)
            except CannotGrade as error:
                return f"check {check.name}: {error}"
            if grade is not None and grade < 1:
                return f"check {check.name} failed"
        return None

    def _judge(self, question: RepairQuestion, reply: KeptReply) -> str | None:
        least = self.settings.repair.judge_at_least
        if self.judge is None or least is None:
            return None
        try:
            mark = 1 + 4 * self.judge.rate(to_case(question), reply.text)
        except CannotGrade as error:
            return f"the judge gave no mark: {error}"
        return None if mark >= least else f"the judge gave {mark:g}, less than {least:g}"


def to_case(question: RepairQuestion) -> Case:
    row = question.row
    return Case(
        id=question.prompt_hash,
        origin=row.origin,
        messages=row.messages,
        reference="",
        group=row.group,
        session=row.session,
        domain=row.domain,
    )


def choose_agreed(replies: Sequence[KeptReply], *, samples: int) -> tuple[KeptReply, float]:
    """Return the reply that agrees best with the others, and its mean similarity to them.

    Samples that were refused agree with none.
    """
    bags = [Counter(words(reply.text)) for reply in replies]

    def share_words(one: Counter[str], other: Counter[str]) -> float:
        """The F1 score of the shared words."""
        total = one.total() + other.total()
        return 2 * (one & other).total() / total if total else 1.0

    means = [
        sum(share_words(bag, other) for at, other in enumerate(bags) if at != place) / (samples - 1)
        for place, bag in enumerate(bags)
    ]
    best = max(range(len(replies)), key=lambda place: (means[place], -place))
    return replies[best], means[best]


GROWTH = 1.5
"""How much longer than the cut-off reply a whole one is expected to be."""

OnProgress = Callable[[int, int], None]


def plan_repair(
    targets: RepairTargets, settings: RepairSettings, journal: ReplyJournal, *, longest: int | None = None
) -> RepairPlan:
    """Estimate requests, tokens and cost. Nothing is asked. Rows beyond `longest` tokens are dropped."""
    teacher = settings.teacher
    rows: list[RepairRow] = []
    total_in = total_out = requests = cached = prompts = overlong = 0
    for question in targets.questions:
        known = sum(
            teacher is not None and journal.get(key_of(teacher, question.prompt_hash, sample)) is not None
            for sample in range(settings.samples)
        )
        new = settings.samples - known
        # The tokens of the prompt, and those of an answer to it.
        asked = estimate_tokens(question.row.messages)
        logged = 0 if question.rows[0].fault == AUGMENT else len(question.row.reply)
        answered = round(max(GROWTH * logged, targets.typical_reply) / CHARACTERS_PER_TOKEN)
        answered = min(answered, teacher.max_tokens) if teacher else answered
        tokens_in, tokens_out = new * asked, new * answered
        overlong += bool(new) and longest is not None and asked + answered > longest
        total_in, total_out = total_in + tokens_in, total_out + tokens_out
        requests, cached, prompts = requests + new, cached + known, prompts + (new > 0)
        first, *others = question.rows
        fields = {"prompt_hash": question.prompt_hash, "tokens_in": tokens_in, "tokens_out": tokens_out}
        cost = price(teacher, tokens_in, tokens_out)
        rows.append(to_row(first, state="ask" if new else "cached", cost=cost, **fields))
        rows += [
            to_row(
                other, state="shared", why=f"answered with {first.origin}", prompt_hash=question.prompt_hash
            )
            for other in others
        ]
    listed = tuple(sorted([*rows, *targets.skipped], key=_by_origin))
    at_most = requests * teacher.max_tokens if teacher else total_out
    return RepairPlan(
        teacher=_name(teacher),
        faults=dict(Counter(row.fault for row in listed).most_common()),
        rows=listed,
        prompts=prompts,
        requests=requests,
        cached=cached,
        tokens_in=total_in,
        tokens_out=total_out,
        tokens_out_at_most=at_most,
        cost=price(teacher, total_in, total_out),
        cost_at_most=price(teacher, total_in, at_most),
        usable=targets.usable,
        small_groups=targets.small_groups,
        spent=count_spending(journal, teacher),
        limits=_find_short_budgets(teacher, journal, total_in, total_out),
        overlong=overlong,
    )


def _find_short_budgets(
    teacher: TeacherSettings | None, journal: ReplyJournal, tokens_in: int, tokens_out: int
) -> tuple[str, ...]:
    if teacher is None:
        return ()
    found = []
    total_in, total_out = journal.tokens_in + tokens_in, journal.tokens_out + tokens_out
    if teacher.max_total_tokens is not None and total_in + total_out > teacher.max_total_tokens:
        found.append(f"max_total_tokens {teacher.max_total_tokens:,} is less than {total_in + total_out:,}")
    cost = price(teacher, total_in, total_out)
    if teacher.max_cost is not None and cost is not None and cost > teacher.max_cost:
        found.append(f"max_cost ${teacher.max_cost:g} is less than ${cost:.2f}")
    return tuple(found)


def run_repair(
    targets: RepairTargets,
    *,
    teacher: Teacher,
    rules: AcceptanceRules,
    out: Path,
    stopping: threading.Event | None = None,
    on_progress: OnProgress = lambda _done, _total: None,
) -> RepairOutcome:
    """Decide every row. An error that no retry fixes ends it; answers are kept, the same call resumes."""
    decisions = _decide_all(
        targets.questions, teacher, rules, stopping=stopping or threading.Event(), on_progress=on_progress
    )
    longest = longest_row(rules.settings)
    lines: list[bytes] = []
    rows: list[RepairRow] = []
    overlong = 0
    for question, (state, why, reply) in zip(targets.questions, decisions, strict=True):
        first, *others = question.rows
        shared: dict[str, Any] = {"state": state, "why": why, "prompt_hash": question.prompt_hash}
        stated = {**shared}
        if reply is not None:
            stated |= {"tokens_in": reply.tokens_in, "tokens_out": reply.tokens_out}
        if state == "accepted" and reply is not None:
            lines.append(write_row(question, reply, teacher.settings))
            tokens = estimate_tokens(question.row.messages) + reply.tokens_out
            overlong += longest is not None and tokens > longest
            # Rows that share a prompt share its fate; the accepted row replaces the first of them.
            shared |= {"state": "shared", "why": f"answered with {first.origin}"}
        rows += [to_row(first, **stated), *(to_row(other, **shared) for other in others)]
    write_atomic(out, b"".join(lines), private=True)
    listed = tuple(sorted([*rows, *targets.skipped], key=_by_origin))
    return RepairOutcome(
        teacher=_name(teacher.settings),
        file=str(out),
        rows=listed,
        written=len(lines),
        states=dict(Counter(row.state for row in listed).most_common()),
        spent=teacher.spent(),
        usable_before=targets.usable,
        overlong=overlong,
        in_logs=False,
    )


def longest_row(settings: DataSettings) -> int | None:
    """The tokens beyond which `graft data prepare` drops a row; None where it shortens rows instead."""
    return settings.max_tokens if settings.overlong == "drop" else None


def _decide_all(
    questions: Sequence[RepairQuestion],
    teacher: Teacher,
    rules: AcceptanceRules,
    *,
    stopping: threading.Event,
    on_progress: OnProgress,
) -> list[RepairDecision]:
    def work(question: RepairQuestion) -> RepairDecision:
        if stopping.is_set():
            return RepairDecision("unanswered", "the run is being stopped")
        try:
            return decide(question, teacher, rules)
        except BaseException:
            # At once: no other thread may begin a request that has to be paid for.
            stopping.set()
            raise

    def give_up() -> None:
        # What waits between two attempts ends now, what was asked is still journaled.
        stopping.set()
        teacher.give_up()

    done = count(1)
    return ask_many(
        questions,
        work,
        together=teacher.settings.concurrency,
        on_reply=lambda _question, _decision: on_progress(next(done), len(questions)),
        give_up=give_up,
    )


def decide(question: RepairQuestion, teacher: Teacher, rules: AcceptanceRules) -> RepairDecision:
    """Ask for every sample of one question, and accept or refuse the answer."""
    try:
        replies = [
            teacher.answer(question.row.messages, question.prompt_hash, sample)
            for sample in range(rules.settings.repair.samples)
        ]
    except BudgetSpent as spent:
        return RepairDecision("over_budget", str(spent))
    except NoReply as trouble:
        return RepairDecision("unanswered", str(trouble))
    return rules.decide(question, replies)


def write_row(question: RepairQuestion, reply: KeptReply, settings: TeacherSettings) -> bytes:
    """One line of the log of repaired rows."""
    row, first = question.row, question.rows[0]
    origin = AnswerOrigin(
        by="teacher",
        name=settings.model,
        at=reply.at,
        prompt_hash=question.prompt_hash,
        replaces=first.input_hash,
        reason=first.fault if first.fault != AUGMENT else first.reason,
    )
    values = {
        "id": row.id if first.fault == AUGMENT else f"repaired-{question.prompt_hash[:16]}",
        "messages": [{"role": turn.role, "content": turn.content} for turn in row.messages],
        "reply": reply.text,
        "group": row.group,
        "domain": row.domain,
        "session": row.session,
        "stage": row.stage,
        "extra": {key: value for key, value in row.extra.items() if key != "errors"},
        "answered": origin.model_dump(mode="json"),
    }
    return orjson.dumps({key: value for key, value in values.items() if value is not None}) + b"\n"


def _by_origin(row: RepairRow) -> tuple[str, int, bool]:
    return row.origin.file, row.origin.line, row.fault == AUGMENT


def _name(teacher: TeacherSettings | None) -> str:
    return f"{teacher.address}#{teacher.model}" if teacher is not None else ""
