"""Mutants of the code that decides: which there are, a seeded draw, and the same ones in another commit.

In: source text, a seed. Out: mutants, each with the text that replaces a part of its file. Messages, logs,
docstrings and annotations are left alone. Pure.
"""

import ast
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""The first of two only moves the boundary."""
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ARITHMETIC |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
TEXT_FUNCTIONS = re.compile(r"__repr__|__str__|_?(describe|explain|say|show|why|what)(_\w+)?")
TEXT_ARGUMENTS = {"description", "message", "fix", "reason", "help", "title", "indent", "why"}
LOGS = {"debug", "info", "warning", "error", "exception", "log", "print", "progress", "warn"}
PATHS = re.compile(r"folder|path|file|root|temporary|[A-Z]{4}$")


KEY = ("file", "name", "text", "operator", "change", "nth")
"""The fields that identify a mutant in any commit."""


class Mutant(NamedTuple):
    area: str
    file: str
    name: str
    """The qualified name of the function or class, empty in the module."""
    text: str
    """The line of the source."""
    operator: str
    change: str
    nth: int
    """Among the mutants that are the same up to here."""
    line: int
    lines: tuple[int, ...]
    """The statement; if it runs during the import, the lines that use what it defines."""
    span: tuple[int, int]
    """The bytes of the file that are replaced."""
    replacement: str

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field) for field in KEY)

    def apply(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.replacement.encode() + source[self.span[1] :]


def find_mutants(area: str, file: str, source: str) -> list[Mutant]:
    finder = _Finder(area, file, source)
    finder.visit(ast.parse(source))
    return finder.mutants


def draw(areas: Mapping[str, Sequence[Mutant]], *, seed: int, count: int) -> list[Mutant]:
    """As many of each area, spread over the operators, at most one of a line."""

    def chance(*parts: object) -> bytes:
        return hashlib.sha256(repr((seed, *parts)).encode()).digest()

    drawn: list[Mutant] = []
    for mutants in areas.values():
        by_operator = defaultdict(list)
        for mutant in sorted(mutants, key=lambda mutant: chance(mutant.key)):
            by_operator[mutant.operator].append(mutant)
        operators = sorted(by_operator, key=chance)
        rounds = itertools.zip_longest(*(by_operator[operator] for operator in operators))
        of_lines: dict[tuple[str, str, str], Mutant] = {}
        for mutant in filter(None, itertools.chain.from_iterable(rounds)):
            of_lines.setdefault((mutant.file, mutant.name, mutant.text), mutant)
        drawn += list(of_lines.values())[: count // len(areas)]
    return drawn


def match(entries: Sequence[dict[str, Any]], mutants: Sequence[Mutant]) -> tuple[list[Mutant], list[dict]]:
    """The mutants of a journal in this source, wherever they moved, and the entries whose text is gone."""
    by_key = {mutant.key: mutant for mutant in mutants}
    moved = {mutant.key[1:]: mutant for mutant in reversed(mutants)}
    matched, gone = [], []
    for entry in entries:
        key = tuple(entry[field] for field in KEY)
        mutant = by_key.get(key) or moved.get(key[1:])
        matched += [mutant] if mutant else []
        gone += [] if mutant else [entry]
    return matched, gone


class _Finder(ast.NodeVisitor):
    def __init__(self, area: str, file: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._area, self._file, self._source = area, file, source.encode()
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(len(line.encode()) for line in self._lines)]
        self._names: list[str] = []
        self._in_function = False
        self._current: tuple[int, ...] = ()
        self._seen: Counter[tuple[str, ...]] = Counter()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.stmt):
            self._current = self._lines_of(node)
            self._mutate_statement(node)
        elif isinstance(node, ast.expr):
            for operator, replacement in _variants(node):
                self._add(node, operator, f"({ast.unparse(replacement)})")
        super().visit(node)

    def _mutate_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
                self._add(node, "removed statement", "pass")
            case ast.Expr(value=ast.Call() as call) if not _is_log(call):
                self._add(node, "removed statement", "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self._add(node, "removed statement", "pass")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                self._add(value, "removed value", "(None)")
            case ast.If(test=ast.Name() | ast.Attribute() | ast.Call() as test):
                self._add(test, "negation", f"(not {ast.unparse(test)})")

    def _add(self, node: ast.stmt | ast.expr, operator: str, replacement: str) -> None:
        end = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        span = (self._starts[node.lineno - 1] + node.col_offset, end)
        text, name = self._lines[node.lineno - 1].strip(), ".".join(self._names)
        change = f"{' '.join(self._source[slice(*span)].decode().split())[:60]} -> {replacement[:60]}"
        nth = self._seen[name, text, operator, change]
        self._seen[name, text, operator, change] += 1
        identity = (self._area, self._file, name, text, operator, change, nth)
        self.mutants.append(Mutant(*identity, node.lineno, self._current, span, replacement))

    def _lines_of(self, node: ast.stmt) -> tuple[int, ...]:
        if not self._in_function:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = "|".join(target.id for target in targets if isinstance(target, ast.Name))
            uses = re.compile(rf"\b({names})\b" if names else "$^")
            return tuple(number for number, line in enumerate(self._lines, 1) if uses.search(line))
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
        return tuple(range(node.lineno, max(end or 0, node.lineno) + 1))

    def _visit_body(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if TEXT_FUNCTIONS.fullmatch(node.name):
            return
        outer, self._in_function = self._in_function, not isinstance(node, ast.ClassDef)
        self._names.append(node.name)
        if self._in_function:
            self._current = tuple(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
            for default in filter(None, (*node.args.defaults, *node.args.kw_defaults)):  # type: ignore[union-attr]
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()
        self._in_function = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_body  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if not _is_log(node):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in TEXT_ARGUMENTS]
            self.generic_visit(node)

    def _skip(self, node: ast.AST) -> None:
        """Text, and what decides nothing."""

    visit_Raise = visit_Assert = visit_JoinedStr = _skip  # noqa: N815


def _is_log(call: ast.Call) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) in LOGS


def _variants(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=[kind, *others]):
            other_kinds = COMPARISONS[type(kind)]
            for number, other in enumerate(other_kinds):
                operator = "boundary" if number == 0 and len(other_kinds) == 2 else "comparison"
                yield operator, ast.Compare(node.left, [other(), *others], node.comparators)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "dropped not", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC and _is_number(node):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield "constant", ast.Constant(node.value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            operator = "min/max" if name in {"min", "max"} else "any/all"
            yield operator, ast.Call(ast.Name(SWAPPED[name]), node.args, node.keywords)


def _is_number(node: ast.BinOp) -> bool:
    """Neither text nor a list nor a path, as far as the expression shows it."""
    displays, texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp), (str, bytes)
    if any(isinstance(p, displays) or isinstance(getattr(p, "value", 0), texts) for p in ast.walk(node)):
        return False
    return not (isinstance(node.op, ast.Div) and PATHS.search(ast.unparse(node)))
