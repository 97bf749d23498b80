"""The prompted base: worked examples, instructions, and the search for a better one."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from gate_samples import new_generation

from graftwork.evaluate.ask.answers import answer_key
from graftwork.evaluate.ask.prompt_search import PromptAdapter, search_instruction
from graftwork.evaluate.ask.worker import identify
from graftwork.evaluate.cases import asked_messages
from graftwork.evaluate.gate.rules import Surroundings, find_subject
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.project_subjects import choose_examples
from graftwork.evaluate.settings import EvaluateSettings, PromptSettings
from graftwork.evaluate.subjects import parse_subject
from graftwork.grading.answers import AnswerFields
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.release import PromptVariant, replace_system
from graftwork.records.report import Case, EvalJob, Report, SubjectReport


def turn(role, content):
    return Message(role=role, content=content)


def row(name, *, group=None, tokens=10, reply='{"answer": "yes", "citations": [], "refused": false}'):
    return Row(
        id=name,
        origin=Origin(file="log", line=1),
        messages=(turn("system", "Be brief."), turn("user", f"question {name}")),
        reply=reply,
        tokens=tuple(range(tokens)),
        trained_from=0,
        group=group,
    )


def case(name="a", **fields):
    return Case(
        id=name,
        origin=Origin(file="log", line=1),
        messages=(turn("system", "Short."), turn("user", f"question {name}")),
        reference="right",
        **fields,
    )


def job(tmp_path, **fields):
    (tmp_path / "cases.jsonl").touch()
    return EvalJob(
        subject="base",
        folder=str(tmp_path),
        base_folder=str(tmp_path),
        adapter_folder=None,
        cases_file=str(tmp_path / "cases.jsonl"),
        max_new_tokens=8,
        batch_size=4,
        **fields,
    )


def choose(rows, *, most=4, max_tokens=1000):
    return choose_examples(rows, most=most, max_tokens=max_tokens, fields=AnswerFields())


def test_worked_examples_take_each_role_in_turn():
    rows = [row(f"c{n}", group="coder") for n in range(5)] + [row(f"t{n}", group="tester") for n in range(2)]
    assert choose(rows, most=3).rows == ("c0", "t0", "c1")


def test_worked_examples_stay_within_the_budget_of_tokens():
    chosen = choose([row(f"r{n}", tokens=100) for n in range(9)], most=8, max_tokens=350)
    assert len(chosen.rows) == 3
    assert [message.role for message in chosen.examples] == ["user", "assistant"] * 3


def test_a_refusal_is_only_the_last_of_several_worked_examples():
    refusal = '{"answer": "", "citations": [], "refused": true}'
    rows = [row(f"r{n}") for n in range(5)] + [row("no", reply=refusal)]
    assert choose(rows, most=4).rows[-1] == "no"
    assert "no" not in choose(rows, most=3).rows


def test_no_worked_examples_make_an_empty_prompt():
    assert choose([row("a")], most=0) == PromptVariant()
    assert PromptVariant().apply(case().messages) == case().messages


def test_a_prompt_goes_behind_the_system_turn_and_its_instruction_replaces_that():
    shown = (turn("user", "q"), turn("assistant", "a"))
    applied = PromptVariant(instruction="New.", examples=shown).apply(case().messages)
    assert applied == (turn("system", "New."), *shown, turn("user", "question a"))


def test_tool_definitions_stay_behind_a_new_instruction():
    tools = "# Tools\n<tools>\n{}\n</tools>"
    assert replace_system((turn("system", tools), turn("user", "q")), "New.")[0].content == f"New.\n\n{tools}"


def test_the_base_with_the_logged_prompt_is_asked_with_it(tmp_path):
    asked = asked_messages(job(tmp_path, logged_system=True), case(logged_system="A long prompt."))
    assert asked[0].content == "A long prompt."
    assert asked_messages(job(tmp_path), case(logged_system="A long prompt."))[0].content == "Short."


def test_another_instruction_is_another_question(tmp_path):
    plain, instructed = job(tmp_path), job(tmp_path, instruction="New.")
    assert answer_key(plain, case()) != answer_key(instructed, case())
    assert identify(plain) != identify(instructed)


def test_subjects_with_a_prompt_are_named_after_the_base():
    assert parse_subject("base+prompt").kind == "prompt"
    assert parse_subject("base+logged_prompt").kind == "logged_prompt"
    with pytest.raises(UserError, match="not a subject"):
        parse_subject("base+promt")


def test_a_rule_can_compare_with_the_prompted_base():
    def subject(name):
        made = new_generation(name, answers=0, seconds=0, tokens_per_second=0, peak_memory_gib=0)
        return SubjectReport(subject=name, metrics={}, generation=made)

    report = Report(
        cases_hash="",
        cases=0,
        baseline=subject("base"),
        candidate=subject("adapter"),
        comparisons=(),
        others=(subject("base+prompt"),),
    )
    settings = GateSettings(rules=(GateRule(metric="json_valid", margin=0.02, against="prompt"),))
    assert settings.subjects_needed() == ("prompt",)
    assert find_subject(report, "prompt", Surroundings()).subject == "base+prompt"
    assert find_subject(report, "logged_prompt", Surroundings()) is None


def test_instructions_are_proposed_by_an_endpoint():
    with pytest.raises(ValueError, match="endpoint"):
        PromptSettings(reflection="adapter")
    assert EvaluateSettings(prompt={"reflection": "https://host/v1#model"}).prompt.reflection


class FakeGepa(ModuleType):
    """gepa's own contract: evaluates the first candidate, reflects on it, and keeps what is better."""

    def __init__(self):
        super().__init__("gepa")
        self.EvaluationBatch = SimpleNamespace

    def optimize(self, *, seed_candidate, trainset, valset, adapter, reflection_lm, max_metric_calls, **_):
        batch = adapter.evaluate(trainset[:2], seed_candidate, capture_traces=True)
        shown = adapter.make_reflective_dataset(seed_candidate, batch, ["instruction"])
        proposed = {"instruction": reflection_lm(str(shown["instruction"]))}
        scores = [
            sum(adapter.evaluate(valset, candidate).scores) / len(valset)
            for candidate in (seed_candidate, proposed)
        ]
        best = scores.index(max(scores))
        return SimpleNamespace(
            val_aggregate_scores=scores, best_idx=best, best_candidate=(seed_candidate, proposed)[best]
        )


def searched(*, better, answers=60):
    asked = []

    def ask(instruction, cases):
        asked.extend(case.id for case in cases)
        return ["right" if better in instruction else "wrong" for _ in cases]

    adapter = PromptAdapter(ask, lambda case, answer: float(answer == case.reference))
    instruction, score, first_score = search_instruction(
        adapter,
        first="Do it.",
        training=[case(f"t{n}") for n in range(6)],
        validation=[case(f"v{n}") for n in range(6)],
        propose=lambda text: f"```\nDo it {'well' if 'right' in text else 'badly'}.\n```",
        most_answers=answers,
    )
    return instruction, (first_score, score), adapter.answers, asked


@pytest.fixture(params=["contract", "installed"])
def gepa(request, monkeypatch):
    if request.param == "installed":
        pytest.importorskip("gepa")
    else:
        monkeypatch.setitem(sys.modules, "gepa", FakeGepa())


def test_a_search_finds_the_instruction_that_does_better_on_validation_rows(gepa):
    instruction, scores, _, _ = searched(better="well")
    assert "Do it well." in instruction
    assert scores == (0.0, 1.0)


def test_a_search_keeps_the_first_instruction_where_nothing_is_better(gepa):
    instruction, _, answers, asked = searched(better="never")
    assert instruction == "Do it."
    assert len(asked) == answers <= 60 + 6
