"""Jinja for the chat templates of others: bounded in steps, seconds and the size of texts.

A template comes with a base model, and is a program. Loops and macros are counted, and what makes a text
larger is checked before it is done: a template that runs on ends with `TemplateRunsOn`.
"""

import re
import threading
import time
from collections.abc import Iterable
from functools import wraps
from typing import Any, NoReturn

from jinja2 import BaseLoader, Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from graftwork.records.errors import UserMistake

MOST_SECONDS = 20.0
"""Of a processor, for one rendering; usual are milliseconds."""
MOST_STEPS = 20_000_000
MOST_CHARACTERS = 2**27
MOST_NUMBER = 2**20
"""As an argument: of widths, counts and lengths."""
MOST_BITS = 2**12
_STEPS_BETWEEN_LOOKS = 64
_WIDE = re.compile(r"\d{7}|%[-+ #0]*\*|%[^%a-zA-Z]*\.\*")


class TemplateRunsOn(UserMistake):
    """A chat template does more than any that writes a conversation."""


def _refuse(why: str) -> NoReturn:
    raise TemplateRunsOn(
        "the chat template of the base runs on",
        why=f"{why}; it may be damaged, or made to stop this machine",
        fix="use the chat template that the model's authors publish, or another base",
    )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with bounds. Threads may render at once."""

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
        """Before each rendering: count from zero."""
        self._work.steps, self._work.until = 0, time.thread_time() + self._seconds

    def step(self) -> bool:
        self._work.steps += 1
        if self._work.steps % _STEPS_BETWEEN_LOOKS == 0 and time.thread_time() > self._work.until:
            _refuse(f"it took more than {self._seconds:g} s for one conversation")
        if self._work.steps > MOST_STEPS:
            _refuse(f"it took more than {MOST_STEPS:,} steps for one conversation")
        return True

    def concat(self, parts: Iterable[str]) -> str:
        """Of what was written: of the whole, of macros and of blocks that are assigned."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            _check_size(size)
            kept.append(part)
        return "".join(kept)

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
                _refuse("it computes with a number of thousands of digits")
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
        if isinstance(text, str) and name.startswith("format"):
            _check_format(text)
        return super().call(__context, __obj, *args, **kwargs)

    def compile_bounded(self, source: str) -> Template:
        """The template, with its loops, macros and joined texts counted."""
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
    """The filter, with its arguments looked at first; what Jinja has noted about it stays."""
    # Jinja gives some filters its own state first, which is no argument of the template.
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
        _refuse("it asks for a text of millions of characters")


def _check_arguments(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MOST_NUMBER:
            _refuse(f"it asks for {argument if abs(argument) < 10**30 else 'very many'} at once")


def _check_size(size: float) -> None:
    if size > MOST_CHARACTERS:
        _refuse(f"it writes more than {MOST_CHARACTERS:,} characters")


def _size(value: Any) -> int:
    """Characters of a text, elements of a list; a number itself, as it may be a factor."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 1
