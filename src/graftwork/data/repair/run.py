"""Runs a repair: plans it with its cost, asks the teacher, and writes the accepted rows as a log.

In: targets, a teacher, rules. Out: a `RepairPlan`, or a `RepairOutcome` and a JSONL file in which each prompt
occurs once. The file is written from the journal of answers: a killed run loses and repeats nothing.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import orjson

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN
from graftwork.data.repair.acceptance import AcceptanceRules, RefusedReply
from graftwork.data.repair.targets import RepairQuestion, RepairTargets, to_row
from graftwork.data.repair.teacher import (
    AnswerJournal,
    Teacher,
    TeacherBudgetSpent,
    TeacherReply,
    TeacherUnavailable,
    count_spending,
    estimate_tokens,
    key_of,
    price,
)
from graftwork.data.settings import DataSettings, RepairSettings, TeacherSettings
from graftwork.files.disk import write_atomic
from graftwork.records.correction import AUGMENT, RepairOutcome, RepairPlan, RepairRow, RepairState
from graftwork.records.interaction import AnswerOrigin

GROWTH = 1.5
"""How much longer than the cut-off reply a whole one is expected to be."""

OnProgress = Callable[[int, int], None]


class RepairDecision(NamedTuple):
    state: RepairState
    why: str = ""
    reply: TeacherReply | None = None


def plan_repair(
    targets: RepairTargets, settings: RepairSettings, journal: AnswerJournal, *, longest: int | None = None
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
        asked, answered = _estimate_row(question, targets.typical_reply, teacher)
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


def _estimate_row(question: RepairQuestion, typical: int, teacher: TeacherSettings | None) -> tuple[int, int]:
    """The tokens of the prompt, and those of an answer to it."""
    logged = 0 if question.rows[0].fault == AUGMENT else len(question.row.reply)
    tokens = round(max(GROWTH * logged, typical) / CHARACTERS_PER_TOKEN)
    return estimate_tokens(question.row.messages), min(tokens, teacher.max_tokens) if teacher else tokens


def _find_short_budgets(
    teacher: TeacherSettings | None, journal: AnswerJournal, tokens_in: int, tokens_out: int
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
    lines = [
        write_row(question, decision.reply, teacher.settings)
        for question, decision in zip(targets.questions, decisions, strict=True)
        if decision.state == "accepted" and decision.reply is not None
    ]
    write_atomic(out, b"".join(lines), private=True)
    rows = [
        row
        for question, decision in zip(targets.questions, decisions, strict=True)
        for row in _report(question, decision)
    ]
    listed = tuple(sorted([*rows, *targets.skipped], key=_by_origin))
    return RepairOutcome(
        teacher=_name(teacher.settings),
        file=str(out),
        rows=listed,
        written=len(lines),
        states=dict(Counter(row.state for row in listed).most_common()),
        spent=teacher.spent(),
        usable_before=targets.usable,
        overlong=_count_overlong(targets.questions, decisions, rules.settings),
        in_logs=False,
    )


def longest_row(settings: DataSettings) -> int | None:
    """The tokens beyond which `graft data prepare` drops a row; None where it shortens rows instead."""
    return settings.max_tokens if settings.overlong == "drop" else None


def _count_overlong(
    questions: Sequence[RepairQuestion], decisions: Sequence[RepairDecision], settings: DataSettings
) -> int:
    longest = longest_row(settings)
    return sum(
        longest is not None
        and decision.state == "accepted"
        and decision.reply is not None
        and estimate_tokens(question.row.messages) + decision.reply.tokens_out > longest
        for question, decision in zip(questions, decisions, strict=True)
    )


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

    with ThreadPoolExecutor(max_workers=teacher.settings.concurrency) as pool:
        asked = [pool.submit(work, question) for question in questions]
        try:
            for done, future in enumerate(as_completed(asked), start=1):
                future.result()
                on_progress(done, len(asked))
        except BaseException:
            # Also on Ctrl-C: what waits between two attempts ends now, what was asked is still journaled.
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            teacher.give_up()
            raise
    return [future.result() for future in asked]


def decide(question: RepairQuestion, teacher: Teacher, rules: AcceptanceRules) -> RepairDecision:
    """Ask for every sample of one question, and accept or refuse the answer."""
    try:
        replies = [
            teacher.answer(question.row.messages, question.prompt_hash, sample)
            for sample in range(rules.settings.repair.samples)
        ]
    except TeacherBudgetSpent as spent:
        return RepairDecision("over_budget", str(spent))
    except TeacherUnavailable as trouble:
        return RepairDecision("unanswered", str(trouble))
    found = rules.decide(question, replies)
    if isinstance(found, RefusedReply):
        return RepairDecision("refused", found.why)
    return RepairDecision("accepted", reply=found.reply)


def write_row(question: RepairQuestion, reply: TeacherReply, settings: TeacherSettings) -> bytes:
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


def _report(question: RepairQuestion, decision: RepairDecision) -> list[RepairRow]:
    first, *others = question.rows
    tokens = {} if decision.reply is None else {"tokens_out": decision.reply.tokens_out}
    tokens |= {} if decision.reply is None else {"tokens_in": decision.reply.tokens_in}
    head = to_row(first, state=decision.state, why=decision.why, prompt_hash=question.prompt_hash, **tokens)
    # Rows that share a prompt share its fate; the accepted row replaces the first of them.
    state: RepairState = "shared" if decision.state == "accepted" else decision.state
    why = f"answered with {first.origin}" if decision.state == "accepted" else decision.why
    return [
        head,
        *(to_row(other, state=state, why=why, prompt_hash=question.prompt_hash) for other in others),
    ]


def _by_origin(row: RepairRow) -> tuple[str, int, bool]:
    return row.origin.file, row.origin.line, row.fault == AUGMENT


def _name(teacher: TeacherSettings | None) -> str:
    return f"{teacher.address}#{teacher.model}" if teacher is not None else ""
