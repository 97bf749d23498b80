"""What rendering gives: the tokens of a row and where training begins, or a refusal."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from jinja2 import BaseLoader, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graftwork.model.chat.tool_form import ToolForm, learn_form
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message
from graftwork.text.tool_calls import OPEN, TOOLS_MARK, TextAndCalls, split_calls, split_tools


@dataclass(frozen=True)
class RenderedTokens:
    """`tokens[trained_from:]` is the reply and the token that ends its turn."""

    tokens: Sequence[int]
    trained_from: int


class CannotProve(UserMistake):
    """The trained tokens of a row cannot be shown to be its reply."""


def not_a_plain_turn() -> CannotProve:
    return CannotProve(
        "the chat template does not write this reply as prompt, reply, end of turn",
        why="trained on it, the model would learn a turn that serving never asks for",
        fix="drop the row; or, where the base model always reasons first, set data.reasoning to drop",
    )


def does_not_survive() -> CannotProve:
    return CannotProve(
        "the reply does not survive the tokenizer",
        why="its tokens decode to another text",
        fix="normalise the text (often a stray control character) or drop the row",
    )


GUARD = "\ue000"
_DAY = date(2025, 1, 1)
_REASONING_SWITCHES = {"enable_thinking", "thinking"}
"""What templates call the switch between answering at once and reasoning first."""


class RenderedTurn(NamedTuple):
    """Pieces up to the answer (plain text at even places, control tokens at odd ones), then the answer.

    `body` is what the template makes of the reply and `end` the control token behind it.
    """

    asked: list[str]
    body: str
    end: str


class ToolMessages(NamedTuple):
    """Messages and tools as a template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    has_calls: bool = False


class ChatRenderer:
    """A chat template, rendered as transformers and vLLM render it.

    Without `reasoning` a template that has a switch for it is asked for answers without.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        names: Mapping[str, str],
        reasoning: bool = True,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            loader=BaseLoader(),
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        if "strftime_now is defined" not in source:
            # A prompt must not change overnight. A template that asks has a date of its own instead.
            environment.globals["strftime_now"] = _DAY.strftime
        self.syntax = environment.parse(source)
        self._takes_tools = "tools" in meta.find_undeclared_variables(self.syntax)
        self._template = environment.from_string(source)
        known = meta.find_undeclared_variables(self.syntax) & _REASONING_SWITCHES
        self.switches = {} if reasoning else dict.fromkeys(sorted(known), False)
        self._values: dict[str, Any] = {**names, **self.switches}
        self.control = re.compile(f"({_any_of(control_tokens)})")
        # What could become a control token together with the text behind a content counts as one too.
        beginnings = {token[:size] for token in control_tokens for size in range(1, len(token))}
        self._forged = re.compile(rf"(?:{_any_of(control_tokens)})|({_any_of(beginnings)})\Z")

    def write(self, turns: Iterable[tuple[str, str]], *, generate: bool) -> str:
        """The template's text for (role, content); contents are put in as they are."""
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._render(ToolMessages(messages, None), generate=generate)

    def _render(self, given: "ToolMessages", *, generate: bool) -> str:
        try:
            return self._template.render(
                messages=given.messages,
                add_generation_prompt=generate,
                tools=given.tools,
                documents=None,
                **self._values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program of others: whatever it stumbles over, it refuses these messages.
            raise CannotProve(
                f"the chat template refuses these messages: {error}",
                fix="check the order and the roles of the turns",
            ) from error

    def ask(self, messages: Sequence[Message]) -> list[str]:
        """The pieces up to the place where the model begins to answer."""
        turns = self._guarded(messages)
        return self._pieces(self._render(self._to_messages(turns), generate=True))

    def answer(self, messages: Sequence[Message], reply: str) -> RenderedTurn:
        """The same with the reply and its end of turn, which must directly follow."""
        turns = self._guarded((*messages, Message(role="assistant", content=reply)))
        given = self._to_messages(turns)
        said = split_calls(reply) if given.tools is not None or given.has_calls else None
        turn = self._answer(given)
        if said is not None and self.tool_form is not None:
            if self.tool_form.read(turn.body) != _trim(said):
                raise _calls_do_not_survive()
        elif not _is_reply(turn.body, reply, asked="".join(turn.asked)):
            raise not_a_plain_turn()
        return turn

    def _answer(self, given: "ToolMessages") -> RenderedTurn:
        asked = self._render(given._replace(messages=given.messages[:-1]), generate=True)
        answered = self._render(given, generate=False)
        rest = answered.removeprefix(asked)
        end = self.control.search(rest)
        if not answered.startswith(asked) or end is None:
            raise not_a_plain_turn()
        body = rest[: end.start()].replace(GUARD, "")
        return RenderedTurn(asked=self._pieces(asked), body=body, end=end.group())

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the template writes tool calls; None where it takes no tools, or they cannot be read back."""
        if not self._takes_tools:
            return None
        return learn_form(self._write_probe, CannotProve)

    def _write_probe(self, said: TextAndCalls) -> str:
        question = {"role": "user", "content": "Where is the station?"}
        tool = {"type": "function", "function": {"name": "find_station", "parameters": {"type": "object"}}}
        return self._answer(ToolMessages([question, _to_message(said)], [tool])).body

    def uses_tools(self, contents: Iterable[str]) -> bool:
        """Whether these contents hold tools or calls that the template has a form of its own for."""
        return any(OPEN in text or TOOLS_MARK in text for text in contents) and self.tool_form is not None

    def _to_messages(self, turns: Sequence[tuple[str, str]]) -> "ToolMessages":
        """The turns as the template takes them: calls and tools as values, if it has a form for them."""
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
        if not self.uses_tools(content for _, content in turns):
            return ToolMessages(messages, None)
        tools: list[dict[str, Any]] | None = None
        has_calls = False
        if turns[0][0] == "system" and (split := split_tools(turns[0][1])) is not None:
            tools = list(split.tools)
            messages[0]["content"] = split.prompt
        for place, (role, content) in enumerate(turns):
            said = split_calls(content) if role == "assistant" else None
            if said is not None and all(isinstance(call.arguments, dict) for call in said.calls):
                messages[place] = _to_message(said)
                has_calls = True
        if tools is not None and not messages[0]["content"] and messages[0]["role"] == "system":
            del messages[0]
        return ToolMessages(messages, tools, has_calls)

    def _guarded(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        if any(GUARD in message.content for message in messages):
            raise CannotProve(
                "a message holds the private character U+E000",
                fix="remove it from the row; it has no meaning",
            )
        if not all(is_text(message.content) for message in messages):
            raise CannotProve(
                "a message holds half a character (a lone surrogate)",
                why="no tokenizer can read it",
                fix="mend the encoding of the log, or drop the row",
            )
        return [(m.role, self._disarmed(m.content)) for m in messages]

    def _disarmed(self, content: str) -> str:
        while (guarded := self._forged.sub(_guard, content)) != content:
            content = guarded  # once more: what is left may spell a shorter control token
        return content

    def _pieces(self, text: str) -> list[str]:
        return [piece.replace(GUARD, "") for piece in self.control.split(text)]


def is_text(content: str) -> bool:
    """Whether a string can be written as UTF-8."""
    if content.isascii():
        return True
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_message(said: TextAndCalls) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.calls
    ]
    return {"role": "assistant", "content": said.text, "tool_calls": calls}


def _trim(said: TextAndCalls) -> TextAndCalls:
    """White space at the edges of a turn is the template's."""
    return TextAndCalls(said.text.strip(), said.calls)


def _calls_do_not_survive() -> CannotProve:
    return CannotProve(
        "the chat template does not write these tool calls so that they can be read back",
        why="some templates write one call a turn only, or no text before a call",
        fix="drop the row",
    )


def _is_reply(body: str, reply: str, *, asked: str) -> bool:
    """Whether `body` is the reply, up to what is the template's own.

    That is white space at the edges of a turn, which it trims or writes; and the tag that opens the
    reasoning, where the prompt already ends with it.
    """
    if body.strip() == reply.strip():
        return True
    opened = reply.lstrip().removeprefix("<think>")
    return asked.rstrip().endswith("<think>") and opened != reply.lstrip() and opened.strip() == body.strip()


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote; the mark itself writes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of the texts; one that never matches where there are none."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _guard(found: re.Match[str]) -> str:
    text = found.group()
    if len(text) == 1 and not found.lastindex:
        raise CannotProve(
            "a message holds a control token of one character",
            why="it cannot be told apart from the ones that the template writes",
            fix=f"remove the character U+{ord(text):04X} from the row",
        )
    return text[0] + GUARD + text[1:]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As transformers does it: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
