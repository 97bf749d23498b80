"""The program that changes a generated component in the sandbox, one place at a time; nothing of it is run.

In: a source and a count as JSON. Out: a line with the mutants. Imports nothing of ours: its text is sent to
the sandbox.
"""

from __future__ import annotations

import ast
import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def main(text: str) -> None:
    task = json.loads(text)
    print(json.dumps(list(make_mutants(task["source"], task["most"]))))


class _Mutate(ast.NodeTransformer):
    """Changes the place with this number, counted in the order of the walk, and nothing else."""

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

    def _is_it(self, node: Any) -> bool:
        self.left -= 1
        if self.left == -1:
            self.line = getattr(node, "lineno", 0)
        return self.left == -1

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = self.COMPARED.get(type(node.ops[0]))
        if other is not None and self._is_it(node):
            node.ops[0] = other()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = self.COMPUTED.get(type(node.op))
        if other is not None and self._is_it(node):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and self._is_it(node):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, bool) and self._is_it(node):
            return ast.copy_location(ast.Constant(not value), node)
        if isinstance(value, int | float) and not isinstance(value, bool) and self._is_it(node):
            return ast.copy_location(ast.Constant(value + 1), node)
        if isinstance(value, str) and self._is_it(node):
            return ast.copy_location(ast.Constant(value + "x" if value else "x"), node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        gives_none = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        if not gives_none and self._is_it(node):
            node.value = ast.Constant(None)
        return node

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return ast.copy_location(ast.Continue(), node) if self._is_it(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if self._is_it(node) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Bodies only: types and decorators are no behaviour."""
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """The text of a message is no behaviour that a case decides."""
        return ast.copy_location(ast.Pass(), node) if self._is_it(node) else node


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
