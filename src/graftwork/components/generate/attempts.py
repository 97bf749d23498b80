"""Attempts at one component and stage: asked once, verified once, kept for good.

In: a component, a stage, what was accepted before. Out: candidates with verdicts and evidence. Whatever is in
the journal already is neither asked nor verified again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from graftwork.components.generate.journal import GenerationJournal
from graftwork.components.generate.model import ComponentModel
from graftwork.components.generate.prompts import prompt_hash
from graftwork.components.settings import GenerateSettings
from graftwork.components.spec.cases import Language, Stage
from graftwork.components.spec.component import Component
from graftwork.components.verify.verdict import Evidence, SourceVerdict
from graftwork.components.verify.verifier import SourceVerifier, Submission
from graftwork.grading.code import extract_code
from graftwork.inference.engine import DecodingSettings, EngineReply, EngineUnavailable
from graftwork.records.base import fingerprint
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder
from graftwork.records.interaction import Message

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
        self, settings: GenerateSettings, spent: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self.tokens = spent
        self._began = clock()
        self._lock = threading.Lock()

    def add(self, reply: EngineReply) -> None:
        with self._lock:
            self.tokens += reply.tokens + reply.prompt_tokens

    def require(self) -> None:
        """StoppedInOrder once it is spent."""
        most, minutes = self._settings.max_total_tokens, self._settings.max_minutes
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
        verifier: SourceVerifier,
        journal: GenerationJournal,
        settings: GenerateSettings,
        budget: Budget,
        *,
        on_progress: OnProgress = lambda _phase, _done, _total: None,
    ) -> None:
        self._model, self._verifier, self._journal = model, verifier, journal
        self._settings, self.budget, self._progress = settings, budget, on_progress
        self._lock = threading.Lock()

    def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """The entry of each answer, from the journal where it is known."""
        identity = self._model.identity
        missing = [each for each in questions if self._journal.find(ANSWER, each.key(identity)) is None]
        for each in missing:
            hashed = prompt_hash(each.messages)
            if self._journal.find(PROMPT, hashed) is None:
                self._journal.add(PROMPT, hashed, messages=[turn.model_dump() for turn in each.messages])
        with ThreadPoolExecutor(max(1, self._model.at_once)) as pool:
            try:
                for done, question in enumerate(pool.map(self._ask_one, missing)):
                    self._progress(f"stage {question.stage}: answers", done + 1, len(missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        found = [self._journal.find(ANSWER, each.key(identity)) for each in questions]
        return [entry for entry in found if entry is not None]

    def _ask_one(self, question: Question) -> Question:
        self.budget.require()
        began = time.monotonic()
        try:
            reply = self._model.ask(question.messages, self._decoding(question))
        except EngineUnavailable as error:
            raise EnvironmentLacks(
                f"{self._model.label} does not answer for component {question.component.id}, "
                f"stage {question.stage}",
                why=f"{error} (after {error.attempts} attempts)",
                fix="start it again, then run the same command: nothing that was answered is asked again",
            ) from error
        self.budget.add(reply)
        with self._lock:
            self._journal.add(
                ANSWER,
                question.key(self._model.identity),
                component=question.component.id,
                stage=question.stage,
                round=question.round,
                sample=question.sample,
                prompt=prompt_hash(question.messages),
                model=self._model.label,
                identity=self._model.identity,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=round(time.monotonic() - began, 3),
            )
        return question

    def is_prose(self, attempt: Attempt) -> bool:
        """Whether its answer has no code block and is no code itself."""
        entry = self._journal.find(ANSWER, attempt.key)
        return entry is not None and "```" not in entry["text"] and bool(attempt.verdict.facts.syntax)

    def _decoding(self, question: Question) -> DecodingSettings:
        """The first sample is greedy; each has a seed of its own."""
        seed = question.round * self._settings.samples + question.sample
        warm = self._settings.temperature if seed else 0.0
        return DecodingSettings(self._settings.max_tokens, temperature=warm, seed=seed)

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
        if self._journal.find(ATTEMPT, answer) is None:
            self._journal.add(
                ATTEMPT,
                answer,
                component=given.component.id,
                stage=given.stage,
                submission=submission_key(given),
                ok=verdict.ok,
            )

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
