"""Programs that run next to Elixir components in the sandbox, as text: the launcher, the harness, ExUnit."""

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
