"""Elixir components: verified in the sandbox, packaged with ExUnit tests that run there too."""

import pytest
from component_samples import ScriptedModel, TrustingVerifier, patient_sandbox

from graftwork.components import project as components
from graftwork.components.cases import CallCase, ComponentCases, PropertyCase
from graftwork.components.elixir import ElixirVerifier, to_literal, why_no_elixir, write_tests
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.results import PackageManifest, ProvenanceReport, has_signature
from graftwork.components.session import GenerateJob, generate
from graftwork.components.settings import GenerateOptions
from graftwork.components.verifier import Submission

SHOUT = Component(
    id="1",
    name="Shout",
    module="shout",
    function="shout",
    parameters=(("text", "string"),),
    outputs=(("text", "string"),),
    cases=ComponentCases(
        calls=(
            CallCase(args=("ab",), gives="AB"),
            CallCase(args=('é#{1}\n"',), gives='É#{1}\n"'),
            CallCase(args=(3,), raises="FunctionClauseError", stage=4),
        ),
        properties=(
            PropertyCase(name="length", holds="len(result) == len(text)", inputs=({"text": "ab #"},)),
        ),
    ),
)
TWICE = Component(
    id="2",
    name="Twice",
    module="twice",
    function="twice",
    parameters=(("text", "string"),),
    dependencies=("1",),
    cases=ComponentCases(
        calls=(CallCase(args=("a",), gives=["A", "A"]), CallCase(args=("",), gives=["", ""]))
    ),
)
PLAN = ComponentPlan(package="demo_text", language="elixir", components=(SHOUT, TWICE), spec_hash="spec")
OPEN = "defmodule DemoText.Shout do\n  def shout(text), do: String.upcase(to_string(text))\nend\n"
GOOD = "defmodule DemoText.Shout do\n  def shout(text) when is_binary(text), do: String.upcase(text)\nend\n"
USES = (
    "defmodule DemoText.Twice do\n"
    "  def twice(text), do: [DemoText.Shout.shout(text), DemoText.Shout.shout(text)]\nend\n"
)

needs_elixir = pytest.mark.skipif(bool(why_no_elixir()), reason=f"needs Elixir: {why_no_elixir()}")


def test_plain_values_are_written_as_elixir_literals():
    assert to_literal({"a": [1, None, True]}) == '%{"a" => [1, nil, true]}'
    assert to_literal('#{x}"') == '"\\x{23}{x}\\x{22}"'


def test_cases_become_an_exunit_file():
    text = write_tests(PLAN, SHOUT)
    assert 'assert DemoText.Shout.shout("ab") == "AB"' in text
    assert "assert_raise FunctionClauseError" in text


@needs_elixir
def test_elixir_sources_are_verified_and_those_that_reach_beyond_the_spec_are_not_run():
    verifier = ElixirVerifier(PLAN, patient_sandbox())
    beyond = "defmodule DemoText.Shout do\n  def shout(_), do: System.halt(0)\nend\n"
    good, wrong, refused, prose = verifier.verify(
        [
            Submission(SHOUT, text, 4)
            for text in (GOOD, GOOD.replace("upcase", "downcase"), beyond, "Here you are.")
        ]
    )
    assert good.ok, good.reason
    assert has_signature(SHOUT, good.facts)
    assert '["ab"] should give "AB", gives "ab"' in wrong.reason
    assert refused.reason == "uses System, which the spec does not allow"
    assert not prose.ok


BRANCHES = """defmodule DemoText.Shout do
  @doc "Upper case."
  @spec shout(binary, atom) :: binary
  def shout(text, mode \\\\ :plain)
  def shout("", _mode), do: ""
  def shout(text, _mode) when is_binary(text) do
    if text == "é", do: "É", else: String.upcase(text)
  end
end
"""


@needs_elixir
def test_elixir_sources_are_read_for_arguments_branches_and_quality():
    two = BRANCHES.replace(" \\\\ :plain", "")
    full, needy, bare = (
        each.facts
        for each in ElixirVerifier(PLAN, patient_sandbox()).verify(
            [Submission(SHOUT, text, 1) for text in (BRANCHES, two, GOOD)]
        )
    )
    assert has_signature(SHOUT, full)
    assert not has_signature(SHOUT, needy)
    assert (full.complexity, bare.complexity) == (4, 1)
    assert (full.quality, len(bare.quality)) == ((), 2)


@pytest.mark.slow
@needs_elixir
def test_an_elixir_package_is_built_with_passing_exunit_tests(tmp_path):
    model = ScriptedModel({("1", 1): [OPEN], ("1", 4): [GOOD], ("2", 1): [USES]})
    settings = GenerateOptions(samples=1, rounds=1)
    outcome = generate(GenerateJob(PLAN, model, tmp_path, settings, stages=(1, 2, 4)))
    assert outcome.built == ("1", "2"), outcome.failed
    assert all(card.gates["exunit"] for card in outcome.cards)
    assert all(card.scores["compliance"] == 1.0 for card in outcome.cards)
    assert (tmp_path / "lib" / "shout.ex").read_text() == GOOD
    assert (tmp_path / "test" / "twice_test.exs").is_file()


REVERSE = SHOUT.model_copy(
    update={
        "function": "reverse",
        "module": "reverse",
        "cases": ComponentCases(
            properties=(PropertyCase(name="back", inverse="2", inputs=({"text": "ab"},), stage=1, count=3),)
        ),
    }
)
BACK = REVERSE.model_copy(update={"id": "2", "function": "back", "module": "back", "cases": ComponentCases()})


@needs_elixir
def test_inverse_properties_of_elixir_components_call_the_other_component():
    plan = PLAN.model_copy(update={"components": (REVERSE, BACK)})
    source = "defmodule DemoText.Reverse do\n  def reverse(text), do: String.reverse(text)\nend\n"
    back = "defmodule DemoText.Back do\n  def back(text), do: String.reverse(text)\nend\n"
    good, wrong = ElixirVerifier(plan, patient_sandbox()).verify(
        [
            Submission(REVERSE, source, 1, (("back.ex", text),))
            for text in (back, back.replace("String.reverse(text)", 'text <> "x"'))
        ]
    )
    assert good.ok, good.reason
    assert "is not what 2 gives back" in wrong.reason


def test_packages_are_run_again_by_the_verifier_of_their_language(tmp_path, monkeypatch):
    given = []

    class Noting(TrustingVerifier):
        def verify(self, submissions):
            given.extend(submissions)
            return super().verify(submissions)

    def open_noting(plan, settings):
        assert plan.language == "elixir"
        return Noting()

    manifest = PackageManifest(
        package="demo_text", language="elixir", spec_hash="spec", model="", model_identity="", journal="",
        components={"1": {"file": "lib/shout.ex"}, "2": {"file": "lib/twice.ex"}}, files={},
    )  # fmt: skip
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shout.ex").write_text(GOOD)
    (tmp_path / "lib" / "twice.ex").write_text(USES)
    report = ProvenanceReport(package="demo_text", model="", entries=0, links=0)
    monkeypatch.setattr(components, "load_plan", lambda spec, cases: PLAN)
    monkeypatch.setattr(components, "verify_package", lambda out, plan: report)
    monkeypatch.setattr(components, "read_manifest", lambda out: manifest)
    monkeypatch.setattr(components, "open_verifier", open_noting)
    found = components.verify_components(tmp_path, spec=tmp_path)
    assert found.rerun == 2
    assert [each.modules for each in given] == [(("twice.ex", USES),), (("shout.ex", GOOD),)]


def test_elixir_components_become_no_cases_that_run_python(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "load_plan", lambda spec, cases: PLAN)
    written = components.write_episodes(tmp_path / "out", spec=tmp_path, to=tmp_path, held_out=["1"])
    assert (written.prompts, written.cases) == (0, 0)
    assert (tmp_path / "prompts.jsonl").read_text() == (tmp_path / "held_out.jsonl").read_text() == ""
