"""Runs a repair: finds the prompts to ask, plans the cost, asks the teacher, writes accepted rows as a log.

Input: the corpus, its split assignment, a teacher, rules. It asks about rows that are dropped for a fault,
and for new rows for small roles, within a budget and a rate; prompts are redacted whatever the settings say,
since they leave the machine. Output: a `RepairPlan`, or a `RepairOutcome` and a JSONL file in which each
prompt occurs once. The file is written from the journal of answers: a killed run loses and repeats nothing.
An answer is accepted by the row's own checks, the project's, agreement and a judge; checks that compare with
the logged reply are left out: that reply is what is wrong.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from graftwork.data.audit.corpus_findings import RARE
from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN, UNMATCHED_CALL, find_fault, redact_row
from graftwork.data.corpus.store import Corpus
from graftwork.data.dedup.repeats import find_repeats
from graftwork.data.settings import DataSettings, RepairSettings, TeacherSettings
from graftwork.data.split.assignment import TRAIN, UNASSIGNED, SplitAssignment, draw
from graftwork.engines.endpoint import EndpointEngine, EndpointPolicy, EndpointRole, TryAgain
from graftwork.engines.interface import DecodingSettings, EngineReply
from graftwork.files.disk import write_atomic
from graftwork.grading.checks import right_or_wrong
from graftwork.grading.interface import CannotGrade, GradeContext, Rater
from graftwork.process.asking import Asker, BudgetSpent, KeptReply, NoReply, ReplyJournal, ask_many
from graftwork.process.http_client import FIRST_PAUSE, Retries
from graftwork.records.base import fingerprint
from graftwork.records.dataset import (
    AUGMENT,
    CUT_OFF,
    RepairOutcome,
    RepairPlan,
    RepairRow,
    RepairState,
    TeacherSpending,
)
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.interaction import AnswerOrigin, Interaction, Message, Origin
from graftwork.records.report import Case, Endpoint
from graftwork.text.shape import find_garble
from graftwork.text.words import words

JOURNAL_FILE = "answers.jsonl"
ATTEMPTS = 5
LONGEST_PAUSE = 30.0
WARM = 0.7
"""The temperature of further samples: at 0 they would all be the same."""
ANSWER_SECONDS = 120.0
"""The longest time for one request."""
TOKENS_PER_MESSAGE = 4
AUGMENT_SHARE = 0.2
"""Largest share of added rows among all usable rows."""
TEACHER = EndpointRole(
    name="the teacher",
    key_fix="check the key, or name its variable as data.repair.teacher.api_key_env",
    fix="check data.repair.teacher.url and data.repair.teacher.model",
    refusal=EnvironmentFailure,
)


class TeacherClient(Protocol):
    """One attempt at one request. Raises `TryAgain` where another attempt makes sense."""

    def ask_once(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply: ...


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of a prompt by its characters: the teacher's tokenizer is not known."""
    characters = sum(len(message.content) for message in messages)
    return round(characters / CHARACTERS_PER_TOKEN) + TOKENS_PER_MESSAGE * len(messages)


def price(settings: TeacherSettings | None, tokens_in: int, tokens_out: int) -> float | None:
    """Return the cost in dollars; None without prices."""
    if settings is None or settings.price_in is None or settings.price_out is None:
        return None
    return (tokens_in * settings.price_in + tokens_out * settings.price_out) / 1e6


def decoding_of(settings: TeacherSettings, sample: int) -> DecodingSettings:
    # The first sample is greedy.
    warm = WARM if sample else 0.0
    return DecodingSettings(settings.max_tokens, temperature=warm, seed=sample)


def key_of(settings: TeacherSettings, prompt_hash: str, sample: int) -> str:
    """A hash of all that decides the answer."""
    decoding = decoding_of(settings, sample)
    return fingerprint([settings.address, settings.model, prompt_hash, *decoding])


class RateLimit:
    """Spaces requests evenly. `wait` passes a pause; a true result means: stop."""

    def __init__(
        self,
        per_minute: float | None,
        *,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._wait, self._clock = wait, clock
        self._next = 0.0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Wait for the next slot; False if everything is being stopped."""
        with self._lock:
            now = self._clock()
            slot = max(self._next, now)
            self._next = slot + self._gap
        return not (slot > now and self._wait(slot - now))


class Teacher:
    """Asks each prompt and sample once. Threads may share one."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        client: TeacherClient,
        journal: ReplyJournal,
        wait: Callable[[float], object] = time.sleep,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.settings = settings
        self._client, self._wait = client, wait
        self._first_pause = first_pause
        self._limit = RateLimit(settings.requests_per_minute, wait=wait)
        self._asker = Asker(journal, refuse=self._find_exceeded)

    def _find_exceeded(self, tokens_in: int, tokens_out: int) -> str | None:
        settings = self.settings
        limit, cost = settings.max_total_tokens, price(settings, tokens_in, tokens_out)
        if limit is not None and tokens_in + tokens_out > limit:
            return f"max_total_tokens {limit:,} would be exceeded"
        if settings.max_cost is not None and cost is not None and cost > settings.max_cost:
            return f"max_cost ${settings.max_cost:g} would be exceeded"
        return None

    def answer(self, messages: Sequence[Message], prompt_hash: str, sample: int) -> KeptReply:
        """Raise NoReply, BudgetSpent, or a GraftError that no retry fixes."""
        return self._asker.ask(
            key_of(self.settings, prompt_hash, sample),
            lambda: self._ask(messages, decoding_of(self.settings, sample)),
            most_in=estimate_tokens(messages),
            most_out=self.settings.max_tokens,
        )

    def give_up(self) -> None:
        """End requests that cost nothing but time: those to an engine on this machine."""
        stop = getattr(self._client, "stop", None)
        if stop is not None:
            stop()

    def spent(self) -> TeacherSpending:
        return count_spending(self._asker.journal, self.settings)

    def _ask(self, messages: Sequence[Message], decoding: DecodingSettings) -> KeptReply:
        retries = Retries(attempts=ATTEMPTS, first_pause=self._first_pause, longest_pause=LONGEST_PAUSE)
        # Tool results as user turns: endpoints refuse the role `tool` without the id of a call.
        sent = tuple(
            Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
            if message.role == "tool"
            else message
            for message in messages
        )
        while True:
            if not self._limit.take():
                raise NoReply("the run is being stopped")
            try:
                reply = self._client.ask_once(sent, decoding)
            except TryAgain as trouble:
                pause = 0.0 if trouble.adapted else retries.after_failure(asked=trouble.wait)
                if pause is None:
                    why = f"no answer in {retries.failed} attempts: {trouble}"
                    raise NoReply(why) from trouble
                if pause and self._wait(pause):
                    raise NoReply("the run is being stopped") from trouble
            else:
                tokens_in = reply.prompt_tokens or estimate_tokens(messages)
                tokens_out = reply.tokens or round(len(reply.text) / CHARACTERS_PER_TOKEN)
                return KeptReply(reply.text, tokens_in, tokens_out, reply.finish_reason)


def count_spending(journal: ReplyJournal, settings: TeacherSettings | None) -> TeacherSpending:
    return TeacherSpending(
        requests=journal.requests,
        tokens_in=journal.tokens_in,
        tokens_out=journal.tokens_out,
        lost=journal.lost,
        cost=price(settings, journal.tokens_in, journal.tokens_out),
    )


def open_client(settings: TeacherSettings) -> TeacherClient:
    """Return the client of a teacher at an endpoint."""
    assert settings.url is not None
    endpoint = Endpoint(
        url=settings.url,
        model=settings.model,
        api_key_env=settings.api_key_env,
        concurrency=settings.concurrency,
        attempts=ATTEMPTS,
        timeout_seconds=ANSWER_SECONDS,
    )
    return EndpointEngine(endpoint, EndpointPolicy(role=TEACHER, streamed=False))


ANSWERED = "a usable row of the log answers the same prompt"
HELD_OUT = "it asks what a held-out row asks: the answer could be neither trained on nor tested against"


class TargetRow(NamedTuple):
    """A row that is replaced; `input_hash` is that of its log line."""

    origin: Origin
    input_hash: str
    group: str | None
    fault: str
    reason: str


class RepairQuestion(NamedTuple):
    """A prompt to ask once. `rows` share it, the first of them is replaced; an added row has none."""

    prompt_hash: str
    row: Interaction
    rows: tuple[TargetRow, ...]


class RepairTargets(NamedTuple):
    questions: list[RepairQuestion]
    skipped: list[RepairRow]
    usable: int
    small_groups: dict[str, int]
    typical_reply: int
    """The median length of a usable reply, in characters."""


def hash_prompt(messages: Sequence[Message]) -> str:
    return fingerprint([[message.role, message.content] for message in messages])


def find_targets(corpus: Corpus, assignment: SplitAssignment, *, settings: DataSettings) -> RepairTargets:
    repeats = find_repeats(corpus, settings=settings)
    passed = corpus.column("passed").astype(bool)
    usable = passed & (repeats.step == 0)
    questions: dict[str, RepairQuestion] = {}
    skipped: list[RepairRow] = []
    for row, target, why in _list_faulty(corpus, assignment, passed, settings.repair):
        if why:
            skipped.append(to_row(target, state="skipped", why=why))
            continue
        clean = redact_row(row).row
        key = hash_prompt(clean.messages)
        question = questions.get(key)
        rows = (target,) if question is None else (*question.rows, target)
        questions[key] = RepairQuestion(key, clean if question is None else question.row, rows)
    added = _augment(corpus, assignment, usable, settings=settings, asked_hashes=set(questions))
    replies = corpus.column("reply_chars")[usable]
    roles, role_names = corpus.labels("group")
    counts = np.bincount(roles[usable & (roles >= 0)], minlength=len(role_names))
    by_role = sorted(zip(role_names, counts.tolist(), strict=True)) if len(role_names) > 1 else []
    small = {name: count for name, count in by_role if count < RARE}
    return RepairTargets(
        [*questions.values(), *added],
        skipped,
        usable=int(usable.sum()),
        small_groups=small,
        typical_reply=int(np.median(replies)) if len(replies) else 0,
    )


def to_row(target: TargetRow, **fields: Any) -> RepairRow:
    values = {"origin": target.origin, "group": target.group, "fault": target.fault, "reason": target.reason}
    return RepairRow(**{**values, **fields})


def _list_faulty(
    corpus: Corpus, assignment: SplitAssignment, passed: "np.ndarray[Any, Any]", settings: RepairSettings
) -> Iterator[tuple[Interaction, TargetRow, str]]:
    (faults, fault_names), (reasons, reason_names) = corpus.labels("fault"), corpus.labels("reason")
    positions = np.flatnonzero(corpus.has_label("fault", *settings.faults) & ~passed)
    prompts, turns = corpus.column("prompt"), corpus.column("turn")
    held_out = passed & (assignment.split != TRAIN) & (assignment.split != UNASSIGNED)
    answered = np.isin(prompts[positions], prompts[passed])
    is_held_out = np.isin(turns[positions], turns[held_out])
    hashes: dict[int, str] = {}
    for first, segment in corpus.by_segment():
        inside = positions[(positions >= first) & (positions < first + segment.stop - segment.start)]
        if len(inside):
            block = corpus.read_columns(segment, ["input_hash"])["input_hash"]
            hashes |= {position: block[position - first] for position in inside.tolist()}
    for index, (position, row) in enumerate(corpus.rows_at(positions.tolist())):
        if not row.question.strip():
            continue  # nothing is asked: no teacher can answer it
        target = TargetRow(
            origin=row.origin,
            input_hash=hashes[position],
            group=row.group,
            fault=fault_names[faults[position]],
            reason=reason_names[reasons[position]],
        )
        yield row, target, ANSWERED if answered[index] else HELD_OUT if is_held_out[index] else ""


def _augment(
    corpus: Corpus,
    assignment: SplitAssignment,
    usable: "np.ndarray[Any, Any]",
    *,
    settings: DataSettings,
    asked_hashes: set[str],
) -> list[RepairQuestion]:
    """Ask prompts of other roles in a small role, up to `AUGMENT_SHARE`."""
    repair = settings.repair
    if not repair.augment:
        return []
    roles, role_names = corpus.labels("group")
    # The share is that of all usable rows, the added ones included.
    room = int(usable.sum() * AUGMENT_SHARE / (1 - AUGMENT_SHARE))
    added: list[RepairQuestion] = []
    turns = corpus.column("turn")
    for role in repair.augment:
        if role not in role_names:
            raise UserError(
                f"no row has the role {role!r}",
                why=f"the roles of the log are: {', '.join(sorted(role_names)[:20]) or 'none'}",
                fix="use one of these: --augment role=NAME",
                where="--augment",
            )
        of_role = roles == role_names.index(role)
        # The system prompt that most of the role's rows have.
        prompts = Counter(
            "\n\n".join(message.content for message in row.messages if message.role == "system")
            for _, row in corpus.rows_at(np.flatnonzero(of_role)[:1000].tolist())
        )
        system = max(sorted(prompts), key=lambda text: prompts[text]) if prompts else None
        trained = usable & (assignment.split == TRAIN) & ~of_role & ~np.isin(turns, turns[of_role])
        positions = np.flatnonzero(trained)
        order = positions[np.argsort(draw(turns[positions], seed=settings.seed), kind="stable")]
        lacking = min(repair.augment_to - int((usable & of_role).sum()), room - len(added))
        for question in _ask_as(role, system, corpus, order, reason=f"{AUGMENT}: role {role}"):
            if lacking <= 0:
                break
            if question.prompt_hash not in asked_hashes:
                asked_hashes.add(question.prompt_hash)
                added.append(question)
                lacking -= 1
    return added


def _ask_as(
    role: str, system: str | None, corpus: Corpus, order: "np.ndarray[Any, Any]", *, reason: str
) -> Iterator[RepairQuestion]:
    for position in order.tolist():
        (_, row), *_ = corpus.rows_at([position])
        clean = redact_row(row).row
        turns = tuple(message for message in clean.messages if message.role != "system")
        messages = ((Message(role="system", content=system),) if system else ()) + turns
        key = hash_prompt(messages)
        new = clean.model_copy(
            update={
                "id": f"{AUGMENT}-{key[:16]}",
                "messages": messages,
                "group": role,
                "session": None,
                "reply": "",
                "rejected": None,
                "finish_reason": None,
                "max_tokens": None,
            }
        )
        yield RepairQuestion(key, new, (TargetRow(row.origin, "", role, AUGMENT, reason),))


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
            return f"the judge gave no score: {error}"
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

    def share_words(first: Counter[str], second: Counter[str]) -> float:
        """The F1 score of the shared words."""
        total = first.total() + second.total()
        return 2 * (first & second).total() / total if total else 1.0

    means = [
        sum(share_words(bag, second) for index, second in enumerate(bags) if index != number) / (samples - 1)
        for number, bag in enumerate(bags)
    ]
    best = max(range(len(replies)), key=lambda number: (means[number], -number))
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
        journaled = sum(
            teacher is not None and journal.get(key_of(teacher, question.prompt_hash, sample)) is not None
            for sample in range(settings.samples)
        )
        new = settings.samples - journaled
        # The tokens of the prompt, and those of an answer to it.
        prompt_tokens = estimate_tokens(question.row.messages)
        logged = 0 if question.rows[0].fault == AUGMENT else len(question.row.reply)
        answered = round(max(GROWTH * logged, targets.typical_reply) / CHARACTERS_PER_TOKEN)
        answered = min(answered, teacher.max_tokens) if teacher else answered
        tokens_in, tokens_out = new * prompt_tokens, new * answered
        overlong += bool(new) and longest is not None and prompt_tokens + answered > longest
        total_in, total_out = total_in + tokens_in, total_out + tokens_out
        requests, cached, prompts = requests + new, cached + journaled, prompts + (new > 0)
        first, *duplicates = question.rows
        fields = {"prompt_hash": question.prompt_hash, "tokens_in": tokens_in, "tokens_out": tokens_out}
        cost = price(teacher, tokens_in, tokens_out)
        rows.append(to_row(first, state="ask" if new else "cached", cost=cost, **fields))
        rows += [
            to_row(
                duplicate,
                state="shared",
                why=f"answered with {first.origin}",
                prompt_hash=question.prompt_hash,
            )
            for duplicate in duplicates
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
    problems = []
    total_in, total_out = journal.tokens_in + tokens_in, journal.tokens_out + tokens_out
    if teacher.max_total_tokens is not None and total_in + total_out > teacher.max_total_tokens:
        problems.append(
            f"max_total_tokens {teacher.max_total_tokens:,} is less than {total_in + total_out:,}"
        )
    cost = price(teacher, total_in, total_out)
    if teacher.max_cost is not None and cost is not None and cost > teacher.max_cost:
        problems.append(f"max_cost ${teacher.max_cost:g} is less than ${cost:.2f}")
    return tuple(problems)


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
        first, *duplicates = question.rows
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
        rows += [to_row(first, **stated), *(to_row(duplicate, **shared) for duplicate in duplicates)]
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
    """The tokens beyond which `graft data prepare` drops a row; None if it shortens rows instead."""
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
