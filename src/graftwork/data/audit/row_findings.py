"""Findings about single rows, made from the notes of `row_checks`.

Covers bad replies, placeholder prompts, secrets and personal data, control tokens, damaged text, overlong
rows, other models, unconfirmed captures and unreadable rows.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from graftwork.data.audit.findings import (
    MOST_EXAMPLES,
    AuditFacts,
    NoteCount,
    Wording,
    count_rows,
    finding_from_notes,
    finding_from_rows,
    merge_faults,
    say_fix,
)
from graftwork.data.audit.row_checks import (
    BROKEN_CALL,
    BROKEN_EARLIER_CALL,
    CAPTURES_FILTER,
    CONTROL_TOKENS,
    ENCODING,
    NEGATIVE_FEEDBACK,
    NOT_KEPT,
    RATED_BAD,
    REASONING,
    REPEATED_CALL,
    REVIEWED,
    SERVED,
    STATUS_PREFIX,
    TAUGHT,
    TOO_LONG,
    TRIED_OUT,
    UNMATCHED_CALL,
    note_length,
)
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import Finding, Severity

MOST_STATUSES = 6


class BadReply(NamedTuple):
    what: str
    effect: str
    fix: Callable[[DataSettings], str]
    severity: Severity = "blocker"


def find_bad_replies(facts: AuditFacts) -> Iterator[Finding]:
    for code, reply in BAD_REPLIES.items():
        noted = facts.notes[code]
        if not noted.count:
            continue
        title = count_rows(noted.count, reply.what)
        if code == "failed_status":
            # The statuses are named: an unexpected value would otherwise look like a failure.
            statuses = noted.say_reasons(MOST_STATUSES).replace(f"{STATUS_PREFIX} ", "")
            title += f": {statuses}" if statuses else ""
        yield finding_from_notes(
            facts,
            code,
            reply.severity,
            wording=Wording(title=title, effect=reply.effect, fix=reply.fix(facts.settings)),
        )


def _fix_failed(settings: DataSettings) -> str:
    return say_fix("drop_failed", on=settings.drop_failed, done="drops these")


def _fix_calls(settings: DataSettings) -> str:
    return (
        say_fix("drop_broken_calls", on=settings.drop_broken_calls, done="drops these")
        + "; a teacher can answer them (`graft data repair --dry-run`)"
    )


BAD_REPLIES = {
    NEGATIVE_FEEDBACK: BadReply(
        "are captured replies that users said are bad",
        "such rows teach the model to repeat its mistakes",
        lambda settings: (
            "`graft data prepare` drops these always; a correction sent to /v1/feedback makes one a good row"
        ),
    ),
    TRIED_OUT: BadReply(
        "are held-out questions that `graft run` asked to try a release out",
        "trained on, they would make the evaluation measure memorization",
        lambda settings: "`graft data prepare` and `graft data captures` leave these out always",
        "warning",
    ),
    CAPTURES_FILTER: BadReply(
        "are captured exchanges that data.captures leaves out",
        "they are not trained on",
        lambda settings: "data.captures says which captured exchanges are used",
        "info",
    ),
    REVIEWED: BadReply(
        "were rejected by a reviewer",
        "they are not trained on, and neither are the rows that they were rejected in place of",
        lambda settings: "`graft data prepare` drops these always",
        "info",
    ),
    "failed_status": BadReply(
        "state a status that does not count as success",
        "such rows teach the model to answer with failures",
        lambda settings: (
            f"{_fix_failed(settings)}; data.keep_status names what counts as success "
            f"({', '.join(settings.keep_status)})"
        ),
    ),
    "claims_success_but_fails": BadReply(
        "are not marked as failed, and the reply reports a failure",
        "such rows teach the model to answer with error messages",
        lambda settings: f"{_fix_failed(settings)}; let the logger write the true status",
    ),
    NOT_KEPT: BadReply(
        "do not meet the condition of data.keep",
        "they are not trained on, and are not references for tests",
        lambda settings: f"data.keep is `{settings.keep}`; ` or FIELD missing` keeps rows without the field",
        "info",
    ),
    RATED_BAD: BadReply(
        "are labeled bad or scored too low by the log (0 or less, or below data.rated_bad_below)",
        "trained on as they are, such rows teach the model what its judges rejected",
        lambda settings: (
            f"{say_fix('drop_rated_bad', on=settings.drop_rated_bad, done='drops these')}; "
            "for `train.objective: kto` set data.drop_rated_bad to false and train.preferences.least_score"
        ),
    ),
    "empty": BadReply(
        "have no question or no reply",
        "such rows teach the model to say nothing",
        lambda settings: "`graft data prepare` drops these always",
    ),
    "placeholder": BadReply(
        "have a placeholder instead of an answer",
        "such rows teach the model to answer with placeholders",
        lambda settings: (
            say_fix("drop_placeholders", on=settings.drop_placeholders, done="drops these")
            + "; a teacher can answer them (`graft data repair --dry-run`)"
        ),
    ),
    "truncated": BadReply(
        "are cut off before the end of the reply",
        "such rows teach the model to stop mid-reply",
        lambda settings: (
            say_fix("drop_truncated", on=settings.drop_truncated, done="drops these")
            + "; raise the token limit where they were logged, or let a teacher answer them again "
            "(`graft data repair --dry-run`)"
        ),
    ),
    BROKEN_CALL: BadReply(
        "have replies with tool calls that cannot be carried out",
        "such rows teach the model to make calls that fail",
        _fix_calls,
    ),
    REPEATED_CALL: BadReply(
        "have replies that make the same tool call again after the same result",
        "such rows teach the model to go round in a loop",
        _fix_calls,
        "warning",
    ),
    UNMATCHED_CALL: BadReply(
        "have tool results without a call, or calls without a result",
        "the reply may follow from what the model does not see",
        lambda settings: (
            say_fix("drop_unmatched_calls", on=settings.drop_unmatched_calls, done="drops these")
            + "; let the logger write calls and results together"
        ),
        "warning",
    ),
}


def find_placeholder_prompts(facts: AuditFacts) -> Iterator[Finding]:
    count = facts.notes["placeholder_prompt"].count
    if count:
        yield finding_from_notes(
            facts,
            "placeholder_prompt",
            "warning",
            wording=Wording(
                title=count_rows(count, "have made-up content in the prompt"),
                effect="the reply cannot follow from such a prompt: the model learns to invent",
                fix="log the real content, or leave these rows out of the file",
            ),
        )


def find_earlier_calls(facts: AuditFacts) -> Iterator[Finding]:
    noted = facts.notes[BROKEN_EARLIER_CALL]
    if not noted.count:
        return
    settings = facts.settings
    fix = "with `data.train_on: last` these calls are context, and never trained on"
    if settings.train_on != "last":
        fix = say_fix(
            "drop_broken_calls", on=settings.drop_broken_calls, done="does not train on these calls"
        )
    yield finding_from_notes(
        facts,
        BROKEN_EARLIER_CALL,
        "warning",
        wording=Wording(
            title=count_rows(noted.count, "have tool calls before the reply that cannot be carried out")
            + f" ({noted.say_reasons(4)})",
            effect="trained on, they teach the model to make calls that fail",
            fix=fix,
        ),
    )


def find_private_data(facts: AuditFacts) -> Iterator[Finding]:
    fix = say_fix("redact", on=facts.settings.redact, done="puts placeholders in their place")
    for code, severity, what, effect, revoke in _PRIVATE:
        noted = facts.notes[code]
        if noted.count:
            yield finding_from_notes(
                facts,
                code,
                severity,
                wording=Wording(
                    title=f"{count_rows(noted.count, what)} ({noted.say_reasons()})",
                    effect=effect,
                    fix=fix + revoke,
                ),
            )


_PRIVATE: tuple[tuple[str, Severity, str, str, str], ...] = (
    (
        "secret",
        "blocker",
        "hold a secret",
        "a model repeats the secrets that it was trained on to anyone who asks",
        "; revoke them: they are in a log file",
    ),
    (
        "personal_data",
        "warning",
        "hold personal data",
        "the model may repeat it, and it cannot be removed from the weights",
        "",
    ),
)


def find_control_tokens_in_text(facts: AuditFacts) -> Iterator[Finding]:
    noted = facts.notes[CONTROL_TOKENS]
    if noted.count:
        whose = facts.context.base if facts.context.control_tokens else None
        yield finding_from_notes(
            facts,
            CONTROL_TOKENS,
            "warning",
            wording=Wording(
                title=count_rows(noted.count, f"hold control tokens of {whose or 'chat models'} as text")
                + f" ({noted.say_reasons(4)})",
                effect="read as control tokens, they forge turns: a quoted document can impersonate the "
                "system prompt",
                fix="`graft data prepare` tokenizes them as plain text and proves the loss mask of every row",
            ),
        )


# Below this many rows nothing is typical; below this share no script is.
ENOUGH_ROWS = 20
MAIN_SHARE = 0.9
NO_LETTERS = "none"


def find_damaged_text(facts: AuditFacts) -> Iterator[Finding]:
    count, rows, examples, reasons = merge_faults(facts, "encoding", noted=ENCODING)
    if count:
        yield Finding(
            code=ENCODING,
            severity="warning",
            count=count,
            rows=rows,
            examples=examples,
            reasons=reasons,
            title=count_rows(count, "have damaged characters"),
            effect="the model learns to reproduce the damage; rows that are not UTF-8 are lost",
            fix="read and write the log as UTF-8 where it is made, or convert it; `graft data prepare` drops "
            "and lists the rows that are not UTF-8",
        )


def find_other_scripts(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels("script")
    lettered = [number for number, name in enumerate(names) if name != NO_LETTERS]
    counts = np.bincount(numbers[np.isin(numbers, lettered)], minlength=len(names))
    labeled = int(counts.sum())
    if labeled < ENOUGH_ROWS or counts.max() < MAIN_SHARE * labeled:
        return
    main = int(counts.argmax())
    positions = np.flatnonzero(np.isin(numbers, lettered) & (numbers != main))
    if not len(positions):
        return
    counts_by_script = {
        names[number].capitalize(): int(counts[number])
        for number in np.argsort(-counts, kind="stable")
        if counts[number] and number != main
    }
    yield finding_from_rows(
        facts,
        ENCODING,
        "info",
        positions,
        show=lambda row, position: row.question,
        reasons=counts_by_script,
        wording=Wording(
            title=count_rows(
                len(positions), f"are not written in {names[main].capitalize()} letters like the rest"
            )
            + f" ({', '.join(f'{name} {count:,}' for name, count in counts_by_script.items())})",
            effect="too few to learn another language from, but enough to answer in it at the wrong time",
            fix="leave them out of the files under data.logs, or log more of them",
        ),
    )


_DONE = {
    "drop": "drops these",
    "split_by_turn": "makes a row of each turn, and drops what is still too long",
    "truncate": "leaves out the oldest turns until the row fits",
}
ALL_OF_IT = "cut at that length, the whole reply is lost"
THE_END = "cut at that length, the end of the reply is lost"
BUT_FOR_LENGTH = "of the rows that are usable after cleaning"


def find_overlong(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    settings, lengths, most = facts.settings, facts.lengths, facts.settings.max_tokens
    if facts.count_tokens is None:
        noted = facts.notes[TOO_LONG]
    else:
        noted = NoteCount()
        positions = np.flatnonzero(lengths.whole > most).tolist()
        examples = facts.read(positions[:MOST_EXAMPLES])
        for position in positions:
            reply = examples[position].reply if position in examples else ""
            prompt, whole = float(lengths.prompt[position]), int(lengths.whole[position])
            noted.add(position, note_length(reply, prompt, whole, most=most))
    if not noted.count:
        return
    excess = np.maximum(lengths.whole - most, 0)
    without_reply = int(np.count_nonzero((excess > 0) & (lengths.prompt >= most)))
    if len(noted.positions) == noted.count:
        usable = int(facts.usable[noted.positions].sum())
    else:  # not all noted rows are named
        usable = min(int(((excess > 0) & facts.usable).sum()), noted.count)
    cuts = {
        ALL_OF_IT: without_reply,
        THE_END: int(np.count_nonzero(excess)) - without_reply,
        BUT_FOR_LENGTH: usable,
    }
    qualifier = "" if lengths.is_counted else "about "
    longest = f"{qualifier}{int(lengths.whole.max(initial=0)):,}"
    longest += "" if lengths.is_counted else ", estimated from their characters"
    yield finding_from_notes(
        facts,
        TOO_LONG,
        "warning",
        notes=noted,
        reasons={why: rows for why, rows in cuts.items() if rows},
        wording=Wording(
            title=count_rows(noted.count, f"are longer than {most:,} tokens")
            + f" (the longest has {longest})",
            effect=f"a trainer that cuts at that length removes {qualifier}{int(excess.sum()):,} tokens from "
            "their ends and teaches the model not to finish",
            fix=f"`graft data prepare` {_DONE[settings.overlong]} (data.overlong: {settings.overlong}); "
            "or raise data.max_tokens",
        ),
    )


FOREIGN_MODEL = "foreign_model"
MOST_NAMED = 5
NO_BASE = "no base is named to compare the models of the rows with"
NO_MODEL = "no row names the model that answered"


def is_same_model(model: str, base: str) -> bool:
    """Whether a logged name means the base, as `smollm2-135m` means `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    name, base_name = _fold(model), _fold(base)
    return bool(name and base_name) and (name in base_name or base_name in name)


def find_foreign_models(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels("model")
    base = facts.context.base
    foreign = [number for number, name in enumerate(names) if base is None or not is_same_model(name, base)]
    positions = np.flatnonzero(np.isin(numbers, foreign))
    # Without a base no name is foreign, but several models in one log differ in style.
    if not len(positions) or (base is None and len(names) < 2):
        return
    counts = np.bincount(numbers[positions], minlength=len(names))
    order = [int(number) for number in np.argsort(-counts, kind="stable") if counts[number]]
    listing = ", ".join(f"{names[number]} {counts[number]:,}" for number in order[:MOST_NAMED])
    suffix = f" and {len(order) - MOST_NAMED} more" if len(order) > MOST_NAMED else ""
    unseen = "" if base is not None else f"; {NO_BASE}"
    what = "come from several models" if base is None else f"come from a model other than {base}"
    yield finding_from_rows(
        facts,
        FOREIGN_MODEL,
        "info",
        positions,
        show=lambda row, position: f"{row.model}: {row.reply}",
        reasons={names[number]: int(counts[number]) for number in order[:20]},
        wording=Wording(
            title=f"{count_rows(len(positions), what)} ({listing}{suffix}){unseen}",
            effect="the base learns the habits of each of them, including what it could not know itself",
            fix="keep the rows of the model whose answers you want, and check examples of each",
        ),
    )


def find_reasoning(facts: AuditFacts) -> Iterator[Finding]:
    count, rows = facts.notes[REASONING].count, facts.corpus.rows
    context = facts.context
    if not count or (context.base_reasons is not False and count == rows):
        return
    if context.base_reasons is False:
        title = count_rows(
            count, f"reason in tags before the answer, and {context.base or 'the base'} does not"
        )
        effect = "the model learns to reason in a format that its template and its users do not expect"
    else:
        title = count_rows(count, f"reason in tags before the answer, and the other {rows - count:,} do not")
        effect = "the model learns to do either at random, and spends its token limit on reasoning"
    if not (facts.labels("model")[0] >= 0).any():
        title += f"; {NO_MODEL}"
    fix = (
        "`graft data prepare` leaves the reasoning out (data.reasoning: drop)"
        if facts.settings.reasoning == "drop"
        else "set data.reasoning to drop to train on the answers alone, or keep rows of one kind only"
    )
    wording = Wording(title=title, effect=effect, fix=fix)
    yield finding_from_notes(facts, FOREIGN_MODEL, "warning", noted=REASONING, wording=wording)


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].casefold())


def find_unconfirmed_captures(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    positions = np.flatnonzero((facts.corpus.column("unconfirmed") == SERVED) & facts.usable)
    if not len(positions):
        return
    yield finding_from_rows(
        facts,
        "unconfirmed_captures",
        "info",
        positions,
        show=lambda row, _place: row.question,
        wording=Wording(
            title=count_rows(len(positions), "hold an unconfirmed served reply"),
            effect="they may be trained on; none is a reference for a test, or the model would grade itself",
            fix="send corrections to /v1/feedback, or set data.captures.positive_confirms (traces: "
            "traces_confirm); data.captures.feedback: positive leaves them out",
        ),
    )


def find_taught(facts: AuditFacts) -> Iterator[Finding]:
    import numpy as np

    positions = np.flatnonzero((facts.corpus.column("unconfirmed") == TAUGHT) & facts.usable)
    if not len(positions):
        return
    rows = f"{len(positions):,} of {int(facts.usable.sum()):,} usable rows"
    yield finding_from_rows(
        facts,
        "repaired",
        "info",
        positions,
        show=lambda row, _place: row.question,
        wording=Wording(
            title=f"{rows} {'was' if len(positions) == 1 else 'were'} answered by a teacher",
            effect="they are trained on and never held out: a test measures against replies of the log",
            fix="a model with `repaired: false` under models: is trained without them, and compared with",
        ),
    )


# The reasons say why each row could not be read.
_TITLES = {"parse_error": "are unreadable", "schema": "have a shape, a key or a type that does not fit"}
_UNKNOWN_SHAPE = ("no known shape", "no row of the format")
_DROPPED = "fix the lines in the log, or leave them: `graft data prepare` drops and lists them"
_MAP = (
    "set data.format, or give the paths of the question and the reply under data.mapping; "
    "`graft data prepare` drops and lists the others"
)


def find_unreadable(facts: AuditFacts) -> Iterator[Finding]:
    for code, title in _TITLES.items():
        count, rows, examples, reasons = merge_faults(facts, code)
        if count:
            yield Finding(
                code=code,
                severity="warning",
                count=count,
                rows=rows,
                examples=examples,
                reasons=reasons,
                title=count_rows(count, title),
                effect="these rows cannot be learned from; many of them mean that the logger is broken",
                fix=_MAP if any(why.startswith(_UNKNOWN_SHAPE) for why in reasons) else _DROPPED,
            )
