"""Renders a chat template to text: by Jinja, or by a skeleton for its sequence of roles.

A skeleton holds only for contents that the template copies and does not look at. So the template's syntax is
read for what it compares, searches and strips (`Eye`), and each skeleton is proven on contents of several
kinds before it is used. Knows nothing of token ids or tokenizers.

A template comes with a base model, and is a program. Jinja runs it in a sandbox with bounded steps, seconds
and sizes: loops and macros are counted, and what makes a text larger is checked before it is done. A template
that exceeds a bound ends with `TemplateRunsOn`.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property, wraps
from typing import Any, NamedTuple, NoReturn

from jinja2 import BaseLoader, Template, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from graftwork.model.chat.tool_form import TAGGED, ToolForm, learn_form
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.text.tool_calls import OPEN, TOOLS_MARK, TextAndCalls, split_calls, split_tools

MOST_SECONDS = 20.0
"""CPU time limit of one rendering; milliseconds are usual."""
MOST_STEPS = 20_000_000
MOST_CHARACTERS = 2**27
MOST_NUMBER = 2**20
"""Limit on numeric arguments: widths, counts and lengths."""
MOST_BITS = 2**12
_STEPS_BETWEEN_LOOKS = 64
_WIDE = re.compile(r"\d{7}|%[-+ #0]*\*|%[^%a-zA-Z]*\.\*")
_WIDTH_FROM_ARGUMENT = re.compile(r"\{[^{}]*:[^{}]*\{")


class TemplateRunsOn(UserError):
    """A chat template exceeds what writing a conversation needs."""


def _refuse_limit(why: str) -> NoReturn:
    raise TemplateRunsOn(
        "the chat template of the base does not finish",
        why=f"{why}; it may be damaged, or made to stop this machine",
        fix="use the chat template that the model's authors publish, or another base",
    )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with limits. Threads may render at the same time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, seconds: float = MOST_SECONDS, **options: Any) -> None:
        super().__init__(loader=BaseLoader(), **options)
        self._seconds = seconds
        self._work = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters["replace"] = _bounded(self.filters["replace"], check=_check_replacement)
        self.filters["format"] = _bounded(self.filters["format"], check=_check_format)

    def start(self) -> None:
        """Reset the counters before each rendering."""
        self._work.steps, self._work.until = 0, time.thread_time() + self._seconds

    def step(self) -> bool:
        self._work.steps += 1
        if self._work.steps % _STEPS_BETWEEN_LOOKS == 0 and time.thread_time() > self._work.until:
            _refuse_limit(f"it took more than {self._seconds:g} s for one conversation")
        if self._work.steps > MOST_STEPS:
            _refuse_limit(f"it took more than {MOST_STEPS:,} steps for one conversation")
        return True

    def concat(self, parts: Iterable[str]) -> str:
        """Concatenate output: that of the whole template, of macros and of blocks that are assigned."""
        pieces, size = [], 0
        for part in parts:
            size += len(part)
            _check_size(size)
            pieces.append(part)
        return "".join(pieces)

    def join_texts(self, *parts: Any) -> str:
        return self.concat(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * max(right, 0)
            if operator in ("*", "**") and bits > MOST_BITS:
                _refuse_limit("it computes with a number of thousands of digits")
        elif operator == "*":
            _check_size(_size(left) * _size(right))
        elif operator == "+":
            _check_size(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_arguments((*args, *kwargs.values()))
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and name == "replace":
            _check_replacement(text, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, which Jinja replaces when a template reads them."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        text = str(value.__self__)

        @wraps(format_text)
        def format_bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(text)
            if _WIDTH_FROM_ARGUMENT.search(text.replace("{{", "").replace("}}", "")):
                _refuse_limit("it takes the width of a text from an argument")
            return format_text(*args, **kwargs)

        return format_bounded

    def compile_bounded(self, source: str) -> Template:
        """Compile the template, with its loops, macros and joined texts counted."""
        syntax = _CountSteps().visit(self.parse(source))
        return self.from_string(syntax.set_environment(self))


class _CountSteps(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", node), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("step", node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("join_texts", node, node.nodes)


def _call(name: str, node: nodes.Node, arguments: list[nodes.Expr] | None = None) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(method, arguments or [], [], None, None, lineno=node.lineno)


def _bounded(function: Any, check: Any = None) -> Any:
    """The filter, with its arguments checked first; Jinja's attributes on it are preserved."""
    # Jinja gives some filters its own state first, which is not an argument of the template.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args[skipped + 1 :], *kwargs.values()))
        if check is not None:
            check(*args[skipped:])
        return function(*args, **kwargs)

    return filtered


def _check_replacement(text: Any, old: Any = "", new: Any = "", *_rest: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + (text.count(old) * len(new) if len(new) > len(old) else 0))


def _check_format(text: Any, *_rest: Any) -> None:
    if _WIDE.search(str(text)):
        _refuse_limit("it asks for a text of millions of characters")


def _check_arguments(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MOST_NUMBER:
            _refuse_limit(f"it asks for {argument if abs(argument) < 10**30 else 'very many'} at once")


def _check_size(size: float) -> None:
    if size > MOST_CHARACTERS:
        _refuse_limit(f"it writes more than {MOST_CHARACTERS:,} characters")


def _size(value: Any) -> int:
    """Characters of a text, elements of a list; a number itself, as it may be a factor."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 1


class CannotProve(UserError):
    """The trained tokens of a row cannot be shown to be its reply."""


def tagged_turn_error() -> CannotProve:
    return CannotProve(
        "the chat template does not write this reply as prompt, reply, end of turn",
        why="trained on it, the model would learn a turn that serving never asks for",
        fix="drop the row; or, where the base model always reasons first, set data.reasoning to drop",
    )


def does_not_survive() -> CannotProve:
    return CannotProve(
        "the reply does not survive the tokenizer",
        why="its tokens decode to a different text",
        fix="normalize the text (often a stray control character) or drop the row",
    )


GUARD = "\ue000"
_PROBE_TEXT = "It says so."
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>\n", "\n</tool_response>"
"""As in Qwen's template."""
_DAY = date(2025, 1, 1)
_REASONING_SWITCHES = {"enable_thinking", "thinking"}
"""Names of the template switch between answering at once and reasoning first."""


class RenderedTurn(NamedTuple):
    """Pieces up to the answer (plain text at even indexes, control tokens at odd ones), then the answer.
    `body` is the rendered reply and `end` the control token after it.
    """

    prompt: list[str]
    body: str
    end: str


class ToolMessages(NamedTuple):
    """Messages and tools as a template takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    has_calls: bool = False


class ChatRenderer:
    """A chat template, rendered like in transformers and vLLM. Without `reasoning`, a template with a switch
    for it renders without reasoning.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        names: Mapping[str, str],
        reasoning: bool = True,
        seconds: float = MOST_SECONDS,
    ) -> None:
        environment = BoundedEnvironment(
            seconds=seconds,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        if "strftime_now is defined" not in source:
            # A prompt must not change overnight. A template that asks has a date of its own instead.
            environment.globals["strftime_now"] = _DAY.strftime
        try:
            self.syntax = environment.parse(source)
            self._template = environment.compile_bounded(source)
        except (TemplateError, RecursionError, MemoryError) as error:
            raise UserError(
                f"the chat template of the base is not one that Jinja can read: {error}",
                why="without it the format of turns is unknown for this model",
                fix="use the chat template that the model's authors publish",
            ) from error
        self._start = environment.start
        self._written_roles: dict[str, bool] = {}
        self._takes_tools = "tools" in meta.find_undeclared_variables(self.syntax)
        switches = meta.find_undeclared_variables(self.syntax) & _REASONING_SWITCHES
        self.switches = {} if reasoning else dict.fromkeys(sorted(switches), False)
        self._values: dict[str, Any] = {**names, **self.switches}
        self.control = re.compile(f"({_any_of(control_tokens)})")
        # What could become a control token together with the text after a content counts as one too.
        beginnings = {token[:size] for token in control_tokens for size in range(1, len(token))}
        self._forged = re.compile(rf"(?:{_any_of(control_tokens)})|({_any_of(beginnings)})\Z")

    def write(self, turns: Iterable[tuple[str, str]], *, generate: bool) -> str:
        """Render the template for (role, content); contents are inserted unchanged."""
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._render(ToolMessages(messages, None), generate=generate)

    def _render(self, conversation: "ToolMessages", *, generate: bool) -> str:
        self._start()
        try:
            return self._template.render(
                messages=conversation.messages,
                add_generation_prompt=generate,
                tools=conversation.tools,
                documents=None,
                **self._values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template is a program of others: whatever it stumbles over, it refuses these messages.
            raise CannotProve(
                f"the chat template refuses these messages: {error}",
                fix="check the order and the roles of the turns",
            ) from error
        except (RecursionError, MemoryError) as error:
            raise TemplateRunsOn(
                "the chat template of the base does not finish",
                why=f"it ended in a {type(error).__name__}",
                fix="use the chat template that the model's authors publish, or another base",
            ) from error

    def ask(self, messages: Sequence[Message]) -> list[str]:
        """Return the pieces up to where the model begins to answer."""
        turns = self._guarded(self.fit_roles(messages))
        return self._pieces(self._render(self._to_messages(turns), generate=True))

    def answer(self, messages: Sequence[Message], reply: str) -> RenderedTurn:
        """The same with the reply and its end of turn, which must directly follow."""
        turns = self._guarded((*self.fit_roles(messages), Message(role="assistant", content=reply)))
        conversation = self._to_messages(turns)
        spoken = split_calls(reply) if conversation.tools is not None or conversation.has_calls else None
        turn = self._answer(conversation)
        if spoken is not None:
            # White space at the edges of a turn is the template's.
            if self.tool_form.read(turn.body) != spoken._replace(text=spoken.text.strip()):
                raise CannotProve(
                    "the chat template does not write these tool calls so that they can be read back",
                    why="some templates write one call a turn only, or no text before a call",
                    fix="drop the row",
                )
        elif not _is_reply(turn.body, reply, prompt="".join(turn.prompt)):
            raise tagged_turn_error()
        return turn

    def _answer(self, conversation: "ToolMessages") -> RenderedTurn:
        prompt = self._render(conversation._replace(messages=conversation.messages[:-1]), generate=True)
        answered = self._render(conversation, generate=False)
        reply = answered.removeprefix(prompt)
        end = self.control.search(reply)
        if not answered.startswith(prompt) or end is None:
            raise tagged_turn_error()
        body = reply[: end.start()].replace(GUARD, "")
        return RenderedTurn(prompt=self._pieces(prompt), body=body, end=end.group())

    @property
    def tool_form(self) -> ToolForm:
        """How the model writes tool calls: as its template does, else in tags."""
        return self.own_tool_form or TAGGED

    @cached_property
    def own_tool_form(self) -> ToolForm | None:
        """How the template writes tool calls; None if it takes no tools, or they cannot be read back."""
        if not self._takes_tools:
            return None
        return learn_form(self._write_probe, CannotProve)

    def fit_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Convert messages with tools or tool results to the roles that a template without a form for them
        supports. Results become turns of the user, and tools in an unsupported system turn are put before the
        first question.
        """
        tooled = [m.role == "tool" or (m.role == "system" and TOOLS_MARK in m.content) for m in messages]
        if not any(tooled) or self.own_tool_form is not None:
            return messages
        fitted: list[Message] = []
        was_moved = False
        for message, is_tooled in zip(messages, tooled, strict=True):
            role, content = message.role, message.content
            is_moved = is_tooled and not self._writes_role(role)
            if is_moved:
                content = f"{_RESULT_OPEN}{content}{_RESULT_CLOSE}" if role == "tool" else content
                role = "user"
            # Many templates take turns of the user and of the assistant by turns only.
            if fitted and (is_moved or was_moved) and fitted[-1].role == role:
                content = f"{fitted.pop().content}\n{content}"
            fitted.append(Message(role=role, content=content))
            was_moved = is_moved
        return fitted

    def _writes_role(self, role: str) -> bool:
        """Return whether the template renders what a turn of the system or of a tool says."""
        if role not in self._written_roles:
            question, answer = ("user", "x"), ("assistant", "y")
            probe = (role, _PROBE_TEXT)
            turns = (probe, question) if role == "system" else (question, answer, probe)
            try:
                self._written_roles[role] = _PROBE_TEXT in self.write(turns, generate=True)
            except CannotProve:
                self._written_roles[role] = False
        return self._written_roles[role]

    def _write_probe(self, spoken: TextAndCalls) -> str:
        question = {"role": "user", "content": "Where is the station?"}
        tool = {"type": "function", "function": {"name": "find_station", "parameters": {"type": "object"}}}
        return self._answer(ToolMessages([question, _to_message(spoken)], [tool])).body

    def uses_tools(self, contents: Iterable[str]) -> bool:
        """Whether these contents hold tools or calls that the template has a form of its own for."""
        return any(OPEN in text or TOOLS_MARK in text for text in contents) and self.own_tool_form is not None

    def _to_messages(self, turns: Sequence[tuple[str, str]]) -> "ToolMessages":
        """Return the turns in the form for the template: calls and tools as values, if it has a form for
        them.
        """
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
        if not self.uses_tools(content for _, content in turns):
            return ToolMessages(messages, None)
        tools: list[dict[str, Any]] | None = None
        has_calls = False
        if turns[0][0] == "system" and (split := split_tools(turns[0][1])) is not None:
            messages[0]["content"], tools = split
        for index, (role, content) in enumerate(turns):
            spoken = split_calls(content) if role == "assistant" else None
            if spoken is not None and all(isinstance(call.arguments, dict) for call in spoken.calls):
                messages[index] = _to_message(spoken)
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
                fix="fix the encoding of the log, or drop the row",
            )
        guarded: list[tuple[str, str]] = []
        for message in messages:
            content = message.content
            while (split := self._forged.sub(_split_control_token, content)) != content:
                content = split  # once more: what is left may spell a shorter control token
            guarded.append((message.role, content))
        return guarded

    def _pieces(self, text: str) -> list[str]:
        return [piece.replace(GUARD, "") for piece in self.control.split(text)]


def is_text(content: str) -> bool:
    """Return whether a string can be encoded as UTF-8."""
    if content.isascii():
        return True
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_message(spoken: TextAndCalls) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in spoken.calls
    ]
    return {"role": "assistant", "content": spoken.text, "tool_calls": calls}


def _is_reply(body: str, reply: str, *, prompt: str) -> bool:
    """Return whether `body` is the reply, except for the template's own additions: white space at the edges
    of a turn, and the tag that opens the reasoning if the prompt already ends with it.
    """
    if body.strip() == reply.strip():
        return True
    opened = reply.lstrip().removeprefix("<think>")
    return prompt.rstrip().endswith("<think>") and opened != reply.lstrip() and opened.strip() == body.strip()


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text; the mark itself renders nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of the texts; one that never matches if there are none."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _split_control_token(match: re.Match[str]) -> str:
    text = match.group()
    if len(text) == 1 and not match.lastindex:
        raise CannotProve(
            "a message holds a control token of one character",
            why="it cannot be distinguished from the ones that the template writes",
            fix=f"remove the character U+{ord(text):04X} from the row",
        )
    return text[0] + GUARD + text[1:]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As transformers does it: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


MARK = re.compile("\ue001([0-9]+)\ue001")
_CHANGES_EDGES = {"trim", "strip", "lstrip", "rstrip"}
_PROBES = (
    "Straight on: 'quoted' \"twice\" <b>&amp;</b> {0}\n\n\t- Ärger, 1.5 \\n of {{ it }} %",
    "x{0}",
    "{0}. LOREM ipsum\r\ndolor   sit [amet] (consectetur) #" + " adipiscing" * 400 + "!",
)


class Skeleton(NamedTuple):
    """Alternating plain text and control tokens, with the text as strings and indexes of contents. `body` is
    the answer in the same form: the reply, with white space that the template writes around it; `end` is the
    control token that ends the turn.
    """

    prompt: list[list[str | int]]
    body: list[str | int]
    end: str

    def fill(self, contents: Sequence[str]) -> RenderedTurn:
        """The turn with the contents in their places."""
        return RenderedTurn(
            [_fill(parts, contents) for parts in self.prompt], _fill(self.body, contents), self.end
        )


class ContentChecks:
    """Properties of a content that the template may react to."""

    def __init__(self, syntax: nodes.Template) -> None:
        parts = [
            part
            for part in syntax.find_all(nodes.Getitem)
            if not (isinstance(part.arg, nodes.Const) and isinstance(part.arg.value, str))
        ]
        self.copies_only = not any(_speaks_of_content(part.node) for part in parts)
        self._equal = frozenset(text for node in syntax.find_all(nodes.Compare) for text in _texts(node))
        self._edges = frozenset("".join(_find_arguments(syntax, stripping=True)))
        inside = set(_find_arguments(syntax, stripping=False))
        # What is looked for by `in`, and literals with a name, which may be used in any way.
        for node in syntax.find_all(nodes.Compare):
            if any(operand.op in ("in", "notin") for operand in node.ops):
                inside |= set(_texts(node.expr))
        for assigned in syntax.find_all(nodes.Assign):
            if isinstance(assigned.node, nodes.Const):
                inside |= set(_texts(assigned.node))
        inside.discard("")
        self._inside = re.compile("|".join(map(re.escape, inside))) if inside else None

    def overlooks(self, content: str) -> bool:
        """Return whether the template can do nothing with this content but copy it."""
        if not content or GUARD in content or content in self._equal or not is_text(content):
            return False
        first, last = content[0], content[-1]
        if first.isspace() or last.isspace() or first in self._edges or last in self._edges:
            return False
        return self._inside is None or self._inside.search(content) is None


class SkeletonCache:
    """Skeletons by sequence of roles, each proven before its first use."""

    LIMIT = 1024

    def __init__(self, turns: ChatRenderer) -> None:
        self._turns = turns
        self._eye = ContentChecks(turns.syntax)
        self._by_roles: dict[tuple[str, ...], Skeleton | None] = {}
        self.trusted = self._eye.copies_only

    def find(self, roles: tuple[str, ...], contents: Sequence[str]) -> Skeleton | None:
        """Return the skeleton that these contents may be filled into; None: render the row with the template.
        The last role is the assistant's and the last content its reply.
        """
        if not self.trusted or len(set(contents)) != len(contents):
            return None
        try:
            skeleton = self._by_roles[roles]
        except KeyError:
            if len(self._by_roles) >= self.LIMIT:
                self._by_roles.clear()
            skeleton = self._by_roles[roles] = self._derive(roles)
        if skeleton is None or not all(map(self._eye.overlooks, contents)):
            return None
        return skeleton

    def _derive(self, roles: tuple[str, ...]) -> Skeleton | None:
        marks = [f"\ue001{index}\ue001" for index in range(len(roles))]
        try:
            prompt, answered = self._write(roles, marks)
            for probe in _PROBES:
                contents = [probe.replace("{0}", f"n{index}") for index in range(len(roles))]
                if self._write(roles, contents) != (_filled(prompt, contents), _filled(answered, contents)):
                    return None
        except (CannotProve, IndexError):
            return None
        reply = answered.removeprefix(prompt)
        end = self._turns.control.search(reply)
        if not answered.startswith(prompt) or end is None:
            return None
        body = reply[: end.start()]
        if body.strip() != marks[-1]:
            return None
        pieces = self._turns.control.split(prompt)
        return Skeleton(prompt=[_parts(piece) for piece in pieces], body=_parts(body), end=end.group())

    def _write(self, roles: Sequence[str], contents: Sequence[str]) -> tuple[str, str]:
        turns = list(zip(roles, contents, strict=True))
        return self._turns.write(turns[:-1], generate=True), self._turns.write(turns, generate=False)


def _parts(text: str) -> list[str | int]:
    """Text and numbers of contents; nothing empty."""
    pieces = MARK.split(text)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces) if piece]


def _fill(parts: list[str | int], contents: Sequence[str]) -> str:
    return "".join([part if isinstance(part, str) else contents[part] for part in parts])


def _filled(text: str, contents: Sequence[str]) -> str:
    return MARK.sub(lambda match: contents[int(match.group(1))], text)


def _texts(node: nodes.Node) -> Iterator[str]:
    """The string literals in an expression, itself included."""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    for constant in node.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _find_arguments(syntax: nodes.Template, *, stripping: bool) -> Iterator[str]:
    """The string literals given to methods, filters and tests: those that strip edges, or all others."""
    for call in syntax.find_all(nodes.Call):
        if (getattr(call.node, "attr", "") in _CHANGES_EDGES) == stripping:
            for argument in (*call.args, *call.kwargs):
                yield from _texts(argument)
    for kind in (nodes.Filter, nodes.Test):
        for used in syntax.find_all(kind):
            if (used.name in _CHANGES_EDGES) == stripping:
                for argument in (*used.args, *used.kwargs):
                    yield from _texts(argument)


def _speaks_of_content(node: nodes.Node) -> bool:
    """Return whether an expression names a content, or a variable derived from it. A part returned by `split`
    is not part of the content unless the separator occurs in it, and then the content has been checked
    already.
    """
    if isinstance(node, nodes.Call) and getattr(node.node, "attr", "") == "split" and node.args:
        return False
    names = [n.name for n in node.find_all(nodes.Name)]
    names += [n.attr for n in node.find_all(nodes.Getattr)]
    names += list(_texts(node))
    if isinstance(node, nodes.Name):
        names.append(node.name)
    if isinstance(node, nodes.Getattr):
        names.append(node.attr)
    return any("content" in name or "reason" in name for name in names)
