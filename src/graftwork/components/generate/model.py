"""Who answers: any inference engine, a child process with one, or answers that were recorded before.

In: messages and how to decode. Out: a reply. Generation knows no more about a model than this.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from graftwork.files.config_text import read_config_text
from graftwork.files.disk import file_digest
from graftwork.inference.engine import (
    DecodingSettings,
    EngineFacts,
    EngineReply,
    EngineUnavailable,
    InferenceEngine,
    OnToken,
    RenderedPrompt,
)
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message

MOST_RECORDED_BYTES = 64 << 20
_HEADING = re.compile(r"^Component (?P<id>.+?) · (?P<function>\w+) · stage (?P<stage>\d)", re.M)


class ComponentModel(Protocol):
    """A model that is asked for components."""

    @property
    def label(self) -> str:
        """How people know it."""

    @property
    def identity(self) -> str:
        """The hash of its weights or of its address."""

    @property
    def at_once(self) -> int:
        """Questions that it answers at a time."""

    def ask(self, messages: tuple[Message, ...], decoding: DecodingSettings) -> EngineReply:
        """Raise EngineUnavailable where another attempt would not help now."""


class EngineModel:
    """An inference engine as a model."""

    def __init__(
        self, engine: InferenceEngine, *, label: str, adapter: str | None = None, at_once: int = 1
    ) -> None:
        self._engine, self._adapter = engine, adapter
        self.label, self.at_once = label, at_once

    @property
    def identity(self) -> str:
        return self._engine.facts.fingerprint

    def ask(self, messages: tuple[Message, ...], decoding: DecodingSettings) -> EngineReply:
        [reply] = self._engine.answer([self._engine.render(messages)], decoding, adapter=self._adapter)
        return reply


def _parse_row(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _whole(value: object, where: str) -> int:
    if isinstance(value, int):
        return value
    raise _no_answer(where)


def _no_answer(where: str) -> UserMistake:
    return UserMistake(
        "this is no recorded answer",
        why="every line is a JSON object with the keys component, stage (a number) and text",
        fix="correct the line, or name another file as recorded:FILE",
        where=where,
    )


class RecordedEngine:
    """Answers from a file, one JSON object a line: component, stage, text, and sample where it matters.

    Stands in for a large model: the file is what such a model answered, or what a person wrote in its place.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[tuple[str, int], dict[int, str]] = {}
        text = read_config_text(path, most_bytes=MOST_RECORDED_BYTES)
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                self._add(_parse_row(line), f"{path}:{number}")
        self._digest = file_digest(path)

    def _add(self, row: object, where: str) -> None:
        if not isinstance(row, dict) or not {"component", "stage", "text"} <= row.keys():
            raise _no_answer(where)
        known = self._answers.setdefault((str(row["component"]), _whole(row["stage"], where)), {})
        known[_whole(row.get("sample", len(known)), where)] = str(row["text"])

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts("recorded", "none", self._digest, {"file": self._path.name})

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()

    def render(self, messages: tuple[Message, ...]) -> RenderedPrompt:
        return RenderedPrompt(messages, [])

    def answer(
        self,
        prompts: Sequence[RenderedPrompt],
        decoding: DecodingSettings,
        *,
        adapter: str | None = None,
        on_token: OnToken | None = None,
    ) -> list[EngineReply]:
        return [self._reply(prompt.messages, decoding.seed or 0) for prompt in prompts]

    def stream(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Iterator[str]:
        yield self._reply(prompt.messages, decoding.seed or 0).text

    def close(self) -> None:
        """Nothing is open."""

    def _reply(self, messages: tuple[Message, ...], sample: int) -> EngineReply:
        found = _HEADING.search(messages[-1].content)
        if found is None:
            raise EngineUnavailable("the question names no component")
        known = self._answers.get((found["id"], int(found["stage"])), {})
        text = known.get(sample % max(1, len(known)), "") if known else ""
        words = sum(len(message.content.split()) for message in messages)
        return EngineReply(text, tokens=len(text.split()), prompt_tokens=words, finish_reason="stop")
