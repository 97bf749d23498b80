"""Elixir components against the cases of their plan, in the sandbox.

Input: sources of modules. Output: verdicts, as for Python. The BEAM starts in the sandbox for every source;
arguments go in as literals, values come out as JSON and are compared here. The tests that are shipped, ExUnit
files, run in the sandbox too.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.verifier import (
    Evidence,
    MutationScore,
    PlannedCall,
    Submission,
    Verifier,
    calls_of,
    parse_line,
)
from graftwork.process.sandbox import Sandbox, SandboxResult
from graftwork.process.sandbox.run import BatchJob, Prelude, run_batch
from graftwork.records.base import MIB

START = """
import glob, os

erts = sorted(glob.glob("{erlang}/erts-*/bin"))[-1]
environment = {{
    "BINDIR": erts, "ROOTDIR": "{erlang}", "EMU": "beam", "PROGNAME": "erl", "PATH": erts,
    "HOME": os.getcwd(), "LANG": "C.UTF-8", "ERL_CRASH_DUMP_SECONDS": "0",
}}
paths = [part for folder in sorted(glob.glob("{elixir}/lib/*/ebin")) for part in ("-pa", folder)]
arguments = [
    "erlexec", "+S", "1:1", "+SDcpu", "1:1", "+SDio", "1", "+A", "1", "+MIscs", "64", "-noshell", "-noinput",
    "-boot", "{erlang}/bin/start_clean", *paths, "-elixir", "ansi_enabled", "false",
    "-s", "elixir", "start_cli", "-extra", "main.exs",
]
os.execve(erts + "/erlexec", arguments, environment)
"""

HARNESS = r"""
defmodule Harness do
  def json(nil), do: "null"
  def json(true), do: "true"
  def json(false), do: "false"
  def json(value) when is_atom(value), do: json(Atom.to_string(value))
  def json(value) when is_integer(value), do: Integer.to_string(value)
  def json(value) when is_float(value), do: Float.to_string(value)
  def json(value) when is_tuple(value), do: json(Tuple.to_list(value))
  def json(value) when is_list(value), do: "[" <> Enum.map_join(value, ",", &json/1) <> "]"

  def json(value) when is_binary(value) do
    true = String.valid?(value)
    "\"" <> (value |> String.to_charlist() |> Enum.map_join("", &escape/1)) <> "\""
  end

  def json(%{__struct__: _}), do: raise(ArgumentError, "not a plain value")

  def json(value) when is_map(value) do
    "{" <> Enum.map_join(value, ",", fn {key, item} -> json(to_string(key)) <> ":" <> json(item) end) <> "}"
  end

  defp escape(code) when code in [?", ?\\], do: <<?\\, code>>
  defp escape(code) when code in 32..126, do: <<code>>
  defp escape(code) when code < 0x10000, do: "\\u" <> hex(code)

  defp escape(code) do
    rest = code - 0x10000
    "\\u" <> hex(0xD800 + div(rest, 0x400)) <> "\\u" <> hex(0xDC00 + rem(rest, 0x400))
  end

  defp hex(code), do: code |> Integer.to_string(16) |> String.pad_leading(4, "0")

  @beyond [:spawn, :spawn_link, :spawn_monitor, :send, :apply, :exit, :throw, :import, :use, :receive, :self]

  def facts(source, task) do
    case Code.string_to_quoted(source) do
      {:error, {place, _, _}} ->
        %{"syntax" => "SyntaxError, line #{place[:line]}", "refused" => "is not Elixir: line #{place[:line]}"}

      {:ok, tree} ->
        start = %{used: [], beyond: [], public: [], modules: [], clauses: [], marks: []}
        {_, found} = Macro.prewalk(tree, start, &collect/2)
        allowed = MapSet.new([task["module"] | task["allowed"]])
        imports = found.used |> Enum.uniq() |> Enum.reject(&MapSet.member?(allowed, &1))
        own = String.to_atom(task["function"])
        public = Enum.uniq(found.public)
        defines = own in public and task["module"] in found.modules

        refused =
          cond do
            imports != [] -> "uses #{Enum.join(imports, ", ")}, which the spec does not allow"
            found.beyond != [] -> "uses #{Enum.join(Enum.uniq(found.beyond), ", ")}, which no component needs"
            length(found.modules) != 1 -> "defines #{length(found.modules)} modules instead of one"
            not defines -> "does not define #{task["module"]}.#{task["function"]}"
            true -> ""
          end

        lines = source |> String.split("\n") |> Enum.count(&(String.trim(&1) != ""))

        %{
          "syntax" => "", "refused" => refused, "imports" => imports, "forbidden" => found.beyond,
          "defines" => defines, "public" => public, "lines" => lines,
          "parameters" => parameters(found.clauses, own, task["arity"]),
          "complexity" => complexity(found.clauses),
          "quality" => quality(found, source)
        }
    end
  end

  # Arguments of an Elixir function have places, not names: a clause that takes `arity` of them fits.
  defp parameters(clauses, own, arity) do
    own_clauses = for {name, arguments, _} <- Enum.reverse(clauses), name == own, do: arguments
    heads = Enum.map(own_clauses, fn arguments -> Enum.map(arguments, &needed?/1) end)
    fits = &(length(&1) >= arity and Enum.count(&1, fn needed -> needed end) <= arity)
    head = Enum.find(heads, List.first(heads) || [], fits)
    Enum.map(head, &%{"name" => "", "needed" => &1})
  end

  defp needed?({:\\, _, [_, _]}), do: false
  defp needed?(_argument), do: true

  # Clauses of one function are its branches.
  defp complexity(clauses) do
    clauses
    |> Enum.group_by(fn {name, arguments, _} -> {name, length(arguments)} end)
    |> Enum.map(fn {_, own} -> Enum.sum(Enum.map(own, fn {_, _, body} -> 1 + branches(body) end)) end)
    |> Enum.max(fn -> 0 end)
  end

  defp branches(body), do: body |> Macro.prewalk(0, &branch/2) |> elem(1)
  defp branch({:->, _, _} = node, count), do: {node, count + 1}

  defp branch({name, _, [_, _]} = node, count) when name in [:if, :unless, :and, :or, :&&, :||] do
    {node, count + 1}
  end

  defp branch(node, count), do: {node, count}

  defp quality(found, source) do
    long = source |> String.split("\n") |> Enum.any?(&(String.length(&1) > 120))
    wide = Enum.any?(found.clauses, fn {_, arguments, _} -> length(arguments) > 7 end)
    documented = :doc in found.marks or :moduledoc in found.marks

    [
      {not documented, "public function without documentation"},
      {:spec not in found.marks, "public function without types"},
      {wide, "more than seven parameters"},
      {long, "line over 120 characters"}
    ]
    |> Enum.filter(&elem(&1, 0))
    |> Enum.map(&elem(&1, 1))
  end

  defp collect({:defmodule, _, [{:__aliases__, _, parts} | _]} = node, found) do
    {node, %{found | modules: [Enum.join(parts, ".") | found.modules]}}
  end

  defp collect({kind, _, [{:when, _, [{name, _, arguments} | _]} | body]} = node, found)
       when kind in [:def, :defp] do
    {node, clause(found, kind, name, arguments, body)}
  end

  defp collect({kind, _, [{name, _, arguments} | body]} = node, found)
       when kind in [:def, :defp] and is_atom(name) do
    {node, clause(found, kind, name, arguments, body)}
  end

  defp collect({:@, _, [{name, _, [_ | _]}]} = node, found) when is_atom(name) do
    {node, %{found | marks: [name | found.marks]}}
  end

  defp collect({:__aliases__, _, parts} = node, found) do
    {node, %{found | used: [Enum.join(parts, ".") | found.used]}}
  end

  defp collect({:., _, [module, _]} = node, found)
       when is_atom(module) and module not in [nil, true, false] do
    {node, %{found | used: [inspect(module) | found.used]}}
  end

  defp collect({name, _, arguments} = node, found) when name in @beyond and is_list(arguments) do
    {node, %{found | beyond: [name | found.beyond]}}
  end

  defp collect(node, found), do: {node, found}

  defp clause(found, kind, name, arguments, body) do
    arguments = if is_list(arguments), do: arguments, else: []
    public = if kind == :def, do: [name | found.public], else: found.public
    %{found | public: public, clauses: [{name, arguments, body} | found.clauses]}
  end

  defp follow(nil, _value), do: ""

  defp follow([module, function], value) do
    ",\"then\":" <> json(apply(Module.concat([module]), String.to_atom(function), [value]))
  end

  def call(module, function, task) do
    try do
      value = apply(module, function, task["args"])
      plain = json(value)
      again = if task["again"], do: ",\"again\":" <> json(apply(module, function, [value])), else: ""
      "{\"value\":" <> plain <> again <> follow(task["then"], value) <> "}"
    rescue
      error -> "{\"raises\":" <> json(inspect(error.__struct__)) <> "}"
    catch
      kind, _ -> "{\"raises\":" <> json(kind) <> "}"
    end
  end
end

Code.compiler_options(ignore_module_conflict: true)
{task, _} = Code.eval_string(File.read!("task.exs"))
source = File.read!("answer.ex")
facts = Harness.facts(source, task)
IO.puts(Harness.json(facts))

if facts["refused"] == "" do
  {:ok, quiet} = StringIO.open("")
  leader = Process.group_leader()
  Process.group_leader(self(), quiet)
  Enum.each(Path.wildcard("dependencies/*.ex"), &Code.compile_file/1)
  Code.compile_string(source)
  module = Module.concat([task["module"]])
  function = String.to_atom(task["function"])
  :erlang.garbage_collect()
  {_, before} = :erlang.process_info(self(), :reductions)
  results = Enum.map(task["calls"], &Harness.call(module, function, &1))
  {_, later} = :erlang.process_info(self(), :reductions)
  {_, memory} = :erlang.process_info(self(), :memory)
  counted = "\"reductions\":#{later - before},\"memory\":#{memory}"
  IO.puts(leader, "{\"calls\":[" <> Enum.join(results, ",") <> "]," <> counted <> "}")
end
"""

EXUNIT = r"""
ExUnit.start(autorun: false, colors: [enabled: false])
Enum.each(Path.wildcard("lib/**/*.ex"), &Code.compile_file/1)
Enum.each(Path.wildcard("test/**/*_test.exs"), &Code.require_file/1)
%{total: total, failures: failures} = ExUnit.run()
IO.puts("\n{\"total\":#{total},\"failures\":#{failures}}")
"""


ERLANG, ELIXIR = "/usr/lib/erlang", "/usr/lib/elixir"
LEAST_SECONDS, LEAST_MEMORY = 30.0, 1024 * MIB
"""Least time and memory for the BEAM, which takes most of a second to start and reserves address space."""
ALLOWED = (
    "Enum", "String", "List", "Map", "Regex", "Integer", "Float", "Tuple", "Keyword", "MapSet", "Stream",
    "Kernel", "Range", "Bitwise", "Base", "URI", "Date", "DateTime", "Time", "Access", "Function", "Logger",
    "ArgumentError", "ArithmeticError", "FunctionClauseError", "KeyError", "MatchError", "RuntimeError",
)  # fmt: skip
"""Modules of the standard library that compute, and exceptions."""
QUALITY_RULES = 4
"""Documentation, types, parameters, long lines."""


@lru_cache(maxsize=1)
def why_no_elixir() -> str:
    """Why Elixir cannot run in this machine's sandbox; empty if it can."""
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
    """A plain value in Elixir syntax."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + re.sub(r'[^ -~]|["\\#]', lambda letter: f"\\x{{{ord(letter[0]):X}}}", value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_literal, value)) + "]"
    pairs = ", ".join(f"{to_literal(key)} => {to_literal(item)}" for key, item in value.items())
    return "%{" + pairs + "}"


class ElixirVerifier(Verifier):
    """Elixir components of one plan. Expressions of properties are in Python here too."""

    def __init__(self, plan: ComponentPlan, sandbox: Sandbox, *, at_once: int | None = None) -> None:
        super().__init__(plan, sandbox, at_once=at_once)
        limits = sandbox.limits.model_copy(
            update={
                "wall_seconds": max(sandbox.limits.wall_seconds, LEAST_SECONDS),
                "cpu_seconds": max(sandbox.limits.cpu_seconds, round(LEAST_SECONDS)),
                "memory_bytes": max(sandbox.limits.memory_bytes, LEAST_MEMORY),
                "processes": 64,
                "open_files": 256,
            }
        )
        self._beam = Sandbox(sandbox.kind, limits, sandbox.packages)

    def measure(self, submissions: Sequence[Submission]) -> list[Evidence | None]:
        """Measure reductions, the BEAM's own unit of work; lines are not counted."""
        calls = [calls_of(submission.component, submission.stage) for submission in submissions]
        evidence: list[Evidence | None] = []
        for result in self.run_sources(submissions, calls):
            lines = result.stdout.splitlines()
            last = parse_line(lines[-1]) if result.ok and len(lines) > 1 else None
            counted = last.get("reductions") if isinstance(last, dict) else None
            peak = last.get("memory", 0) if isinstance(last, dict) else 0
            evidence.append(
                Evidence(events=counted, peak_bytes=peak, ran=0, executable=0)
                if isinstance(counted, int)
                else None
            )
        return evidence

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

    def run_sources(
        self, submissions: Sequence[Submission], calls: Sequence[list[PlannedCall]], mode: str = ""
    ) -> list[SandboxResult]:
        boxes = []
        for submission, submission_calls in zip(submissions, calls, strict=True):
            planned = [(call, self._plan.inverse_of(call.rule)) for call in submission_calls]
            call_sources = [
                {
                    "args": list(call.args),
                    "again": bool(call.rule and call.rule.idempotent),
                    "then": [module_name(self._plan, inverse), inverse.function] if inverse else None,
                }
                for call, inverse in planned
            ]
            dependencies = [
                module_name(self._plan, self._plan.get(identifier))
                for identifier in submission.component.dependencies
            ]
            task = {
                "module": module_name(self._plan, submission.component),
                "function": submission.component.function,
                "arity": len(submission.component.parameters),
                "allowed": [*ALLOWED, *dependencies, *submission.component.cases.imports],
                "calls": call_sources,
            }
            boxes.append(
                {
                    **{f"dependencies/{name}": text for name, text in submission.modules},
                    "answer.ex": submission.source,
                    "task.exs": to_literal(task),
                    "main.exs": HARNESS,
                }
            )
        return self._launch(boxes)

    def _launch(self, boxes: list[dict[str, str]]) -> list[SandboxResult]:
        start = START.format(erlang=ERLANG, elixir=ELIXIR)
        jobs = [BatchJob(start, tuple(files.items())) for files in boxes]
        prelude = Prelude("harness", "", ("glob",))
        return run_batch(jobs, sandbox=self._beam, prelude=prelude, at_once=self._at_once)


def write_stub(plan: ComponentPlan, component: Component) -> str:
    """Write a module that returns the values of its cases."""
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
        expression = f"{module}.{component.function}({', '.join(map(to_literal, call.args))})"
        check = (
            f"assert_raise {call.raises}, fn -> {expression} end"
            if call.raises
            else f"assert {expression} == {to_literal(call.gives)}"
        )
        name = json.dumps(f"case {number}")
        tests.append(f"  test {name} do\n    {check}\n  end\n")
    return f"defmodule {module}Test do\n  use ExUnit.Case\n\n" + "\n".join(tests) + "end\n"
