"""Attempts at one component and stage: each is asked and verified only once.

Input: a component, a stage, what was accepted before. Output: candidates with verdicts and evidence. A prompt
shows only the cases that may be shown. Nothing in the journal is asked or verified again: every prompt,
answer, verdict and decision is on the disk before the next step, and each entry names the hash of the one
before it. Answers come from any inference engine, a child process with one, or a recording.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.components.cases import CallCase, Language, Stage, hidden_ids
from graftwork.components.elixir import module_name
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.settings import GenerateOptions
from graftwork.components.types import python_type
from graftwork.components.verifier import Evidence, SourceVerdict, Submission, Verifier
from graftwork.engines.interface import DecodingSettings, EngineReply, EngineUnavailable
from graftwork.files.config_text import read_config_text
from graftwork.files.disk import Journal, file_digest
from graftwork.grading.code import extract_code
from graftwork.process.asking import ask_many
from graftwork.records.base import fingerprint
from graftwork.records.errors import Corrupted, EnvironmentFailure, GracefulStop, UserError
from graftwork.records.interaction import Message

SYSTEMS: dict[Language, str] = {
    "python": "You write one small, self-contained Python function for a specification. Answer with one "
    "fenced Python block and nothing else. The block defines exactly one public function, has no effect on "
    "import, and imports only what is allowed.",
    "elixir": "You write one small Elixir module for a specification. Answer with one fenced Elixir block "
    "and nothing else. The block defines exactly one module with one public function, and uses only what "
    "is allowed.",
}
STAGES: dict[Stage, str] = {
    1: "Stage 1, brute force: write the plainest correct function for these cases. No optimisation.",
    2: "Stage 2, extend: add what the new cases need. Everything that works now must work as before.",
    3: "Stage 3, optimise: give the same values with fewer executed lines or less memory.",
    4: "Stage 4, iterate: add handling of errors and edge cases only. Keep the rest as it is.",
}
MOST_SHOWN = 12


def write_prompt(
    plan: ComponentPlan, component: Component, stage: Stage, *, source: str = "", feedback: str = ""
) -> tuple[Message, ...]:
    """`source` was accepted at the previous stage; `feedback` says why the last attempt failed."""
    parts = [heading(component, stage), component.description]
    if plan.language == "python":
        parts.append(f"```python\n{component.signature}\n    ...\n```")
    else:
        head = f"{component.function}({', '.join(name for name, _ in component.parameters)})"
        module = module_name(plan, component)
        parts.append(f"```elixir\ndefmodule {module} do\n  def {head} do\n    ...\n```")
    if len(component.outputs) > 1:
        keys = ", ".join(f"{name}: {python_type(kind) or 'any'}" for name, kind in component.outputs)
        parts.append(f"It returns a dict with the keys {keys}.")
    if component.requirements:
        texts = [text if " " in text else text.replace("_", " ") for text in component.requirements]
        parts.append("Requirements:\n" + "\n".join(f"- {text}" for text in texts))
    parts.append(_imports(plan, component))
    cases_shown = shown_calls(component, stage)
    if cases_shown:
        parts.append("Cases:\n" + "\n".join(f"- {_call(component, call)}" for call in cases_shown))
    parts.append(STAGES[stage])
    if source:
        parts.append(f"The function as it is now:\n```{plan.language}\n{source.strip()}\n```")
    if feedback:
        parts.append(f"The last attempt failed: {feedback}")
    user = "\n\n".join(part for part in parts if part)
    return (Message(role="system", content=SYSTEMS[plan.language]), Message(role="user", content=user))


def heading(component: Component, stage: Stage) -> str:
    return f"Component {component.id} · {component.function} · stage {stage}"


def shown_calls(component: Component, stage: Stage) -> list[CallCase]:
    hidden = hidden_ids(component.cases)
    return [call for call in component.cases.calls if call.stage <= stage and call.id not in hidden][
        :MOST_SHOWN
    ]


def prompt_hash(messages: tuple[Message, ...]) -> str:
    return fingerprint([message.model_dump() for message in messages])


def _call(component: Component, call: CallCase) -> str:
    arguments = [json.dumps(value, ensure_ascii=False) for value in call.args]
    arguments += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.named.items()]
    expression = f"{component.function}({', '.join(arguments)})"
    if call.raises:
        return f"`{expression}` raises {call.raises}"
    return f"`{expression}` == `{json.dumps(call.gives, ensure_ascii=False)}`"


def _imports(plan: ComponentPlan, component: Component) -> str:
    lines = []
    if plan.language == "elixir":
        dependencies = [plan.get(identifier) for identifier in component.dependencies]
        lines = [f"- `{module_name(plan, dependency)}.{dependency.function}`" for dependency in dependencies]
        return "It may call:\n" + "\n".join(lines) if lines else ""
    for identifier in component.dependencies:
        dependency = plan.get(identifier)
        path = f"from {plan.package}.{dependency.module} import {dependency.function}"
        lines.append(f"- `{path}`: {dependency.signature[4:-1]}")
    lines += [f"- `import {name}`" for name in component.cases.imports]
    return "It may import:\n" + "\n".join(lines) if lines else "It imports nothing."


JOURNAL_FILE = "journal.jsonl"
FIRST = "0" * 64
TEMPERATURE = 0.8
"""Sampling temperature of every sample after the first, which is greedy."""


def entry_hash(entry: dict[str, Any]) -> str:
    return fingerprint({key: value for key, value in entry.items() if key != "hash"})


def check_chain(entries: list[dict[str, Any]]) -> str:
    """Return what breaks the chain; empty if it is intact."""
    previous = FIRST
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "hash" not in entry:
            return f"entry {number} is not an entry of a journal"
        if entry.get("previous") != previous:
            return f"entry {number} does not follow the previous one: an entry was removed or added"
        if entry_hash(entry) != entry["hash"]:
            return f"entry {number} ({entry.get('kind')}) was changed"
        previous = entry["hash"]
    return ""


class GenerationJournal:
    """Journal with one writer at a time. `find` looks up an entry by its kind and key."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / JOURNAL_FILE)
        self.entries: list[dict[str, Any]] = self._journal.read()
        broken = check_chain(self.entries)
        if broken:
            raise Corrupted(
                f"the journal is damaged: {broken}",
                why="its answers and verdicts can no longer be trusted as evidence",
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
        """Append unless there is already an entry of this kind and key."""
        if self.find(kind, key) is None:
            self.add(kind, key, **content)


MOST_RECORDED_BYTES = 64 << 20
_HEADING = re.compile(r"^Component (?P<id>.+?) · (?P<function>\w+) · stage (?P<stage>\d)", re.M)


class ComponentModel(NamedTuple):
    """A model that writes components."""

    label: str
    """Name for people."""
    identity: str
    """The hash of its weights or of its address."""
    ask: Callable[[tuple[Message, ...], DecodingSettings], EngineReply]
    """Raises EngineUnavailable if another attempt would not help now."""
    at_once: int = 1
    """Number of prompts that it answers in parallel."""
    give_up: Callable[[], object] = lambda: None
    """Cancel running requests, if that costs nothing but time."""


class RecordedAnswers:
    """Answers from a file, one JSON object per line: component, stage, text, and sample if it matters.
    Replaces a large model: the answers were recorded from one or written by a person.
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
                raise UserError(
                    "this is not a recorded answer",
                    why="every line must be a JSON object with the keys component, stage (a number) and text",
                    fix="correct the line, or use another file as recorded:FILE",
                    where=f"{path}:{number}",
                ) from None
        self.digest = file_digest(path)

    def ask(self, messages: tuple[Message, ...], decoding: DecodingSettings) -> EngineReply:
        heading = _HEADING.search(messages[-1].content)
        if heading is None:
            raise EngineUnavailable("the question does not mention a component")
        texts = self._answers.get((heading["id"], int(heading["stage"])), {})
        text = texts.get((decoding.seed or 0) % len(texts), "") if texts else ""
        prompt_words = sum(len(message.content.split()) for message in messages)
        return EngineReply(text, tokens=len(text.split()), prompt_tokens=prompt_words, finish_reason="stop")


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
    """A source and its verification. `key` identifies its answer."""

    key: str
    submission: Submission
    verdict: SourceVerdict
    evidence: Evidence | None


def submission_key(submission: Submission) -> str:
    """A key of everything that a verdict depends on."""
    content = submission.component.model_dump(mode="json", exclude={"line"})
    return fingerprint([content, submission.source, submission.stage, submission.modules])[:24]


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
        """Raise GracefulStop once the budget is spent."""
        most, minutes = self._max_tokens, self._max_minutes
        if most is not None and self.tokens >= most:
            raise _stopped(
                f"the budget of {most:,} tokens is spent", "run the same command with more --max-total-tokens"
            )
        if minutes is not None and self._clock() - self._began >= minutes * 60:
            raise _stopped(
                f"the budget of {minutes:g} minutes is spent",
                "run the same command again: the time budget starts over",
            )


def _stopped(what: str, fix: str) -> GracefulStop:
    return GracefulStop(what, why="every answer and verdict so far is kept", fix=fix)


class Attempts:
    """Asks, verifies and journals."""

    def __init__(
        self,
        model: ComponentModel,
        verifier: Verifier,
        journal: GenerationJournal,
        settings: GenerateOptions,
        budget: Budget,
        *,
        on_progress: OnProgress = lambda _phase, _done, _total: None,
    ) -> None:
        self._model, self._verifier, self._journal = model, verifier, journal
        self._settings, self.budget, self._progress = settings, budget, on_progress

    def ask(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Return the entry of each answer, from the journal if it is there."""
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
        """Return the reply, and how many seconds it took."""
        self.budget.require()
        # The first sample is greedy; each has a seed of its own.
        seed = question.round * self._settings.samples + question.sample
        temperature = TEMPERATURE if seed else 0.0
        decoding = DecodingSettings(self._settings.max_tokens, temperature=temperature, seed=seed)
        began = time.monotonic()
        try:
            return self._model.ask(question.messages, decoding), time.monotonic() - began
        except EngineUnavailable as error:
            raise EnvironmentFailure(
                f"{self._model.label} does not answer for component {question.component.id}, "
                f"stage {question.stage}",
                why=f"{error} (after {error.attempts} attempts)",
                fix="start it again, then run the same command: answered questions are not repeated",
            ) from error

    def is_prose(self, attempt: Attempt) -> bool:
        """Whether its answer has no code block and is not code itself."""
        entry = self._journal.find(ANSWER, attempt.key)
        return entry is not None and "```" not in entry["text"] and bool(attempt.verdict.facts.syntax)

    def verify(self, submissions: Sequence[Submission]) -> list[SourceVerdict]:
        """Verdicts in order, each computed once for all runs."""
        keys = [submission_key(submission) for submission in submissions]
        missing = {
            key: submission
            for key, submission in zip(keys, submissions, strict=True)
            if self._journal.find(VERDICT, key) is None
        }
        for key, verdict in zip(missing, self._verifier.verify(list(missing.values())), strict=True):
            self._journal.add(
                VERDICT, key, source=fingerprint(missing[key].source), verdict=verdict.model_dump(mode="json")
            )
        entries = [self._journal.find(VERDICT, key) for key in keys]
        return [SourceVerdict.model_validate(entry["verdict"]) for entry in entries if entry is not None]

    def note(self, answer: str, submission: Submission, verdict: SourceVerdict) -> None:
        """Link an answer to its verdict."""
        fields = {
            "component": submission.component.id,
            "stage": submission.stage,
            "submission": submission_key(submission),
        }
        self._journal.add_once(ATTEMPT, answer, **fields, ok=verdict.ok)

    def measure(self, submissions: Sequence[Submission]) -> list[Evidence | None]:
        keys = [submission_key(submission) for submission in submissions]
        missing = {
            key: submission
            for key, submission in zip(keys, submissions, strict=True)
            if self._journal.find(EVIDENCE, key) is None
        }
        for key, evidence in zip(missing, self._verifier.measure(list(missing.values())), strict=True):
            self._journal.add(EVIDENCE, key, evidence=evidence.model_dump(mode="json") if evidence else None)
        entries = [(self._journal.find(EVIDENCE, key) or {}).get("evidence") for key in keys]
        return [Evidence.model_validate(entry) if entry is not None else None for entry in entries]


def source_of(entry: dict[str, Any], language: Language) -> str:
    """The code of an answer, ending in one line break."""
    return extract_code(entry["text"], languages=FENCES[language]).strip() + "\n"
