"""Which prompts a teacher is asked: rows that are dropped for a fault, and new rows for small roles.

In: the corpus, its split assignment, the settings. Out: one question per distinct prompt, and the rows that
are not asked, with the reason. Prompts are redacted whatever the settings say: they leave the machine.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from graftwork.data.audit.corpus_findings import RARE
from graftwork.data.audit.row_checks import redact_row
from graftwork.data.corpus.store import Corpus
from graftwork.data.dedup.repeats import find_repeats
from graftwork.data.settings import DataSettings, RepairSettings
from graftwork.data.split.assignment import TRAIN, UNASSIGNED, SplitAssignment, draw
from graftwork.records.base import fingerprint
from graftwork.records.dataset import AUGMENT, RepairRow
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Interaction, Message, Origin

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
        found = questions.get(key)
        rows = (target,) if found is None else (*found.rows, target)
        questions[key] = RepairQuestion(key, clean if found is None else found.row, rows)
    added = _augment(corpus, assignment, usable, settings=settings, taken=set(questions))
    replies = corpus.column("reply_chars")[usable]
    roles = corpus.labels("group")
    counts = np.bincount(roles.numbers[usable & (roles.numbers >= 0)], minlength=len(roles.names))
    by_role = sorted(zip(roles.names, counts.tolist(), strict=True)) if len(roles.names) > 1 else []
    small = {name: count for name, count in by_role if count < RARE}
    return RepairTargets(
        [*questions.values(), *added],
        skipped,
        usable=int(usable.sum()),
        small_groups=small,
        typical_reply=int(np.median(replies)) if len(replies) else 0,
    )


def to_row(target: TargetRow, **fields: Any) -> RepairRow:
    named = {"origin": target.origin, "group": target.group, "fault": target.fault, "reason": target.reason}
    return RepairRow(**{**named, **fields})


def _list_faulty(
    corpus: Corpus, assignment: SplitAssignment, passed: "np.ndarray[Any, Any]", settings: RepairSettings
) -> Iterator[tuple[Interaction, TargetRow, str]]:
    faults, reasons = corpus.labels("fault"), corpus.labels("reason")
    wanted = [number for number, name in enumerate(faults.names) if name in settings.faults]
    places = np.flatnonzero(np.isin(faults.numbers, wanted) & ~passed)
    prompts, turns = corpus.column("prompt"), corpus.column("turn")
    held_out = passed & (assignment.split != TRAIN) & (assignment.split != UNASSIGNED)
    answered = np.isin(prompts[places], prompts[passed])
    held = np.isin(turns[places], turns[held_out])
    hashes: dict[int, str] = {}
    for first, segment in corpus.by_segment():
        inside = places[(places >= first) & (places < first + segment.stop - segment.start)]
        if len(inside):
            block = corpus.read_columns(segment, ["input_hash"])["input_hash"]
            hashes |= {place: block[place - first] for place in inside.tolist()}
    for at, (place, row) in enumerate(corpus.rows_at(places.tolist())):
        if not row.question.strip():
            continue  # nothing is asked: no teacher can answer it
        target = TargetRow(
            origin=row.origin,
            input_hash=hashes[place],
            group=row.group,
            fault=faults.names[faults.numbers[place]],
            reason=reasons.names[reasons.numbers[place]],
        )
        yield row, target, ANSWERED if answered[at] else HELD_OUT if held[at] else ""


def _augment(
    corpus: Corpus,
    assignment: SplitAssignment,
    usable: "np.ndarray[Any, Any]",
    *,
    settings: DataSettings,
    taken: set[str],
) -> list[RepairQuestion]:
    """Ask prompts of other roles in a small role, up to the share that settings allow."""
    repair = settings.repair
    if not repair.augment:
        return []
    roles = corpus.labels("group")
    # The share is that of all usable rows, the added ones included.
    room = int(usable.sum() * repair.augment_share / (1 - repair.augment_share))
    made: list[RepairQuestion] = []
    turns = corpus.column("turn")
    for role in repair.augment:
        if role not in roles.names:
            raise UserMistake(
                f"no row has the role {role!r}",
                why=f"the roles of the log are: {', '.join(sorted(roles.names)[:20]) or 'none'}",
                fix="name one of these: --augment role=NAME",
                where="--augment",
            )
        own = roles.numbers == roles.names.index(role)
        # The system prompt that most of the role's rows have.
        prompts = Counter(
            "\n\n".join(message.content for message in row.messages if message.role == "system")
            for _, row in corpus.rows_at(np.flatnonzero(own)[:1000].tolist())
        )
        system = max(sorted(prompts), key=lambda text: prompts[text]) if prompts else None
        trained = usable & (assignment.split == TRAIN) & ~own & ~np.isin(turns, turns[own])
        places = np.flatnonzero(trained)
        order = places[np.argsort(draw(turns[places], seed=settings.seed), kind="stable")]
        lacking = min(repair.augment_to - int((usable & own).sum()), room - len(made))
        for question in _ask_as(role, system, corpus, order, reason=f"{AUGMENT}: role {role}"):
            if lacking <= 0:
                break
            if question.prompt_hash not in taken:
                taken.add(question.prompt_hash)
                made.append(question)
                lacking -= 1
    return made


def _ask_as(
    role: str, system: str | None, corpus: Corpus, order: "np.ndarray[Any, Any]", *, reason: str
) -> Iterator[RepairQuestion]:
    for place in order.tolist():
        (_, row), *_ = corpus.rows_at([place])
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
