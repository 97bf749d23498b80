"""The text of a chat template for a sequence of roles, with places for the contents.

In: a chat template and roles. Out: a skeleton to fill in, so that the template need not be run for
every row; or none. Knows nothing of token ids or tokenizers.

A skeleton holds only for contents that the template copies and does not look at. So the template's
syntax is read for what it compares, searches and strips (`Eye`); a content that could catch its eye
is rendered for real. And each skeleton is proven on contents of several kinds before it is used.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jinja2 import nodes

from graftwork.model.chat.renderer import GUARD, CannotProve, ChatRenderer, is_text

MARK = re.compile("\ue001([0-9]+)\ue001")
_CHANGES_EDGES = {"trim", "strip", "lstrip", "rstrip"}
_PROBES = (
    "Straight on: 'quoted' \"twice\" <b>&amp;</b> {0}\n\n\t- Ärger, 1.5 \\n of {{ it }} %",
    "x{0}",
    "{0}. LOREM ipsum\r\ndolor   sit [amet] (consectetur) #" + " adipiscing" * 400 + "!",
)


class Skeleton(NamedTuple):
    """Alternately plain text and control tokens, the text as strings and numbers of contents.

    `body` is the answer in the same form: the reply, with white space that the template writes
    around it; `end` is the control token that ends the turn.
    """

    asked: list[list[str | int]]
    body: list[str | int]
    end: str

    def fill(self, contents: Sequence[str]) -> tuple[list[str], str]:
        """The pieces up to the answer, and the answer, with the contents in their places."""
        return [_fill(parts, contents) for parts in self.asked], _fill(self.body, contents)


class ContentChecks:
    """What in a content the template may react to."""

    def __init__(self, syntax: nodes.Template) -> None:
        parts = [part for part in syntax.find_all(nodes.Getitem) if not _is_key(part.arg)]
        self.copies_only = not any(_speaks_of_content(part.node) for part in parts)
        self._equal = frozenset(text for node in syntax.find_all(nodes.Compare) for text in _texts(node))
        self._edges = frozenset("".join(_find_arguments(syntax, stripping=True)))
        inside = {text for text in (*_find_arguments(syntax, stripping=False), *_find_sought(syntax)) if text}
        self._inside = re.compile("|".join(map(re.escape, inside))) if inside else None

    def overlooks(self, content: str) -> bool:
        """Whether the template can do nothing with this content but copy it."""
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
        self._known: dict[tuple[str, ...], Skeleton | None] = {}
        self.trusted = self._eye.copies_only

    def find(self, roles: tuple[str, ...], contents: Sequence[str]) -> Skeleton | None:
        """The skeleton that these contents may be filled into; None: render the row for real.

        The last role is the assistant's and the last content its reply.
        """
        if not self.trusted or len(set(contents)) != len(contents):
            return None
        try:
            skeleton = self._known[roles]
        except KeyError:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            skeleton = self._known[roles] = self._derive(roles)
        if skeleton is None or not all(map(self._eye.overlooks, contents)):
            return None
        return skeleton

    def _derive(self, roles: tuple[str, ...]) -> Skeleton | None:
        marks = [f"\ue001{place}\ue001" for place in range(len(roles))]
        try:
            asked, answered = self._write(roles, marks)
            for probe in _PROBES:
                contents = [probe.replace("{0}", f"n{place}") for place in range(len(roles))]
                if self._write(roles, contents) != (_filled(asked, contents), _filled(answered, contents)):
                    return None
        except (CannotProve, IndexError):
            return None
        rest = answered.removeprefix(asked)
        end = self._turns.control.search(rest)
        if not answered.startswith(asked) or end is None:
            return None
        body = rest[: end.start()]
        if body.strip() != marks[-1]:
            return None
        pieces = self._turns.control.split(asked)
        return Skeleton(asked=[_parts(piece) for piece in pieces], body=_parts(body), end=end.group())

    def _write(self, roles: Sequence[str], contents: Sequence[str]) -> tuple[str, str]:
        turns = list(zip(roles, contents, strict=True))
        return self._turns.write(turns[:-1], generate=True), self._turns.write(turns, generate=False)


def _parts(text: str) -> list[str | int]:
    """Text and numbers of contents; nothing empty."""
    pieces = MARK.split(text)
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces) if piece]


def _fill(parts: list[str | int], contents: Sequence[str]) -> str:
    return "".join([part if isinstance(part, str) else contents[part] for part in parts])


def _filled(text: str, contents: Sequence[str]) -> str:
    return MARK.sub(lambda found: contents[int(found.group(1))], text)


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


def _find_sought(syntax: nodes.Template) -> Iterator[str]:
    """What is looked for by `in`, and literals with a name, which may be used in any way."""
    for node in syntax.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in node.ops):
            yield from _texts(node.expr)
    for assigned in syntax.find_all(nodes.Assign):
        if isinstance(assigned.node, nodes.Const):
            yield from _texts(assigned.node)


def _is_key(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _speaks_of_content(node: nodes.Node) -> bool:
    """Whether an expression names a content, or a variable that is called after it.

    A part of what `split` gives is no part of the content unless the separator occurs in it, and
    then the content has caught the eye already.
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
