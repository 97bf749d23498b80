"""Whether a teacher's answer may enter the data: the row's own checks, the project's, agreement, a judge.

In: a question and the answers to it. Out: the accepted answer, or the rule that refused it. Checks that
compare with the logged reply are left out: that reply is what is wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graftwork.data.audit.call_checks import UNMATCHED_CALL
from graftwork.data.audit.row_checks import find_fault
from graftwork.data.repair.targets import RepairQuestion
from graftwork.data.repair.teacher import TeacherReply
from graftwork.data.settings import DataSettings
from graftwork.grading.grade import right_or_wrong
from graftwork.grading.interface import CannotGrade, GradeContext, Rater
from graftwork.records.correction import CUT_OFF
from graftwork.records.report import Case
from graftwork.text.shape import find_garble
from graftwork.text.words import words


class AcceptedReply(NamedTuple):
    reply: TeacherReply


class RefusedReply(NamedTuple):
    why: str


@dataclass(frozen=True)
class AcceptanceRules:
    settings: DataSettings
    grading: GradeContext = field(default_factory=GradeContext)
    """With the checks of the project."""
    judge: Rater | None = None

    def decide(
        self, question: RepairQuestion, replies: Sequence[TeacherReply]
    ) -> AcceptedReply | RefusedReply:
        reasons = [self._find_reason(question, reply) for reply in replies]
        passed = [reply for reply, reason in zip(replies, reasons, strict=True) if reason is None]
        if not passed:
            return RefusedReply(next(reason for reason in reasons if reason is not None))
        best = passed[0]
        if len(replies) > 1:
            best, agreement = choose_agreed(passed, samples=len(replies))
            if agreement < self.settings.repair.agreement:
                least = self.settings.repair.agreement
                return RefusedReply(f"samples agree by {agreement:.2f}, less than {least:g}")
        refusal = self._judge(question, best)
        return AcceptedReply(best) if refusal is None else RefusedReply(refusal)

    def _find_reason(self, question: RepairQuestion, reply: TeacherReply) -> str | None:
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
        return f"damaged text: {garble}" if garble else self._fail_check(question, reply.text)

    def _fail_check(self, question: RepairQuestion, text: str) -> str | None:
        case = to_case(question)
        for check in right_or_wrong(self.grading.checks.values()):
            if check.against_reference:
                continue
            try:
                grade = check.grade(case, text, self.grading)
            except CannotGrade as error:
                return f"check {check.name}: {error}"
            if grade is not None and grade < 1:
                return f"check {check.name} failed"
        return None

    def _judge(self, question: RepairQuestion, reply: TeacherReply) -> str | None:
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


def choose_agreed(replies: Sequence[TeacherReply], *, samples: int) -> tuple[TeacherReply, float]:
    """Return the reply that agrees best with the others, and its mean similarity to them.

    Samples that were refused agree with none.
    """
    bags = [Counter(words(reply.text)) for reply in replies]
    means = [
        sum(_share_words(bag, other) for at, other in enumerate(bags) if at != place) / (samples - 1)
        for place, bag in enumerate(bags)
    ]
    best = max(range(len(replies)), key=lambda place: (means[place], -place))
    return replies[best], means[best]


def _share_words(one: Counter[str], other: Counter[str]) -> float:
    """The F1 score of the shared words."""
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0
