"""Attempts at one component and stage: asked once, verified once, kept for good.

In: a component, a stage, what was accepted before. Out: candidates with verdicts and evidence. Whatever is in
the journal already is neither asked nor verified again: every prompt, answer, verdict and decision is on the
disk before the next step, and each entry names the hash of the one before it. Who answers is any inference
engine, a child process with one, or answers that were recorded before.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.components.generate.prompts import prompt_hash
from graftwork.components.settings import GenerateSettings
from graftwork.components.spec.cases import Language, Stage
from graftwork.components.spec.component import Component
from graftwork.components.verify.verifier import Evidence, SourceVerdict, Submission, Verifier
from graftwork.engines.interface import DecodingSettings, EngineReply, EngineUnavailable
from graftwork.files.config_text import read_config_text
from graftwork.files.disk import Journal, file_digest
from graftwork.grading.code import extract_code
from graftwork.process.asking import ask_many
from graftwork.records.base import fingerprint
from graftwork.records.errors import Damaged, EnvironmentLacks, StoppedInOrder, UserMistake
from graftwork.records.interaction import Message

JOURNAL_FILE = "journal.jsonl"
FIRST = "0" * 64
TEMPERATURE = 0.8
"""Of all samples but the first, which is greedy."""


def entry_hash(entry: dict[str, Any]) -> str:
    return fingerprint({key: value for key, value in entry.items() if key != "hash"})


def check_chain(entries: list[dict[str, Any]]) -> str:
    """What breaks the chain; empty where nothing does."""
    previous = FIRST
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "hash" not in entry:
            return f"entry {number} is no entry of a journal"
        if entry.get("previous") != previous:
            return f"entry {number} does not follow the one before it: an entry was removed or added"
        if entry_hash(entry) != entry["hash"]:
            return f"entry {number} ({entry.get('kind')}) was changed"
        previous = entry["hash"]
    return ""


class GenerationJournal:
    """One writer at a time. `find` looks an entry up by its kind and key."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / JOURNAL_FILE)
        self.entries: list[dict[str, Any]] = self._journal.read()
        broken = check_chain(self.entries)
        if broken:
            raise Damaged(
                f"the journal is damaged: {broken}",
                why="answers and verdicts in it are no longer evidence",
                fix="restore the file, or generate into another folder",
                where=str(self._journal.path),
            )
        self._known = {(entry["kind"], entry["key"]): entry for entry in self.entries if "key" in entry}

    @property
    def head(self) -> str:
        return str(self.entries[-1]["hash"]) if self.entries else FIRST

    def find(self, kind: str, key: str) -> dict[str, Any] | None:
        return self._known.get((kind, key))

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        return (entry for entry in self.entries if entry["kind"] == kind)

    def add(self, kind: str, key: str, **content: Any) -> dict[str, Any]:
        """Append an entry and wait until it is on the disk."""
        entry = {"kind": kind, "key": key, **content, "previous": self.head}
        entry["hash"] = entry_hash(entry)
        self._journal.append(entry, durable=True)
        self.entries.append(entry)
        self._known[kind, key] = entry
        return entry

    def add_once(self, kind: str, key: str, **content: Any) -> None:
        """Unless there is an entry of this kind and key."""
        if self.find(kind, key) is None:
            self.add(kind, key, **content)


MOST_RECORDED_BYTES = 64 << 20
_HEADING = re.compile(r"^Component (?P<id>.+?) · (?P<function>\w+) · stage (?P<stage>\d)", re.M)


class ComponentModel(NamedTuple):
    """A model that is asked for components."""

    label: str
    """How people know it."""
    identity: str
    """The hash of its weights or of its address."""
    ask: Callable[[tuple[Message, ...], DecodingSettings], EngineReply]
    """Raises EngineUnavailable where another attempt would not help now."""
    at_once: int = 1
    """Questions that it answers at a time."""
    give_up: Callable[[], object] = lambda: None
    """Ends what it is answering, where that costs nothing but time."""


class RecordedAnswers:
    """Answers from a file, one JSON object a line: component, stage, text, and sample where it matters.

    Stands in for a large model: the file is what such a model answered, or what a person wrote in its place.
    """

    def __init__(self, path: Path) -> None:
        self._answers: dict[tuple[str, int], dict[int, str]] = {}
        for number, line in enumerate(read_config_text(path, most_bytes=MOST_RECORDED_BYTES).splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                texts = self._answers.setdefault((str(row["component"]), _whole(row["stage"])), {})
                texts[_whole(row.get("sample", len(texts)))] = str(row["text"])
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
                raise UserMistake(
                    "this is no recorded answer",
                    why="every line is a JSON object with the keys component, stage (a number) and text",
                    fix="correct the line, or name another file as recorded:FILE",
                    where=f"{path}:{number}",
                ) from None
        self.digest = file_digest(path)

    def ask(self, messages: tuple[Message, ...], decoding: DecodingSettings) -> EngineReply:
        heading = _HEADING.search(messages[-1].content)
        if heading is None:
            raise EngineUnavailable("the question names no component")
        texts = self._answers.get((heading["id"], int(heading["stage"])), {})
        text = texts.get((decoding.seed or 0) % len(texts), "") if texts else ""
        words = sum(len(message.content.split()) for message in messages)
        return EngineReply(text, tokens=len(text.split()), prompt_tokens=words, finish_reason="stop")


def _whole(value: object) -> int:
    if isinstance(value, int):
        return value
    raise ValueError("no whole number")


FENCES: dict[Language, tuple[str, ...]] = {
    "python": ("python", "python3", "py", "py3"),
    "elixir": ("elixir", "ex", "exs"),
}
OnProgress = Callable[[str, int, int], None]
PROMPT, ANSWER, VERDICT, EVIDENCE, ATTEMPT = "prompt", "answer", "verdict", "evidence", "attempt"


class Question(NamedTuple):
    """One sample of one component at one stage."""

    component: Component
    stage: Stage
    round: int
    sample: int
    messages: tuple[Message, ...]

    def key(self, identity: str) -> str:
        parts = [self.component.id, self.stage, self.round, self.sample, prompt_hash(self.messages), identity]
        return fingerprint(parts)[:24]


class Attempt(NamedTuple):
    """A source and what verification found. `key` is that of its answer."""

    key: str
    submission: Submission
    verdict: SourceVerdict
    evidence: Evidence | None


def submission_key(given: Submission) -> str:
    """Names everything that a verdict depends on."""
    content = given.component.model_dump(mode="json", exclude={"line"})
    return fingerprint([content, given.source, given.stage, given.modules])[:24]


class Budget:
    """Tokens of all runs together, and the minutes of this one."""

    def __init__(
        self,
        max_tokens: int | None,
        max_minutes: float | None,
        *,
        spent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens, self._max_minutes, self._clock = max_tokens, max_minutes, clock
        self.tokens = spent
        self._began = clock()

    def require(self) -> None:
        """StoppedInOrder once it is spent."""
        most, minutes = self._max_tokens, self._max_minutes
        if most is not None and self.tokens >= most:
            raise _stopped(
                f"the budget of {most:,} tokens is spent", "run the same command with more --max-total-tokens"
            )
        if minutes is not None and self._clock() - self._began >= minutes * 60:
            raise _stopped(
                f"the budget of {minutes:g} minutes is spent",
                "run the same command again: it has new minutes",
            )


def _stopped(what: str, fix: str) -> StoppedInOrder:
    return StoppedInOrder(what, why="every answer and verdict so far is kept", fix=fix)


class Attempts:
    """Asks, verifies and journals."""

    def __init__(
        self,
        model: ComponentModel,
        verifier: Verifier,
        journal: GenerationJournal,
        settings: GenerateSettings,
        budget: Budget,
        *,
        on_progress: OnProgress = lambda _phase, _done, _total: None,
    ) -> None:
        self._model, self._verifier, self._journal = model, verifier, journal
        self._settings, self.budget, self._progress = settings, budget, on_progress

    def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """The entry of each answer, from the journal where it is known."""
        identity = self._model.identity
        missing = [each for each in questions if self._journal.find(ANSWER, each.key(identity)) is None]
        for each in missing:
            messages = [turn.model_dump() for turn in each.messages]
            self._journal.add_once(PROMPT, prompt_hash(each.messages), messages=messages)
        done = count(1)

        def keep(question: Question, answer: tuple[EngineReply, float]) -> None:
            reply, seconds = answer
            self.budget.tokens += reply.tokens + reply.prompt_tokens
            self._journal.add(
                ANSWER,
                question.key(identity),
                component=question.component.id,
                stage=question.stage,
                round=question.round,
                sample=question.sample,
                prompt=prompt_hash(question.messages),
                model=self._model.label,
                identity=identity,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=round(seconds, 3),
            )
            self._progress(f"stage {question.stage}: answers", next(done), len(missing))

        ask_many(
            missing, self._ask_one, together=self._model.at_once, on_reply=keep, give_up=self._model.give_up
        )
        entries = [self._journal.find(ANSWER, each.key(identity)) for each in questions]
        return [entry for entry in entries if entry is not None]

    def _ask_one(self, question: Question) -> tuple[EngineReply, float]:
        """The reply, and the seconds that it took."""
        self.budget.require()
        # The first sample is greedy; each has a seed of its own.
        seed = question.round * self._settings.samples + question.sample
        temperature = TEMPERATURE if seed else 0.0
        decoding = DecodingSettings(self._settings.max_tokens, temperature=temperature, seed=seed)
        began = time.monotonic()
        try:
            return self._model.ask(question.messages, decoding), time.monotonic() - began
        except EngineUnavailable as error:
            raise EnvironmentLacks(
                f"{self._model.label} does not answer for component {question.component.id}, "
                f"stage {question.stage}",
                why=f"{error} (after {error.attempts} attempts)",
                fix="start it again, then run the same command: nothing that was answered is asked again",
            ) from error

    def is_prose(self, attempt: Attempt) -> bool:
        """Whether its answer has no code block and is no code itself."""
        entry = self._journal.find(ANSWER, attempt.key)
        return entry is not None and "```" not in entry["text"] and bool(attempt.verdict.facts.syntax)

    def verify(self, given: Sequence[Submission]) -> list[SourceVerdict]:
        """Verdicts in order, each computed once for all runs."""
        keys = [submission_key(each) for each in given]
        missing = {
            key: each
            for key, each in zip(keys, given, strict=True)
            if self._journal.find(VERDICT, key) is None
        }
        for key, verdict in zip(missing, self._verifier.verify(list(missing.values())), strict=True):
            self._journal.add(
                VERDICT, key, source=fingerprint(missing[key].source), verdict=verdict.model_dump(mode="json")
            )
        found = [self._journal.find(VERDICT, key) for key in keys]
        return [SourceVerdict.model_validate(entry["verdict"]) for entry in found if entry is not None]

    def note(self, answer: str, given: Submission, verdict: SourceVerdict) -> None:
        """Tie an answer to its verdict."""
        about = {"component": given.component.id, "stage": given.stage, "submission": submission_key(given)}
        self._journal.add_once(ATTEMPT, answer, **about, ok=verdict.ok)

    def measure(self, given: Sequence[Submission]) -> list[Evidence | None]:
        keys = [submission_key(each) for each in given]
        missing = {
            key: each
            for key, each in zip(keys, given, strict=True)
            if self._journal.find(EVIDENCE, key) is None
        }
        for key, evidence in zip(missing, self._verifier.measure(list(missing.values())), strict=True):
            self._journal.add(EVIDENCE, key, evidence=evidence.model_dump(mode="json") if evidence else None)
        found = [(self._journal.find(EVIDENCE, key) or {}).get("evidence") for key in keys]
        return [Evidence.model_validate(entry) if entry is not None else None for entry in found]


def source_of(entry: dict[str, Any], language: Language) -> str:
    """The code of an answer, ending in one line break."""
    return extract_code(entry["text"], languages=FENCES[language]).strip() + "\n"
