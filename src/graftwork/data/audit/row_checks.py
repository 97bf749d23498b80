"""Checks and redacts one row: what is wrong with it, and whether it may be trained on.

Input: one interaction, the settings, what is known of the base model. Output: notes (each fault with an
excerpt without secrets), the redacted row, the fault that drops it. The same checks serve the audit and the
preparation. Knows no other rows. A reply is at fault for a tool call that cannot be carried out, or that goes
round in a loop; a prompt for calls and results that do not belong together. To add a check, write
`check_NAME` and enter it in `ROW_CHECKS`; its finding goes to `row_findings`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple

from graftwork.data.settings import CaptureSettings, DataSettings, find_objection
from graftwork.grading.matching import PatternTooSlow
from graftwork.grading.tool_calls import find_call_fault
from graftwork.records.interaction import TRY_OUT_SESSION, CaptureOrigin, Interaction, Message
from graftwork.text.patterns import is_password_under, is_secret_name
from graftwork.text.redact import SECRET_KINDS, Redactor, hold_private, redact
from graftwork.text.shape import (
    KNOWN_CONTROL_TOKENS,
    find_control_tokens,
    find_cut,
    find_failure,
    find_garble,
    find_placeholder,
    has_placeholder,
)
from graftwork.text.tool_calls import read_calls
from graftwork.text.wording import truncate

BROKEN_CALL, REPEATED_CALL, UNMATCHED_CALL = "broken_call", "repeated_call", "unmatched_call"
BROKEN_EARLIER_CALL = "broken_earlier_call"
MOST_REPEATS = 2
"""A call may be made this often with the same result: a first try, and another in case something passes."""
CALL_TAG = "<tool_call>"


class Fault(NamedTuple):
    code: str
    reason: str


def judge_calls(row: Interaction) -> Fault | None:
    """The fault of the reply's calls."""
    if CALL_TAG not in row.reply:
        return None
    fault = find_broken_call(row.messages, row.reply)
    if fault is not None:
        return Fault(BROKEN_CALL, fault)
    if _is_loop(row):
        return Fault(REPEATED_CALL, "the turns before it made the same call and got the same result")
    return None


def find_broken_call(messages: Sequence[Message], text: str) -> str | None:
    """Why a call of this assistant turn cannot be carried out; None if none is, or it cannot be judged."""
    try:
        return find_call_fault(messages, text)
    except PatternTooSlow:
        return None


def judge_results(messages: Sequence[Message]) -> Fault | None:
    """The fault of a prompt whose calls and results do not belong together."""
    waiting = 0
    for message in messages:
        if message.role == "tool":
            if not waiting:
                return Fault(UNMATCHED_CALL, "a result without a call before it")
            waiting -= 1
        elif waiting:
            return Fault(UNMATCHED_CALL, _NO_RESULT)
        elif message.role == "assistant":
            waiting = len(read_calls(message.content) or ()) if CALL_TAG in message.content else 0
    return Fault(UNMATCHED_CALL, _NO_RESULT) if waiting else None


_NO_RESULT = "a call without a result"


def _is_loop(row: Interaction) -> bool:
    """Whether the last turns made the calls of the reply, always with the same results."""
    calls = read_calls(row.reply)
    results: list[str] = []
    rounds: list[list[str]] = []
    for message in reversed(row.messages):
        if message.role == "tool":
            results.append(message.content)
            continue
        if message.role != "assistant" or read_calls(message.content) != calls:
            return False
        rounds.append(results)
        results = []
        if len(rounds) == MOST_REPEATS:
            return all(answers == rounds[0] and answers for answers in rounds)
    return False


EXCERPT_CHARACTERS = 140


class Note(NamedTuple):
    """`reason` says how the fault was recognized, in the same words for many rows if possible.

    `excerpt` comes from the redacted row and has at most EXCERPT_CHARACTERS characters.
    """

    code: str
    reason: str
    excerpt: str


@dataclass(frozen=True)
class AuditContext:
    """What checks know besides the row: the settings and, if any, the base model to be trained.

    `control_tokens` are those of the base; without them, those of known model families are searched for.
    `base_reasons` says whether the base's template writes reasoning.
    """

    settings: DataSettings
    base: str | None = None
    control_tokens: tuple[str, ...] = ()
    base_reasons: bool | None = None


def show_start(text: str) -> str:
    return truncate(" ".join(text[: 8 * EXCERPT_CHARACTERS].split()), EXCERPT_CHARACTERS)


def show_end(text: str) -> str:
    folded = " ".join(text[-8 * EXCERPT_CHARACTERS :].split())
    return folded if len(folded) <= EXCERPT_CHARACTERS else f"…{folded[-EXCERPT_CHARACTERS + 1 :]}"


def show_around(text: str, mark: str) -> str:
    """Return the mark with its surroundings, a third of the excerpt before it."""
    mark_start = text.find(mark)
    start = max(0, mark_start - EXCERPT_CHARACTERS // 3)
    excerpt = " ".join(text[start : start + 4 * EXCERPT_CHARACTERS].split())
    return truncate(f"…{excerpt}" if start else excerpt, EXCERPT_CHARACTERS)


# Names shared by many rows keep their text around the placeholder.
_SHARED_NAMES = ("status", "finish_reason", "group", "domain", "model", "split")
# Names that identify rows: two people's sessions must not become one `<REDACTED:email:1>`.
_OWN_NAMES = ("id", "session", "trace")
DEEPEST_EXTRA = 64


class RedactedRow(NamedTuple):
    row: Interaction
    counts: dict[str, int]


def redact_row(row: Interaction) -> RedactedRow:
    """Replace secrets and personal data by placeholders, numbered per row: the result depends on the row
    alone.
    """
    texts, has_named_secret = _collect_texts(row)
    if not has_named_secret and not hold_private(texts):
        return RedactedRow(row, {})
    cleaner = _RowRedactor(texts)
    update: dict[str, Any] = {
        "messages": tuple(
            Message(role=turn.role, content=cleaner.clean(turn.content)) for turn in row.messages
        ),
        "reply": cleaner.clean(row.reply),
        "rejected": None if row.rejected is None else cleaner.clean(row.rejected),
        "extra": cleaner.clean_value(row.extra),
    }
    for name in _SHARED_NAMES:
        text = getattr(row, name)
        update[name] = None if text is None else cleaner.clean(text)
    for name in _OWN_NAMES:
        text = getattr(row, name)
        update[name] = None if text is None else cleaner.clean_own_name(name, text)
    return RedactedRow(row.model_copy(update=update), dict(sorted(cleaner.counts.items())))


def _collect_texts(row: Interaction) -> tuple[list[str], bool]:
    """Every text of a row, and whether the name of a field marks its value as a secret."""
    texts = [turn.content for turn in row.messages]
    texts.append(row.reply)
    texts += [
        text
        for text in (
            *(row.id, row.session, row.trace, row.rejected),
            *(row.status, row.finish_reason, row.group, row.domain, row.model, row.split),
        )
        if text
    ]
    named_secret = False
    waiting: list[tuple[str, Any]] = [("", row.extra)] if row.extra else []
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, int | float) and not isinstance(value, bool):
            named_secret = named_secret or is_secret_name(name)
        elif isinstance(value, str):
            texts.append(value)
            named_secret = named_secret or bool(name and is_password_under(name, value))
        elif isinstance(value, dict):
            texts.extend(value)
            waiting.extend(value.items())
        elif isinstance(value, (list, tuple)):
            waiting.extend((name, item) for item in value)
    return texts, named_secret


class _RowRedactor:
    """The redactor of one row, with its counts."""

    def __init__(self, texts: list[str]) -> None:
        self._redactor = Redactor()
        self.counts: Counter[str] = Counter()
        for text in texts:
            self._redactor.number_past(text)

    def clean(self, text: str, *, name: str = "") -> str:
        redacted = self._redactor.redact_under(name, text) if name else self._redactor.redact(text)
        self.counts.update(redacted.counts)
        return redacted.text

    def clean_own_name(self, name: str, text: str) -> str:
        """Replace a name that contains personal data by its hash, which still identifies it."""
        if self.clean(text) == text:
            return text
        return f"{name}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"

    def clean_value(self, value: Any, *, name: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            return self.clean(value, name=name)
        if not isinstance(value, (dict, list, tuple)):
            # A number has no form to recognize it by; under the name of a password it is removed.
            return None if is_secret_name(name) and not isinstance(value, bool) else value
        if depth >= DEEPEST_EXTRA:
            # Nothing that is read is this deep, and nothing unredacted may pass.
            return None
        if isinstance(value, dict):
            return {
                self.clean(key): self.clean_value(item, name=key, depth=depth + 1)
                for key, item in value.items()
            }
        return [self.clean_value(item, name=name, depth=depth + 1) for item in value]


NEGATIVE_FEEDBACK, CAPTURES_FILTER, TRIED_OUT = "negative_feedback", "captures_filter", "tried_out"
RETRIED = "retried"
"""A call that its agent made again in the same trace."""
CAPTURE_CODES = frozenset({NEGATIVE_FEEDBACK, CAPTURES_FILTER, TRIED_OUT})


NEGATIVE_BELOW = 0.5
"""Feedback with a score below this is negative; any other is positive."""


def is_negative(captured: CaptureOrigin) -> bool:
    """Whether users rated the served reply negative and no correction exists."""
    feedback = captured.feedback
    return not captured.corrected and feedback is not None and feedback < NEGATIVE_BELOW


def is_confirmed(captured: CaptureOrigin, settings: CaptureSettings) -> bool:
    """Whether the reply may be a reference for tests: a person confirmed it, or no model of ours wrote it."""
    if captured.corrected or captured.upstream is not None:
        return True
    feedback = captured.feedback
    return settings.positive_confirms and feedback is not None and feedback >= NEGATIVE_BELOW


SERVED, TAUGHT, BAD = 1, 2, 3
"""A served or traced model or a teacher wrote the reply, and no person confirmed it; or it is rated bad."""


def is_rated_bad(row: Interaction, settings: DataSettings) -> bool:
    """Whether the log says that the reply is bad. Feedback on captured replies has settings of its own."""
    return row.capture is None and row.reward is not None and is_bad_score(row.reward, settings)


def is_bad_score(score: float, settings: DataSettings) -> bool:
    return score <= 0 or (settings.rated_bad_below is not None and score < settings.rated_bad_below)


def say_bad_score(settings: DataSettings) -> str:
    """Describe which scores are bad."""
    return f"below {settings.rated_bad_below:g}" if (settings.rated_bad_below or 0) > 0 else "0 or less"


def find_unconfirmed(row: Interaction, settings: DataSettings) -> int:
    """Return why the reply is not a reference: SERVED, TAUGHT, BAD, or 0 if it is one."""
    if is_rated_bad(row, settings):
        return BAD
    if row.answered is not None:
        return TAUGHT if row.answered.by == "teacher" else 0
    if row.capture is None or is_confirmed(row.capture, settings.captures):
        return 0
    # Of captures, those have a trace that a program sent to /v1/traces.
    return 0 if row.trace is not None and settings.captures.traces_confirm else SERVED


def find_refusal(
    captured: CaptureOrigin, session: str | None, settings: CaptureSettings, *, judged: bool = True
) -> Fault | None:
    """Return why this exchange is left out. With `judged=False`, feedback is ignored."""
    if session == TRY_OUT_SESSION:
        return Fault(TRIED_OUT, "`graft run` asked a held-out question here to try the release out")
    if judged and is_negative(captured):
        return Fault(NEGATIVE_FEEDBACK, "users said that this reply is bad")
    lacks_feedback = captured.feedback is None and not captured.corrected
    reason = None
    if settings.releases and not captured.release.startswith(settings.releases):
        reason = "another release answered than those under data.captures.releases"
    elif outside := find_time_objection(captured.at, since=settings.since, until=settings.until):
        reason = outside
    elif settings.sessions and session not in settings.sessions:
        reason = "a session that data.captures.sessions does not name"
    elif session is not None and session in settings.skip_sessions:
        reason = "a session that data.captures.skip_sessions names"
    elif judged and settings.feedback == "positive" and lacks_feedback:
        reason = "it has no feedback, and data.captures.feedback is `positive`"
    return None if reason is None else Fault(CAPTURES_FILTER, reason)


def find_time_objection(timestamp: str, *, since: datetime | None, until: datetime | None) -> str | None:
    if since is None and until is None:
        return None
    try:
        moment = datetime.fromisoformat(timestamp)
        if since is not None and moment < since:
            return "served before data.captures.since"
        if until is not None and moment >= until:
            return "served after data.captures.until"
    except (ValueError, TypeError):
        return "it does not state when it was served, and data.captures requires a time"
    return None


REVIEWED, RATED_BAD, NOT_KEPT = "rejected_in_review", "rated_bad", "not_kept"
CODES = CAPTURE_CODES | {
    REVIEWED,
    NOT_KEPT,
    RATED_BAD,
    "empty",
    "placeholder",
    "truncated",
    "failed_status",
    "claims_success_but_fails",
    BROKEN_CALL,
    REPEATED_CALL,
    UNMATCHED_CALL,
}


STATUS_PREFIX = "the log says"
"""The prefix of a reason that quotes the status of a row."""


def find_fault(row: Interaction, settings: DataSettings) -> Fault | None:
    """Return the most severe fault: a failed call is not also reported as empty."""
    return next(chain(_list_stated(row, settings), _list_found(row, settings)), None)


def _list_stated(row: Interaction, settings: DataSettings) -> Iterator[Fault]:
    """What people, the settings and the log say against a row."""
    if row.answered is not None and row.answered.rejected:
        yield Fault(REVIEWED, "a reviewer rejected it")
    if row.capture is not None:
        refusal = find_refusal(row.capture, row.session, settings.captures)
        if refusal is not None:
            yield refusal
    elif settings.keep is not None and row.answered is None:
        objection = find_objection(row, settings.keep)
        if objection is not None:
            yield Fault(NOT_KEPT, objection)
    if row.status is not None and row.status.casefold() not in map(str.casefold, settings.keep_status):
        yield Fault("failed_status", f"{STATUS_PREFIX} {redact(row.status).text[:40]!r}")


def _list_found(row: Interaction, settings: DataSettings) -> Iterator[Fault]:
    """What the texts of a row show, the most severe first."""
    for what, text in (("question", row.question), ("reply", row.reply)):
        if not text.strip():
            yield Fault("empty", f"the {what} is empty")
    if stand_in := find_placeholder(row.reply):
        yield Fault("placeholder", stand_in)
    if cut := find_cut(row.reply, finish_reason=row.finish_reason, max_tokens=row.max_tokens):
        yield Fault("truncated", cut)
    if failure := find_failure(row.reply):
        yield Fault("claims_success_but_fails", failure)
    if row.extra.get("errors"):
        yield Fault("claims_success_but_fails", "the log contains errors for it")
    if fault := judge_calls(row):
        yield fault
    if is_rated_bad(row, settings):
        yield Fault(RATED_BAD, f"the log labels it bad or scores it {say_bad_score(settings)}")
    if fault := judge_results(row.messages):
        yield fault


def is_dropped(code: str, settings: DataSettings) -> bool:
    """Whether the settings drop rows with this fault. A row without a reply is always dropped."""
    if code in CAPTURE_CODES or code in (REVIEWED, NOT_KEPT):
        return True
    return {
        "empty": True,
        RATED_BAD: settings.drop_rated_bad,
        "placeholder": settings.drop_placeholders,
        "truncated": settings.drop_truncated,
        "failed_status": settings.drop_failed,
        "claims_success_but_fails": settings.drop_failed,
        BROKEN_CALL: settings.drop_broken_calls,
        REPEATED_CALL: settings.drop_broken_calls,
        UNMATCHED_CALL: settings.drop_unmatched_calls,
    }[code]


# Finds a blank in a long reply for the excerpt only; `find_fault` decides what is one.
_BLANK = re.compile(
    r"[\[<{](?:generated|simulated|placeholder|insert|your|enter|add|mock|sample"
    r"|(?:this|the) (?:answer|response|reply))\b",
    re.IGNORECASE,
)


def check_reply(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    fault = find_fault(raw, context.settings)
    if fault is None:
        return
    row = redacted.row
    blank = _BLANK.search(row.reply) if fault.code == "placeholder" else None
    if fault.code == "truncated":
        excerpt = show_end(row.reply)
    elif blank:
        excerpt = show_around(row.reply, blank.group())
    else:
        # Without a reply, show the end of the question: it often begins with sources.
        excerpt = show_start(row.reply) or show_end(row.question)
    yield Note(fault.code, fault.reason, excerpt)


def check_prompt(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    if has_placeholder(raw.question) and not find_placeholder(raw.reply):
        yield Note(
            "placeholder_prompt", "made-up content in the prompt", show_around(redacted.row.question, "[")
        )


def check_earlier_calls(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    """Note the first call before the reply that cannot be carried out."""
    for index, turn in enumerate(raw.messages):
        if turn.role == "assistant" and CALL_TAG in turn.content:
            reason = find_broken_call(raw.messages, turn.content)
            if reason is not None:
                yield Note(BROKEN_EARLIER_CALL, reason, show_start(redacted.row.messages[index].content))
                return


def check_private_data(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    for kind in redacted.counts:
        code = "secret" if kind in SECRET_KINDS else "personal_data"
        mark = f"<REDACTED:{kind}:"
        texts = (*(message.content for message in redacted.row.messages), redacted.row.reply)
        yield Note(code, kind, next((show_around(text, mark) for text in texts if mark in text), ""))


ENCODING = "language_or_encoding"
# Finds damage for the excerpt only.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DAMAGE = re.compile("\ufffd|[ÂÃÐÑâïð][^\\s\\w]|[ÂÃÐÑâïð][\u0080-ÿ€-™]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def check_encoding(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    row = redacted.row
    reasons: set[str] = set()
    for text in (*(message.content for message in row.messages), row.reply):
        # NUL characters are left over from another encoding.
        reason = "NUL characters" if "\0" in text else find_garble(text)
        if reason is not None and reason not in reasons:
            reasons.add(reason)
            damage = _DAMAGE.search(text)
            excerpt = show_around(text, damage.group() if damage else text[:1])
            yield Note(ENCODING, reason, _CONTROL.sub("␀", excerpt))


CONTROL_TOKENS = "special_tokens"
# Interactions contain reasoning and tool calls in these tags on purpose.
_EXPECTED_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
# A pair of these is struck-out text in HTML.
_HTML = {"<s>", "</s>"}


def check_control_tokens(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    """Look for the tokens of the base; without a base, for those of known families."""
    row = redacted.row
    noted: set[str] = set()
    for text in (*(message.content for message in row.messages), row.reply):
        tokens = find_control_tokens(text, context.control_tokens or KNOWN_CONTROL_TOKENS)
        is_html = set(tokens) >= _HTML
        for token in tokens:
            if (
                token not in noted
                and not _EXPECTED_TAGS.fullmatch(token)
                and not (is_html and token in _HTML)
            ):
                noted.add(token)
                yield Note(CONTROL_TOKENS, token, show_around(text, token))


TOO_LONG = "too_long"
CHARACTERS_PER_TOKEN = 3.6


def check_length(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    """Note rows that are too long by their characters; `measure_lengths` counts tokens if possible."""
    prompt = sum(len(message.content) for message in raw.messages) / CHARACTERS_PER_TOKEN
    total = round(prompt + len(raw.reply) / CHARACTERS_PER_TOKEN)
    if total > context.settings.max_tokens:
        yield note_length(redacted.row.reply, prompt, total, most=context.settings.max_tokens)


def note_length(reply: str, prompt: float, total: int, *, most: int) -> Note:
    what = "the whole reply" if prompt >= most else "the end of the reply"
    reason = f"would lose {total - most:,} of {total:,} tokens, {what} included"
    return Note(TOO_LONG, reason, show_end(reply))


REASONING = "reasoning"
_THINK = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)


def check_reasoning(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> Iterator[Note]:
    """Note reasoning only: the model's name is a column of its own."""
    match = _THINK.search(raw.reply)
    if match:
        yield Note(REASONING, f"reasoning in <{match.group(1).lower()}> tags", show_start(redacted.row.reply))


ROW_CHECKS = (
    check_reply,
    check_prompt,
    check_earlier_calls,
    check_private_data,
    check_encoding,
    check_control_tokens,
    check_length,
    check_reasoning,
)


def check_row(raw: Interaction, redacted: RedactedRow, *, context: AuditContext) -> list[Note]:
    """Apply all checks. They judge the raw row and quote the redacted one."""
    return [note for check in ROW_CHECKS for note in check(raw, redacted, context=context)]


def find_verdict(notes: Sequence[Note]) -> Note | None:
    """Return the note of `check_reply`, which comes first, if there is one."""
    return notes[0] if notes and notes[0].code in CODES else None
