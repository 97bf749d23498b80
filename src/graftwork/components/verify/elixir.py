"""Elixir components against the cases of their plan, in the sandbox.

In: sources of modules. Out: verdicts, as for Python. The BEAM starts in the sandbox for every source;
arguments go in as literals, values come out as JSON and are compared here. The tests that are shipped, ExUnit
files, run in the sandbox too.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from graftwork.components.spec.component import Component, ComponentPlan
from graftwork.components.verify.elixir_program import EXUNIT, HARNESS, START
from graftwork.components.verify.verdict import Evidence, MutationScore, SourceVerdict
from graftwork.components.verify.verifier import (
    PlannedCall,
    Submission,
    Verifier,
    calls_of,
    conclude,
    parse_line,
    read_result,
)
from graftwork.process.sandbox import Sandbox, SandboxResult
from graftwork.process.sandbox.batch import BatchJob, Prelude, run_batch
from graftwork.records.units import MIB

ERLANG, ELIXIR = "/usr/lib/erlang", "/usr/lib/elixir"
LEAST_SECONDS, LEAST_MEMORY = 30.0, 1024 * MIB
"""The BEAM takes most of a second to start, and sets addresses aside."""
ALLOWED = (
    *("Enum", "String", "List", "Map", "Regex", "Integer", "Float", "Tuple", "Keyword", "MapSet", "Stream"),
    *(
        "Kernel",
        "Range",
        "Bitwise",
        "Base",
        "URI",
        "Date",
        "DateTime",
        "Time",
        "Access",
        "Function",
        "Logger",
    ),
    *("ArgumentError", "ArithmeticError", "FunctionClauseError", "KeyError", "MatchError", "RuntimeError"),
)
"""Modules of the standard library that compute, and exceptions."""
QUALITY_RULES = 4
"""Documentation, types, parameters, long lines."""


@lru_cache(maxsize=1)
def why_no_elixir() -> str:
    """Empty where Elixir can run in the sandbox of this machine."""
    if not Path(ELIXIR, "lib", "elixir", "ebin").is_dir():
        return f"Elixir is not installed in {ELIXIR} (apt install elixir)"
    if not any(Path(ERLANG).glob("erts-*/bin/erlexec")):
        return f"Erlang is not installed in {ERLANG} (apt install erlang-base)"
    return ""


def module_name(plan: ComponentPlan, component: Component) -> str:
    return f"{_camel(plan.package)}.{_camel(component.function)}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def to_literal(value: Any) -> str:
    """A plain value as Elixir writes it."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_literal, value)) + "]"
    pairs = ", ".join(f"{to_literal(key)} => {to_literal(item)}" for key, item in value.items())
    return "%{" + pairs + "}"


def _escaped(letter: str) -> str:
    plain = letter.isascii() and letter.isprintable() and letter not in '"\\#'
    return letter if plain else f"\\x{{{ord(letter):X}}}"


class ElixirVerifier:
    """Elixir components of one plan."""

    def __init__(self, plan: ComponentPlan, sandbox: Sandbox, *, at_once: int | None = None) -> None:
        limits = sandbox.limits.model_copy(
            update={
                "wall_seconds": max(sandbox.limits.wall_seconds, LEAST_SECONDS),
                "cpu_seconds": max(sandbox.limits.cpu_seconds, round(LEAST_SECONDS)),
                "memory_bytes": max(sandbox.limits.memory_bytes, LEAST_MEMORY),
                "processes": 64,
                "open_files": 256,
            }
        )
        self._plan, self._at_once = plan, at_once
        # Expressions of properties are Python, whatever language the component has.
        self._properties = Verifier(plan, sandbox, at_once=at_once)
        self._sandbox = Sandbox(sandbox.kind, limits, sandbox.packages)

    def verify(self, submissions: Sequence[Submission]) -> list[SourceVerdict]:
        calls = [calls_of(each.component, each.stage) for each in submissions]
        read = [read_result(result) for result in self._run(submissions, calls)]
        held = self._properties.judge(
            [
                (each.component, own, found.calls)
                for each, own, found in zip(submissions, calls, read, strict=True)
            ]
        )
        return [
            conclude(each, own, found, rules)
            for each, own, found, rules in zip(submissions, calls, read, held, strict=True)
        ]

    def measure(self, submissions: Sequence[Submission]) -> list[Evidence | None]:
        """Reductions, the BEAM's own count of work; lines are not counted."""
        calls = [calls_of(each.component, each.stage) for each in submissions]
        found: list[Evidence | None] = []
        for result in self._run(submissions, calls):
            lines = result.stdout.splitlines()
            last = parse_line(lines[-1]) if result.ok and len(lines) > 1 else None
            counted = last.get("reductions") if isinstance(last, dict) else None
            peak = last.get("memory", 0) if isinstance(last, dict) else 0
            found.append(
                Evidence(events=counted, peak_bytes=peak, ran=0, executable=0)
                if isinstance(counted, int)
                else None
            )
        return found

    def mutate(self, submissions: Sequence[Submission]) -> list[MutationScore]:
        """Elixir sources are not mutated."""
        return [MutationScore(mutants=0, killed=0) for _ in submissions]

    def run_tests(self, files: dict[str, str]) -> tuple[int, int]:
        """ExUnit on a package: tests and failures."""
        modules = {name: text for name, text in files.items() if name.endswith((".ex", "_test.exs"))}
        [result] = self._launch([{**modules, "main.exs": EXUNIT}])
        last = parse_line(result.stdout.strip().splitlines()[-1]) if result.stdout.strip() else None
        if not result.ok or not isinstance(last, dict):
            return 0, 1
        return int(last["total"]), int(last["failures"])

    def _run(
        self, submissions: Sequence[Submission], calls: Sequence[Sequence[PlannedCall]]
    ) -> list[SandboxResult]:
        boxes = []
        for each, own in zip(submissions, calls, strict=True):
            asked = [
                {
                    "args": list(call.args),
                    "again": bool(call.rule and call.rule.idempotent),
                    "then": self._inverse(call),
                }
                for call in own
            ]
            known = [module_name(self._plan, self._plan.get(other)) for other in each.component.dependencies]
            task = {
                "module": module_name(self._plan, each.component),
                "function": each.component.function,
                "arity": len(each.component.parameters),
                "allowed": [*ALLOWED, *known, *each.component.cases.imports],
                "calls": asked,
            }
            boxes.append(
                {
                    **{f"dependencies/{name}": text for name, text in each.modules},
                    "answer.ex": each.source,
                    "task.exs": to_literal(task),
                    "main.exs": HARNESS,
                }
            )
        return self._launch(boxes)

    def _inverse(self, call: PlannedCall) -> list[str] | None:
        if call.rule is None or call.rule.inverse is None:
            return None
        other = self._plan.get(call.rule.inverse)
        return [module_name(self._plan, other), other.function]

    def _launch(self, boxes: list[dict[str, str]]) -> list[SandboxResult]:
        start = START.format(erlang=ERLANG, elixir=ELIXIR)
        jobs = [BatchJob(start, tuple(files.items())) for files in boxes]
        prelude = Prelude("harness", "", ("glob",))
        return run_batch(jobs, sandbox=self._sandbox, prelude=prelude, at_once=self._at_once)


def write_stub(plan: ComponentPlan, component: Component) -> str:
    """A module that knows the values of its cases."""
    clauses = [
        f"  def {component.function}({', '.join(map(to_literal, call.args))}), do: {to_literal(call.gives)}"
        for call in component.cases.calls
        if not call.named and call.raises is None
    ]
    body = "\n".join(clauses)
    return (
        f"# stub of a component that is not built\ndefmodule {module_name(plan, component)} do\n{body}\nend\n"
    )


def write_tests(plan: ComponentPlan, component: Component) -> str:
    """The calls as an ExUnit file."""
    module = module_name(plan, component)
    tests = []
    for number, call in enumerate(component.cases.calls, 1):
        asked = f"{module}.{component.function}({', '.join(map(to_literal, call.args))})"
        check = (
            f"assert_raise {call.raises}, fn -> {asked} end"
            if call.raises
            else f"assert {asked} == {to_literal(call.gives)}"
        )
        name = json.dumps(f"case {number}")
        tests.append(f"  test {name} do\n    {check}\n  end\n")
    return f"defmodule {module}Test do\n  use ExUnit.Case\n\n" + "\n".join(tests) + "end\n"
