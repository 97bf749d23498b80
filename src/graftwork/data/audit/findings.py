"""Building blocks of audit rules: note counts, corpus facts, lengths of rows, and the findings made of them.

Input: notes in row order, the corpus as columns, its repeats and split assignment (as protocols). Output:
findings with an exact count, the first rows by name, and a few excerpts. Memory does not grow with the rows.
Tokens are counted if the base's tokenizer is available, else estimated from characters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN, AuditContext, Note, redact_row, show_start
from graftwork.data.ingest.blocks import ReadFault, SkippedPart
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import Example, Finding, InputFile, ReadableRow, Severity
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CountTokens: TypeAlias = Callable[[Sequence[Interaction]], Sequence[int]]
"""The tokens of each row in the form in which it is trained on: prompt, reply and control tokens."""

MOST_COUNTED = 8_000_000
"""Characters of the rows that are counted: some seconds at most."""
_MOST_TOKENS_PER_CHARACTER, _MOST_CONTROL_TOKENS = 4, 128
_MOST_CHARACTERS_PER_TOKEN = 100
_ROWS_AT_ONCE = 2000


class RowLengths(NamedTuple):
    """Tokens of whole rows and of their prompts."""

    whole: "NDArray[Any]"
    prompt: "NDArray[Any]"
    is_counted: bool
    """Whether every row that may be longer than the limit was counted."""


def measure_lengths(
    corpus: "AuditedCorpus", *, settings: DataSettings, preferred: "NDArray[Any]", count: CountTokens | None
) -> RowLengths:
    """Measure the rows, exactly where that decides whether they have more than `max_tokens`.

    The `preferred` ones come first.
    """
    import numpy as np

    most = settings.max_tokens
    prompts = corpus.column("prompt_chars").astype(np.float64)
    sizes = prompts + corpus.column("reply_chars")
    shares = np.divide(prompts, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    whole = np.rint(sizes / CHARACTERS_PER_TOKEN)
    if count is None:
        return RowLengths(whole, whole * shares, is_counted=False)
    # The system prompts of the settings are not in the columns.
    added = max(map(len, (settings.system_prompt or "", *settings.system_prompts.values())))
    may_be_long = (sizes + added) * _MOST_TOKENS_PER_CHARACTER + _MOST_CONTROL_TOKENS > most
    doubtful = np.flatnonzero(may_be_long & (sizes <= most * _MOST_CHARACTERS_PER_TOKEN))
    distance = np.abs(np.log(np.maximum(whole[doubtful], 1) / most))
    order = doubtful[np.lexsort((distance, ~preferred[doubtful]))]
    counted = np.sort(order[np.cumsum(sizes[order]) <= MOST_COUNTED])
    tokens = np.zeros(len(counted))
    for start in range(0, len(counted), _ROWS_AT_ONCE):
        rows = [row for _, row in corpus.rows_at(counted[start : start + _ROWS_AT_ONCE].tolist())]
        tokens[start : start + len(rows)] = count(rows)
    if tokens.any():
        # What was not counted is estimated by what was.
        whole = np.rint(sizes * (tokens.sum() / max(sizes[counted].sum(), 1)))
    whole[counted] = tokens
    return RowLengths(whole, whole * shares, is_counted=len(counted) == len(doubtful))


# Rows named per finding; the count stays exact.
MOST_ROWS = 1000
MOST_EXAMPLES = 20
SHOWN_CHARACTERS = 600
# Reasons that contain figures differ per row: counting them is useless.
MOST_REASONS = 40
OTHER_REASONS = "other reasons"


@dataclass
class NoteCount:
    """The notes of one code. A row counts once, however many notes it has."""

    count: int = 0
    positions: list[int] = field(default_factory=list)
    shown: list[tuple[int, str]] = field(default_factory=list)
    """Rows by their position, with what is quoted of them."""
    reasons: Counter[str] = field(default_factory=Counter)
    last: int = -1

    def add(self, position: int, note: Note) -> None:
        if note.reason in self.reasons or len(self.reasons) < MOST_REASONS:
            self.reasons[note.reason] += 1
        if position == self.last:
            return
        self.last = position
        self.count += 1
        if len(self.positions) < MOST_ROWS:
            self.positions.append(position)
        if len(self.shown) < MOST_EXAMPLES:
            quoted = f"{note.reason}: {note.excerpt}" if note.excerpt else note.reason
            self.shown.append((position, quoted))

    def sort_reasons(self) -> dict[str, int]:
        """Return reasons by frequency; nothing where every row has its own."""
        if len(self.reasons) >= MOST_REASONS:
            return {}
        return dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0])))

    def say_reasons(self, most: int = MOST_REASONS) -> str:
        reasons = list(self.sort_reasons().items())
        listing = ", ".join(f"{reason} {count:,}" for reason, count in reasons[:most])
        return f"{listing} …" if len(reasons) > most else listing


class NoteCounts:
    """The notes by code."""

    def __init__(self, notes: Iterable[tuple[int, Note]] = ()) -> None:
        self._by_code: dict[str, NoteCount] = {}
        for position, note in notes:
            noted = self._by_code.get(note.code)
            if noted is None:
                noted = self._by_code[note.code] = NoteCount()
            noted.add(position, note)

    def __getitem__(self, code: str) -> NoteCount:
        return self._by_code.get(code, NoteCount())


def merge_faults(
    facts: "AuditFacts", code: str, *, noted: str | None = None
) -> tuple[int, tuple[Origin, ...], tuple[Example, ...], dict[str, int]]:
    """Merge the unreadable rows of a code with the readable rows that have such a note.

    Returns their number, the first of them, examples, and how often each reason occurs.
    """
    count = 0
    rows: list[Origin] = []
    examples: list[Example] = []
    reasons: Counter[str] = Counter()
    unlisted = 0
    for _, fault in facts.corpus.faults():
        if fault.code == code:
            count += 1
            if fault.message in reasons or len(reasons) < MOST_REASONS:
                reasons[fault.message] += 1
            else:
                unlisted += 1
            if len(rows) < MOST_ROWS:
                rows.append(fault.origin)
            if len(examples) < MOST_EXAMPLES:
                examples.append(Example(origin=fault.origin, excerpt=fault.message))
    if noted is not None:
        notes = facts.notes[noted]
        count += notes.count
        rows += facts.origins(notes.positions[: MOST_ROWS - len(rows)])
        examples += [
            Example(origin=facts.corpus.origin(position), excerpt=text)
            for position, text in notes.shown[: MOST_EXAMPLES - len(examples)]
        ]
        reasons.update(notes.sort_reasons())
    ordered = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
    if unlisted:
        ordered[OTHER_REASONS] = unlisted
    return count, tuple(rows), tuple(examples), ordered


CONFLICT, DUPLICATE, NEAR_DUPLICATE = 1, 2, 3
# The columns with the fingerprints of the prompt and of the reply.
PROMPT_FINGERPRINT, REPLY_FINGERPRINT = "prompt", "reply"


class AuditedCorpus(Protocol):
    """The readable rows in row order, as columns.

    Labels are numbers (-1 for none) and the names they index; faults come with the hashes of their lines.
    """

    @property
    def rows(self) -> int: ...
    @property
    def inputs(self) -> tuple[InputFile, ...]: ...
    def column(self, name: str) -> "NDArray[Any]": ...
    def labels(self, name: str) -> "tuple[NDArray[np.int32], list[str]]": ...
    def notes(self) -> Iterator[tuple[int, Note]]: ...
    def faults(self) -> Iterator[tuple[str, ReadFault]]: ...
    def left_out(self) -> Iterator[SkippedPart]: ...
    @property
    def withdrawn(self) -> Mapping[int, str]: ...
    def rows_at(self, positions: Sequence[int]) -> Iterator[tuple[int, Interaction]]: ...
    def origin(self, position: int) -> Origin: ...


class RepeatColumns(Protocol):
    """For each row, the row that stays instead or -1, and the step that dropped it or 0."""

    @property
    def instead(self) -> "NDArray[np.int64]": ...
    @property
    def step(self) -> "NDArray[np.uint8]": ...


class SplitColumns(Protocol):
    """For each row, its split and the first row of its group: rows of one group ask the same."""

    @property
    def split(self) -> "NDArray[np.uint8]": ...
    @property
    def group(self) -> "NDArray[np.int64]": ...


@dataclass(frozen=True)
class AuditFacts:
    corpus: AuditedCorpus
    repeats: RepeatColumns
    assignment: SplitColumns
    notes: NoteCounts
    context: AuditContext
    count_tokens: CountTokens | None = None

    @property
    def settings(self) -> DataSettings:
        return self.context.settings

    @cached_property
    def passed(self) -> "NDArray[np.bool_]":
        """The rows that passed the filter."""
        return self.corpus.column("passed").astype(bool)

    @cached_property
    def usable(self) -> "NDArray[np.bool_]":
        """The rows that passed and that no other row replaces."""
        usable: NDArray[np.bool_] = self.passed & (self.repeats.step == 0)
        return usable

    @cached_property
    def lengths(self) -> RowLengths:
        return measure_lengths(
            self.corpus, settings=self.settings, preferred=self.usable, count=self.count_tokens
        )

    def labels(self, name: str) -> "tuple[NDArray[np.int32], list[str]]":
        """A column of names, redacted because they are shown."""
        numbers, names = self.corpus.labels(name)
        return numbers, [redact(name).text for name in names]

    def fingerprints(self, name: str) -> "NDArray[np.uint64]":
        """A column of fingerprints; 0 for none."""
        return self.corpus.column(name).astype("uint64", copy=False)

    def origins(self, positions: Iterable[int]) -> tuple[Origin, ...]:
        return tuple(self.corpus.origin(int(position)) for position in positions)

    def read(self, positions: Iterable[int]) -> dict[int, Interaction]:
        """Read a few rows, redacted whatever the settings say, because they are shown."""
        positions = sorted({int(position) for position in positions})
        rows = self.corpus.rows_at(positions)
        return {position: row if self.settings.redact else redact_row(row).row for position, row in rows}


class Wording(NamedTuple):
    """What is wrong, what it does to training, and how to fix it."""

    title: str
    effect: str
    fix: str


def finding_from_notes(
    facts: AuditFacts,
    code: str,
    severity: Severity,
    *,
    wording: Wording,
    noted: str | None = None,
    notes: NoteCount | None = None,
    reasons: dict[str, int] | None = None,
) -> Finding:
    """Make a finding from these notes, or from those with the code `noted`, or with its own code."""
    notes = notes or facts.notes[noted or code]
    return Finding(
        code=code,
        severity=severity,
        count=notes.count,
        rows=facts.origins(notes.positions),
        examples=tuple(
            Example(origin=facts.corpus.origin(position), excerpt=text) for position, text in notes.shown
        ),
        reasons=notes.sort_reasons() if reasons is None else reasons,
        **wording._asdict(),
    )


def finding_from_rows(
    facts: AuditFacts,
    code: str,
    severity: Severity,
    positions: "NDArray[Any]",
    *,
    wording: Wording,
    show: Callable[[Interaction, int], str],
    reasons: dict[str, int] | None = None,
) -> Finding:
    """Make a finding from row positions; `show` selects the text of a row that is quoted."""
    examples = [int(position) for position in positions[:MOST_EXAMPLES]]
    rows = facts.read(examples)
    return Finding(
        code=code,
        severity=severity,
        count=len(positions),
        rows=facts.origins(positions[:MOST_ROWS]),
        examples=tuple(
            Example(origin=facts.corpus.origin(position), excerpt=show_start(show(rows[position], position)))
            for position in examples
        ),
        reasons=reasons or {},
        **wording._asdict(),
    )


_SINGULAR = {"are": "is", "have": "has", "do": "does", "were": "was"}


def count_rows(count: int, what: str) -> str:
    """`1 row is cut off`, `2 rows nearly repeat`: `what` begins with the plural verb, or an adverb and it."""
    if count != 1:
        return f"{count:,} rows {what}"
    verb, _, tail = what.partition(" ")
    if verb.endswith("ly"):
        adverb, (verb, _, tail) = f"{verb} ", tail.partition(" ")
    else:
        adverb = ""
    return f"1 row {adverb}{_SINGULAR.get(verb, verb + 's')} {tail}"


def say_fix(setting: str, *, on: bool, done: str) -> str:
    """Say what the user has to do: nothing where the setting already fixes it."""
    if on:
        return f"`graft data prepare` {done} (data.{setting})"
    return f"set data.{setting} to true: `graft data prepare` then {done}"


def show_row(row: Interaction, *, most: int = SHOWN_CHARACTERS) -> ReadableRow:
    return ReadableRow(
        origin=row.origin,
        question=shorten(row.question, most),
        reply=shorten(row.reply, most),
        group=row.group,
        model=row.model,
    )


def shorten(text: str, most: int) -> str:
    """Keep the start and the end: sources precede a question, and a cut shows at the end."""
    bare = text.strip()
    if len(bare) <= most:
        return bare
    head = most * 2 // 3
    return f"{bare[:head].rstrip()}\n[…]\n{bare[-(most - head) :].lstrip()}"
