"""Linear programs, written row by row: building one from sums of expressions took longer than solving it.

In: variables, rows, an objective. Out: a solution. A thin layer over OR-tools' GLOP.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from graftwork.records.errors import needs_extra

if TYPE_CHECKING:
    from ortools.linear_solver.pywraplp import Variable


class Expression(NamedTuple):
    """A sum of variables with factors, and a constant."""

    terms: "tuple[tuple[float, Variable], ...]" = ()
    constant: float = 0.0

    def plus(self, *others: "Expression") -> "Expression":
        listed = (self, *others)
        return Expression(
            tuple(term for expression in listed for term in expression.terms),
            sum(expression.constant for expression in listed),
        )

    def times(self, factor: float) -> "Expression":
        if factor == 0:
            return Expression()
        return Expression(
            tuple((factor * own, variable) for own, variable in self.terms), factor * self.constant
        )

    def minus(self, other: "Expression") -> "Expression":
        return self.plus(other.times(-1.0))


def total(expressions: Iterable[Expression]) -> Expression:
    return Expression().plus(*expressions)


class LinearProgram:
    """Rows over variables. The objective is set by `maximize`, which may be called again."""

    def __init__(self) -> None:
        with needs_extra("week", why="the week is planned by OR-tools"):
            from ortools.linear_solver import pywraplp
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._infinity = self._solver.infinity()

    def variable(self, low: float = 0.0, high: float | None = None) -> Expression:
        made = self._solver.NumVar(low, self._infinity if high is None else high, "")
        return Expression(((1.0, made),))

    def at_most(self, left: Expression, right: Expression | float) -> None:
        difference = left.minus(right) if isinstance(right, Expression) else left
        limit = -difference.constant + (0.0 if isinstance(right, Expression) else right)
        self._row(difference, -self._infinity, limit)

    def equal(self, left: Expression, right: float) -> None:
        self._row(left, right - left.constant, right - left.constant)

    def _row(self, expression: Expression, low: float, high: float) -> None:
        row = self._solver.Constraint(low, high)
        for variable, factor in _collected(expression):
            row.SetCoefficient(variable, factor)

    def named_sum(self, expression: Expression) -> Expression:
        """A variable that equals the expression: rows that use it are short."""
        if len(expression.terms) <= 1:
            return expression
        made = self.variable(-self._infinity)
        self.equal(expression.minus(made), 0.0)
        return made

    def maximize(self, expression: Expression) -> None:
        objective = self._solver.Objective()
        objective.Clear()
        for variable, factor in _collected(expression):
            objective.SetCoefficient(variable, factor)
        objective.SetOffset(expression.constant)
        objective.SetMaximization()

    def solve(self) -> bool | None:
        """True: solved. False: no solution. None: the solver gave up."""
        status = self._solver.Solve()
        if status == self._solver.INFEASIBLE:
            return False
        return True if status == self._solver.OPTIMAL else None

    @property
    def best(self) -> float:
        return float(self._solver.Objective().Value())


def value_of(expression: Expression) -> float:
    """In the solution."""
    return expression.constant + sum(f * float(v.solution_value()) for f, v in expression.terms)


def _collected(expression: Expression) -> "Iterable[tuple[Variable, float]]":
    """Each variable once."""
    found: dict[int, tuple[Variable, float]] = {}
    for factor, variable in expression.terms:
        index = variable.index()
        found[index] = (variable, found[index][1] + factor if index in found else factor)
    return found.values()
