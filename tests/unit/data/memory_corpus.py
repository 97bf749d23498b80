"""A corpus in memory: what the rules of the audit ask for, made from a list of rows."""

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from graftwork.data.audit.report import audit_corpus
from graftwork.data.audit.row_checks import AuditContext, check_row, find_fault, is_dropped, redact_row
from graftwork.data.ingest.fields import day_of
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import InputFile
from graftwork.records.interaction import Origin
from graftwork.text.shape import main_script
from graftwork.text.words import normalize


class Fault(NamedTuple):
    origin: Origin
    code: str
    message: str


class Labels(NamedTuple):
    numbers: np.ndarray
    names: list


class Repeats(NamedTuple):
    instead: np.ndarray
    step: np.ndarray


class Dealing(NamedTuple):
    group: np.ndarray

    @property
    def split(self):
        return np.where(self.group < 0, 255, self.group % 3).astype(np.uint8)


def take_print(text):
    return int.from_bytes(hashlib.sha256(normalize(text).encode()).digest()[:8]) | 1


class MemoryCorpus:
    def __init__(self, rows, *, context, faults=()):
        self._raw = list(rows)
        self._twins = [redact_row(row) for row in self._raw]
        self._sight = context
        self._faults = list(faults)
        self.rows = len(self._raw)
        files = Counter(row.origin.file for row in self._raw) + Counter(f.origin.file for f in faults)
        self.inputs = tuple(InputFile(file=file, sha256="", rows=count) for file, count in files.items())
        self.read_places = 0
        self.withdrawn = {}

    def column(self, name):
        if name == "passed":
            return np.array([self._passed(row) for row in self._raw], dtype=bool)
        if name == "prompt_chars":
            return np.array([sum(len(m.content) for m in r.messages) for r in self._raw], dtype=np.int32)
        if name == "reply_chars":
            return np.array([len(row.reply) for row in self._raw], dtype=np.int32)
        if name == "prompt":
            prompts = ["\n".join(f"{m.role}: {m.content}" for m in row.messages) for row in self._raw]
            return np.array([take_print(prompt) for prompt in prompts], dtype=np.uint64)
        if name == "unconfirmed":
            return np.zeros(self.rows, dtype=np.uint64)
        if name == "day":
            return np.array([day_of(row) for row in self._raw], dtype=np.int32)
        if name in ("prompt_tokens", "cached_tokens", "reply_tokens", "cost"):
            values = [getattr(row, name) for row in self._raw]
            return np.array([-1 if value is None else value for value in values], dtype=np.float64)
        assert name == "reply"
        return np.array([take_print(row.reply) for row in self._raw], dtype=np.uint64)

    def labels(self, name):
        if name == "file":
            values = [row.origin.file for row in self._raw]
        elif name == "script":
            values = [main_script(row.question) for row in self._raw]
        else:
            values = [getattr(row, name) for row in self._raw]
        names = list(dict.fromkeys(value for value in values if value is not None))
        numbers = {value: number for number, value in enumerate(names)}
        return Labels(np.array([numbers.get(value, -1) for value in values], dtype=np.int32), names)

    def notes(self):
        for place, (raw, twin) in enumerate(zip(self._raw, self._twins, strict=True)):
            for note in check_row(raw, twin, context=self._sight):
                yield place, note

    def faults(self):
        for fault in self._faults:
            yield "0" * 64, fault

    def left_out(self):
        yield from ()

    def rows_at(self, places):
        assert list(places) == sorted(set(places))
        self.read_places += len(places)
        for place in places:
            yield place, self._twins[place].row if self._sight.settings.redact else self._raw[place]

    def origin(self, place):
        return self._raw[place].origin

    def _passed(self, row):
        fault = find_fault(row, self._sight.settings)
        return not (fault and is_dropped(fault.code, self._sight.settings))


def find_equal(corpus, *, conflicts="keep_last", near=()):
    """Conflicts, then duplicates, by prints; pairs of near-duplicates as (goes, stays)."""
    instead, step = np.full(corpus.rows, -1, dtype=np.int64), np.zeros(corpus.rows, dtype=np.uint8)
    prompts, replies, passed = corpus.column("prompt"), corpus.column("reply"), corpus.column("passed")
    last = {prompt: place for place, prompt in enumerate(prompts) if passed[place]}
    first = {}
    for place in np.flatnonzero(passed):
        stays = last[prompts[place]]
        if conflicts == "keep_last" and replies[stays] != replies[place]:
            instead[place], step[place] = stays, 1
            continue
        stays = first.setdefault((prompts[place], replies[place]), place)
        if stays != place:
            instead[place], step[place] = stays, 2
    for goes, stays in near:
        instead[goes], step[goes] = stays, 3
    return Repeats(instead, step)


def group_equal(corpus):
    """Rows with the same question are one group; rows that did not pass have none."""
    passed, founders, groups = corpus.column("passed"), {}, []
    for place in range(corpus.rows):
        key = normalize(dict(corpus.rows_at([place]))[place].question)
        groups.append(founders.setdefault(key, place) if passed[place] else -1)
    return Dealing(np.array(groups, dtype=np.int64))


def audit_rows(
    rows, *, faults=(), near=(), repeats=None, assignment=None, context=None, count_tokens=None, **changes
):
    context = context or AuditContext(settings=DataSettings(**changes))
    corpus = MemoryCorpus(rows, context=context, faults=faults)
    return audit_corpus(
        corpus,
        repeats or find_equal(corpus, conflicts=context.settings.conflicts, near=near),
        assignment or group_equal(corpus),
        context=context,
        count_tokens=count_tokens,
    )
