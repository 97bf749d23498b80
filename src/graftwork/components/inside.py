"""The program that runs next to a generated component in the sandbox: reads, calls, counts, mutates it.

Input: one task as JSON. Output: a line with facts about the source, written before any of it has run, and a
line with what the calls gave; or a line with its mutants, none of which is run. Expected values are not here.
Imports nothing of ours: its text is sent to the sandbox.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import sys
import tracemalloc
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

DEEPEST = 20
MOST_EVENTS = 5_000_000
FORBIDDEN_NAMES = frozenset([
    "eval", "exec", "compile", "__import__", "globals", "locals", "vars", "open", "input",
    "breakpoint", "exit", "quit", "memoryview",
])  # fmt: skip
FORBIDDEN_ATTRIBUTES = frozenset([
    "_getframe", "f_back", "f_locals", "f_globals", "gi_frame", "tb_frame", "settrace", "setprofile",
    "attrgetter", "methodcaller", "get_type_hints", "ForwardRef",
])  # fmt: skip
BY_NAME = frozenset(["getattr", "setattr", "delattr"])
ALLOWED_DUNDER = frozenset([
    "__init__", "__name__", "__doc__", "__all__", "__len__", "__iter__", "__next__", "__eq__",
    "__hash__", "__str__", "__repr__",
])  # fmt: skip
OPTIMISED_NAMES = frozenset([
    "lru_cache", "cache", "cached_property", "intern", "bytearray", "ThreadPoolExecutor",
    "ProcessPoolExecutor",
])  # fmt: skip
OPTIMISED_MODULES = frozenset([
    "functools", "threading", "multiprocessing", "concurrent", "asyncio", "array", "ctypes", "mmap",
    "numba", "numpy", "heapq", "bisect",
])  # fmt: skip
BUILTINS = frozenset([
    "list", "dict", "set", "str", "int", "float", "bool", "type", "id", "sum", "min", "max", "len",
    "map", "filter", "input", "all", "any", "next", "iter", "hash",
])  # fmt: skip
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert)


def main(text: str) -> None:
    task = json.loads(text)
    output, dump, put = os.dup(1), json.dumps, os.write

    def write(value: Any) -> None:
        """Write a line that bypasses whatever the component installed as standard output."""
        data = (dump(value) + "\n").encode()
        while data:
            data = data[put(output, data) :]

    results: dict[str, Any] = {}
    if task["mode"] == "judge":
        write(judge(task["items"]))
        return
    if task["mode"] == "mutants":
        write(list(make_mutants(task["source"], task["most"])))
        return
    facts = read_facts(task["source"], task["function"])
    allowed = set(task["allowed"])
    refused = refuse(facts, allowed) or refuse_reach(task["source"], task["module"], allowed)
    write({**facts, "refused": refused})
    if not refused:
        results = measure(task) if task["mode"] == "evidence" else {"calls": call_all(task)}
    write(results)


def refuse(facts: dict[str, Any], allowed: set[str]) -> str:
    """Return why a source is not run at all; empty if it may be run."""
    if facts["syntax"]:
        return f"is not Python: {facts['syntax']}"
    disallowed = [name for name in facts["imports"] if name not in allowed]
    if disallowed:
        return f"imports {', '.join(disallowed)}, which the spec does not allow"
    if facts["forbidden"]:
        return f"uses {', '.join(facts['forbidden'])}, which no component needs"
    if not facts["defines"]:
        return "does not define the function that the spec asks for"
    return ""


def read_facts(source: str, function: str) -> dict[str, Any]:
    """Static facts about the source; nothing of it is run."""
    facts: dict[str, Any] = {"syntax": "", "imports": [], "forbidden": [], "defines": False}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return {**facts, "syntax": f"{type(error).__name__}{line}"}
    definition = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function), None
    )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [node.name for node in tree.body if isinstance(node, definitions)]
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    literals = [
        constant for constant in constants if type(constant) in (str, int, float) and len(str(constant)) < 500
    ]
    return {
        "syntax": "",
        "imports": list(dict.fromkeys(_imports(tree))),
        "forbidden": list(dict.fromkeys(_forbidden(tree))),
        "defines": definition is not None,
        "public": [name for name in defined if not name.startswith("_")],
        "parameters": _parameters(definition) if definition is not None else [],
        "effects": [node.lineno for node in tree.body if _has_effect(node)],
        "complexity": max((_complexity(node) for node in functions), default=0),
        "lines": _count_lines(tree),
        "optimisations": sorted(set(_optimisations(tree))),
        "statements": list(_statements(tree)),
        "quality": sorted(set(_quality(tree))),
        "literals": literals[:200],
    }


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in FORBIDDEN_NAMES or _is_internal(node.id)):
            yield node.id
        elif isinstance(node, ast.Attribute) and (
            node.attr in FORBIDDEN_ATTRIBUTES or _is_internal(node.attr)
        ):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            yield from (
                attribute
                for attribute in names
                if attribute in FORBIDDEN_ATTRIBUTES or _is_internal(attribute)
            )
        elif isinstance(node, ast.MatchClass):
            yield from (name for name in node.kwd_attrs if _is_internal(name))
    literal = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _names_plainly(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BY_NAME and id(node) not in literal:
            yield f"{node.id} with a computed or internal name"


def _names_plainly(call: ast.Call) -> bool:
    """Whether the second argument is a literal that could be written as an attribute."""
    name = call.args[1] if len(call.args) > 1 else None
    if any(isinstance(argument, ast.Starred) for argument in call.args[:2]) or not isinstance(
        name, ast.Constant
    ):
        return False
    forbidden = name.value in FORBIDDEN_ATTRIBUTES or _is_internal(str(name.value))
    return isinstance(name.value, str) and not forbidden


def refuse_reach(source: str, own_module: str, allowed: set[str]) -> str:
    """Return how a source reaches other modules through those that it may import; empty if it does not."""
    reach = _ImportReach(ast.parse(source), own_module.partition(".")[0], allowed)
    return f"reaches {', '.join(dict.fromkeys(reach.beyond))} through an import" if reach.beyond else ""


class _ImportReach(ast.NodeVisitor):
    """Collects members of imported modules that are modules or not public, and modules used as values."""

    def __init__(self, tree: ast.Module, package: str, allowed: set[str]) -> None:
        self._package, self._allowed = package, allowed
        self._modules: dict[str, set[str]] = {}
        self._hidden: frozenset[str] = frozenset()
        self.beyond: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._modules.setdefault(alias.asname or module, set()).add(module)
            elif isinstance(node, ast.ImportFrom):
                self._from(node.module or "", node.names)
        self.visit(tree)

    def _from(self, module: str, names: list[ast.alias]) -> None:
        public = self._members(module)
        for alias in names:
            inner = f"{module}.{alias.name}"
            if inner in self._allowed:
                self._modules.setdefault(alias.asname or alias.name, set()).add(inner)
            elif alias.name == "*" and not self._is_own(module):
                self.beyond += [
                    f"{module}.{name}" for name in public or () if not self._is_plain(module, name)
                ]
            elif public is not None and not (alias.name in public and self._is_plain(module, alias.name)):
                self.beyond.append(inner)

    def _members(self, module: str) -> set[str] | None:
        """Public names; None for a module that is not installed."""
        if self._is_own(module):
            tree, names = _read_own(module), set()
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            bound = [getattr(node, "name", None) or getattr(node, "id", "") for node in ast.walk(tree)]
            return {name for name in bound if name and not name.startswith("_")} - names
        loaded = _find_module(module)
        if loaded is None:
            return None
        return set(getattr(loaded, "__all__", None) or (name for name in dir(loaded) if name[:1] != "_"))

    def _is_own(self, module: str) -> bool:
        return module.partition(".")[0] == self._package

    def _is_plain(self, module: str, name: str) -> bool:
        return self._is_own(module) or not isinstance(getattr(_find_module(module), name, None), type(sys))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._modules and node.id not in self._hidden and isinstance(node.ctx, ast.Load):
            self.beyond.append(f"the module {node.id} as a value")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            parts, base = [base.attr, *parts], base.value
        if not isinstance(base, ast.Name) or base.id not in self._modules or base.id in self._hidden:
            self.visit(base)
            return
        self.beyond += filter(None, (self._follow(origin, parts) for origin in self._modules[base.id]))

    def _follow(self, module: str, parts: list[str]) -> str:
        """Return the first dotted name that is not allowed; empty if the parts lead to a plain member."""
        for part in parts:
            inner = f"{module}.{part}"
            if any(f"{allowed}.".startswith(f"{inner}.") for allowed in self._allowed):
                module = inner
            elif self._is_own(module):
                return "" if part in (self._members(module) or ()) else inner
            else:
                return "" if self._is_plain(module, part) else inner
        return f"{module} as a value"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(isinstance(statement, ast.Import | ast.ImportFrom) for statement in node.body):
            self.beyond.append("a module as an attribute of a class")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A parameter hides a module in the body, unless the source rebinds that name."""
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        names = {bound.arg for bound in every if bound is not None}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                names -= {(alias.asname or alias.name).partition(".")[0] for alias in inner.names}
            elif isinstance(inner, ast.Global):
                names -= set(inner.names)
        for part in (*node.decorator_list, args, node.returns):
            if part is not None:
                self.visit(part)
        before, self._hidden = self._hidden, self._hidden | names
        for statement in node.body:
            self.visit(statement)
        self._hidden = before


def _find_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def _read_own(module: str) -> ast.AST:
    """A module of the package, which is read and not run."""
    try:
        return ast.parse(Path(module.replace(".", "/") + ".py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ast.Module([], [])


def _is_internal(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in ALLOWED_DUNDER


def _parameters(function: ast.FunctionDef) -> list[dict[str, Any]]:
    """Names in order, and whether each must be given."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    needed = len(positional) - len(args.defaults)
    parameters = [
        {"name": argument.arg, "needed": number < needed} for number, argument in enumerate(positional)
    ]
    parameters += [
        {"name": argument.arg, "needed": default is None, "keyword": True}
        for argument, default in zip(args.kwonlyargs, args.kw_defaults)  # noqa: B905
    ]
    parameters += [
        {"name": f"*{argument.arg}", "needed": False}
        for argument in (args.vararg, args.kwarg)
        if argument is not None
    ]
    return parameters


def _has_effect(node: ast.stmt) -> bool:
    """Whether importing the module does more than define names."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        nodes = ast.walk(node.value) if node.value is not None else ()
        calls = [ast.unparse(child.func) for child in nodes if isinstance(child, ast.Call)]
        return any(call not in ("re.compile", "frozenset", "str.maketrans") for call in calls)
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return not isinstance(node, definitions)


def _complexity(function: ast.AST) -> int:
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return branches


def _count_lines(tree: ast.Module) -> int:
    """Lines with code, without those of documentation."""
    used: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            last = node.end_lineno if not hasattr(node, "body") else node.lineno
            used |= set(range(node.lineno, (last or node.lineno) + 1))
    return len(used)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _optimisations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in OPTIMISED_NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in OPTIMISED_NAMES:
            yield node.attr
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield type(node).__name__.lower()
    yield from (name for name in _imports(tree) if name.partition(".")[0] in OPTIMISED_MODULES)


def _statements(tree: ast.AST) -> Iterator[list[str]]:
    """Simple statements as kind and normalized text, wherever they are nested."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not _is_docstring(node):
            yield [type(node).__name__, ast.unparse(node)]
        elif isinstance(node, ast.For | ast.While | ast.If):
            head = node.iter if isinstance(node, ast.For) else node.test
            yield [type(node).__name__, ast.unparse(head)]


def _quality(tree: ast.Module) -> Iterator[str]:
    """Findings of nine rules."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    public = [node for node in functions if not node.name.startswith("_")]
    if any(ast.get_docstring(node, clean=False) is None for node in public):
        yield "public function without documentation"
    if any(
        node.returns is None or any(part.annotation is None for part in node.args.args) for node in public
    ):
        yield "public function without types"
    if any(
        isinstance(part, ast.List | ast.Dict | ast.Set) for node in functions for part in node.args.defaults
    ):
        yield "mutable default"
    if any(len(node.args.args) > 7 for node in functions):
        yield "more than seven parameters"
    if max((len(line) for line in ast.unparse(tree).splitlines()), default=0) > 120:
        yield "line over 120 characters"
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    if any(isinstance(node.ctx, ast.Store) and node.id in BUILTINS for node in names):
        yield "shadows a builtin"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield "bare except"
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                yield "star import"
            elif (
                {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
                - read
                - {"annotations"}
            ):
                yield "unused import"


QUALITY_RULES = 9


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON, for exactly these types: an object that only looks like one is refused."""
    if depth > DEEPEST:
        raise ValueError("too deep")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [plain(item, depth + 1) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    raise TypeError("not a plain value: " + kind.__name__)


class _Sink:
    """Discard what the component prints."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _load_function(task: dict[str, Any]) -> Any:
    sys.stdout = sys.stderr = _Sink()
    sys.dont_write_bytecode = True
    module = importlib.import_module(task["module"])
    return getattr(module, task["function"])


def call_all(task: dict[str, Any]) -> list[dict[str, Any]]:
    function = _load_function(task)
    results = []
    for call in task["calls"]:
        try:
            value = function(*copy.deepcopy(call["args"]), **copy.deepcopy(call["named"]))
            result = {"value": plain(value)}
            if call.get("again"):
                result["again"] = plain(function(copy.deepcopy(result["value"])))
            if call.get("then"):
                module, _, name = call["then"].partition(":")
                inverse = getattr(importlib.import_module(module), name)
                result["then"] = plain(inverse(copy.deepcopy(result["value"])))
            results.append(result)
        except BaseException as error:
            results.append({"raises": type(error).__name__})
    return results


class _Enough(BaseException):
    pass


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Executed lines of the component, the peak of its memory, and which of its lines ran."""
    function = _load_function(task)
    path = sys.modules[task["module"]].__file__
    ran: set[int] = set()
    events = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal events
        if frame.f_code.co_filename != path:
            return None
        if event == "line":
            events += 1
            ran.add(frame.f_lineno)
            if events > MOST_EVENTS:
                raise _Enough
        return trace

    tracemalloc.start()
    peak = 0
    for call in task["calls"]:
        args, keywords = copy.deepcopy(call["args"]), copy.deepcopy(call["named"])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            function(*args, **keywords)
        except BaseException:
            events += 0
        peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    for call in task["calls"]:
        args, keywords = copy.deepcopy(call["args"]), copy.deepcopy(call["named"])
        sys.settrace(trace)
        try:
            function(*args, **keywords)
        except BaseException:
            events += 0
        finally:
            sys.settrace(None)
    # Lines of function bodies; definitions themselves run on import.
    executable: set[int] = set()
    waiting = [compile(task["source"], "answer", "exec")]
    while waiting:
        inner = [constant for constant in waiting.pop().co_consts if hasattr(constant, "co_lines")]
        for code in inner:
            lines = {line for _, _, line in code.co_lines() if line is not None}
            executable |= lines - {code.co_firstlineno} if code.co_name != "<lambda>" else set()
        waiting += inner
    return {
        "events": events,
        "peak_bytes": peak,
        "ran": len(ran & executable),
        "executable": len(executable),
        "missed": sorted(executable - ran)[:50],
    }


def judge(items: list[dict[str, Any]]) -> list[bool | None]:
    """Whether each expression holds for its names; None if it cannot be evaluated."""
    verdicts: list[bool | None] = []
    for item in items:
        try:
            verdicts.append(bool(eval(item["expression"], dict(item["names"]))))
        except Exception:
            verdicts.append(None)
    return verdicts


class _Mutate(ast.NodeTransformer):
    """Change only the position with this number, counted in the order of the walk."""

    COMPARED = {
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    }  # fmt: skip
    COMPUTED = {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    }  # fmt: skip

    def __init__(self, number: int) -> None:
        self.left, self.line = number, 0

    def _is_target(self, node: Any) -> bool:
        self.left -= 1
        if self.left == -1:
            self.line = getattr(node, "lineno", 0)
        return self.left == -1

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        opposite = self.COMPARED.get(type(node.ops[0]))
        if opposite is not None and self._is_target(node):
            node.ops[0] = opposite()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        opposite = self.COMPUTED.get(type(node.op))
        if opposite is not None and self._is_target(node):
            node.op = opposite()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_target(node):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and self._is_target(node):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, bool) and self._is_target(node):
            return ast.copy_location(ast.Constant(not value), node)
        if isinstance(value, int | float) and not isinstance(value, bool) and self._is_target(node):
            return ast.copy_location(ast.Constant(value + 1), node)
        if isinstance(value, str) and self._is_target(node):
            return ast.copy_location(ast.Constant(value + "x" if value else "x"), node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        gives_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        if not gives_none and self._is_target(node):
            node.value = ast.Constant(None)
        return node

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return ast.copy_location(ast.Continue(), node) if self._is_target(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if self._is_target(node) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Bodies only: types and decorators are not behavior."""
        node.args.defaults = [self.visit(child) for child in node.args.defaults]
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """The text of a message is not behavior that a case tests."""
        return ast.copy_location(ast.Pass(), node) if self._is_target(node) else node


def make_mutants(source: str, most: int) -> Iterator[dict[str, Any]]:
    """Sources with one small change each, spread over the component."""
    probe = _Mutate(10**9)
    probe.visit(ast.parse(source))
    count = 10**9 - probe.left
    step = max(1, -(-count // most))
    for number in range(0, count, step):
        mutate = _Mutate(number)
        changed = ast.fix_missing_locations(mutate.visit(ast.parse(source)))
        yield {"line": mutate.line, "source": ast.unparse(changed)}
