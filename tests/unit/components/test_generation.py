"""A generation: stages, journal, package, provenance, episodes, and kills at every entry."""

import json
import os
import signal

import pytest
from component_samples import (
    DOUBLE,
    GOOD,
    GUARDED,
    PLAN,
    QUADRUPLE,
    USES,
    Prose,
    ScriptedModel,
    TrustingVerifier,
    patient_sandbox,
)

from graftwork.components import results
from graftwork.components.attempts import GenerationJournal
from graftwork.components.cases import ComponentCases
from graftwork.components.results import (
    PackageManifest,
    find_handwritten,
    list_cases,
    list_episodes,
    text_hash,
    to_rows,
    verify_package,
    write_package,
)
from graftwork.components.session import GenerateJob, generate
from graftwork.components.settings import GenerateOptions
from graftwork.components.stages import StageState, check_stage, write_stub
from graftwork.components.verifier import Evidence, SourceFacts, SourceVerdict, Verifier
from graftwork.engines.interface import EngineUnavailable
from graftwork.files.disk import Journal, write_atomic
from graftwork.records.errors import Corrupted, EnvironmentFailure, GracefulStop, UserError

QUICK = GenerateOptions(samples=2, rounds=1, hacks=False)
WRONG = "def double(number: int) -> int:\n    return 3\n"


def answers(**more):
    found = {("1.1", 1): [WRONG, GOOD], ("1.1", 4): [GUARDED], ("1.2", 1): [USES]}
    return found | {(key.replace("_", "."), 1): value for key, value in more.items()}


def job(out, model=None, **more):
    verifier = more.pop("verifier", None) or Verifier(more.get("plan", PLAN), patient_sandbox())
    return GenerateJob(PLAN, model or ScriptedModel(answers()), out, QUICK, verifier=verifier)._replace(
        **more
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("generated")
    return out, generate(job(out))


def test_all_components_are_built_and_pass_their_gates(built):
    out, outcome = built
    assert outcome.ok, outcome.cards
    assert outcome.built == ("1.1", "1.2")
    assert (out / "numbers_demo" / "double.py").read_text() == GUARDED
    assert (out / "tests" / "test_quadruple.py").is_file()
    [first, *_] = outcome.rates
    assert (first.stage, first.answers, first.passed) == (1, 4, 3)


def test_the_same_command_again_asks_and_verifies_nothing(built):
    out, outcome = built
    journal = (out / "generation" / "journal.jsonl").read_bytes()
    model, verifier = ScriptedModel({}), TrustingVerifier()
    again = generate(job(out, model, verifier=verifier))
    assert (model.asked, verifier.noted) == ([], [])
    assert (out / "generation" / "journal.jsonl").read_bytes() == journal
    assert again.cards == outcome.cards


def test_every_link_from_spec_to_file_holds(built):
    out, _ = built
    report = verify_package(out, plan=PLAN)
    assert report.ok, report.problems
    assert report.links > 15


@pytest.mark.parametrize(
    ("kind", "field", "problem"),
    [
        ("answer", "text", "was changed"),
        ("verdict", "verdict", "was changed"),
        ("prompt", "messages", "was changed"),
    ],
)
def test_a_changed_entry_of_the_journal_is_found(built, tmp_path, kind, field, problem):
    out = copy_of(built[0], tmp_path)
    path = out / "generation" / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    entry = next(line for line in lines if line["kind"] == kind)
    entry[field] = []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any(problem in found for found in verify_package(out).problems)
    with pytest.raises(Corrupted, match="journal is damaged"):
        GenerationJournal(out / "generation")


def test_a_removed_entry_and_a_changed_file_are_found(built, tmp_path):
    out = copy_of(built[0], tmp_path)
    path = out / "generation" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    (out / "numbers_demo" / "double.py").write_text(GOOD)
    problems = " ".join(verify_package(out).problems)
    assert "removed or added" in problems
    assert "numbers_demo/double.py was changed" in problems


@pytest.mark.parametrize("change", [{"model": "another"}, {"components": {}, "files": {}}])
def test_a_changed_manifest_is_found(built, tmp_path, change):
    path = copy_of(built[0], tmp_path) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "manifest.json is not recorded in the journal" in " ".join(verify_package(path.parent).problems)


def test_another_specification_is_found(built):
    other = PLAN.model_copy(update={"spec_hash": "other"})
    assert "a different specification" in " ".join(verify_package(built[0], plan=other).problems)


def copy_of(out, tmp_path):
    import shutil

    return shutil.copytree(out, tmp_path / "copy")


def test_episodes_have_stage_reward_and_pairs_and_leave_out_what_is_held_out(built):
    journal = GenerationJournal(built[0] / "generation")
    rows, pairs = to_rows(list(list_episodes(PLAN, journal)))
    assert pairs == 1
    [pair] = [row for row in rows if "rejected" in row]
    assert (pair["stage"], pair["reward"], pair["split"]) == (1, 1.0, "train")
    assert "return 3" in pair["rejected"]
    assert {row["component"] for row in rows} == {"1.1", "1.2"}
    held = list(list_episodes(PLAN, journal, held_out=["1.1"]))
    assert {row["component"] for _, _, row in held} == {"1.2"}
    assert list(list_episodes(PLAN, journal, held_out=["1"])) == []


def test_each_stage_that_was_asked_is_a_prompt_with_the_calls_of_that_stage(built):
    journal = GenerationJournal(built[0] / "generation")
    component = PLAN.get("1.1")
    made = [case for _, case in list_cases(PLAN, journal, component)]
    assert made[0]["domain"] == "stage 1"
    for case in made:
        stage = int(case["domain"][-1])
        assert len(case["checks"][0]["python_calls"]) == sum(
            call.stage <= stage for call in component.cases.calls
        )
        assert case["session"] == f"{PLAN.package}/1.1"
        assert f"stage {stage}" in case["messages"][-1]["content"]
    assert "stage 3" not in {case["domain"] for case in made}


def test_a_handwritten_module_is_used_and_never_overwritten(tmp_path):
    path = tmp_path / "numbers_demo" / "double.py"
    path.parent.mkdir()
    path.write_text(GUARDED + "# mine\n")
    model = ScriptedModel({("1.2", 1): [USES]})
    outcome = generate(job(tmp_path, model))
    assert outcome.built == ("1.1", "1.2")
    assert path.read_text().endswith("# mine\n")
    assert {component for component, _, _ in model.asked} == {"1.2"}
    assert any("written by hand" in note for note in outcome.cards[0].notes)


def test_a_foreign_file_stops_the_package_before_the_first_byte(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_double.py").write_text("# mine\n")
    model = ScriptedModel(answers())
    with pytest.raises(UserError, match=r"test_double\.py already exists"):
        generate(job(tmp_path, model, verifier=TrustingVerifier()))
    assert [path.name for path in tmp_path.iterdir()] == ["tests"]
    assert model.asked == []


def test_components_of_an_earlier_run_stay_in_the_package_and_are_not_asked_for(tmp_path):
    first = generate(job(tmp_path, verifier=TrustingVerifier(), wanted=("1.1",)))
    assert first.built == ("1.1",)
    model = ScriptedModel(answers())
    generate(job(tmp_path, model, verifier=TrustingVerifier()))
    model.asked.clear()
    again = generate(job(tmp_path, model, verifier=TrustingVerifier(), wanted=("1.1",)))
    assert (again.built, model.asked, again.skipped) == (("1.1", "1.2"), [], "")
    assert (tmp_path / "numbers_demo" / "quadruple.py").is_file()
    assert verify_package(tmp_path, plan=PLAN).ok


def test_components_that_were_made_for_another_specification_leave_the_package(tmp_path):
    generate(job(tmp_path, verifier=TrustingVerifier()))
    other = QUADRUPLE.model_copy(update={"description": "changed"})
    plan = PLAN.model_copy(update={"components": (DOUBLE, other), "spec_hash": "new"})
    again = generate(job(tmp_path, verifier=TrustingVerifier(), wanted=("1.1",), plan=plan))
    assert again.built == ("1.1",)
    assert again.skipped.startswith("1.2 left the package")
    assert not (tmp_path / "numbers_demo" / "quadruple.py").exists()


def test_prose_fails_the_component_by_its_id_and_its_users_get_a_stand_in(tmp_path):
    model = ScriptedModel({("1.1", 1): [Prose("You add it to itself.")], ("1.2", 1): [USES]})
    outcome = generate(job(tmp_path, model))
    assert "2 answers without code: the model writes prose" in outcome.failed["1.1"]
    assert "with a stand-in for 1.1" in outcome.failed["1.2"]
    assert not outcome.ok


def test_an_answer_that_breaks_the_method_is_named_with_the_rule(tmp_path):
    cached = GOOD.replace("def double", "from functools import lru_cache\n\n\n@lru_cache\ndef double")
    allowed = DOUBLE.model_copy(update={"cases": DOUBLE.cases.model_copy(update={"imports": ("functools",)})})
    plan = PLAN.model_copy(update={"components": (allowed,)})
    model = ScriptedModel({("1.1", 1): [cached]})
    outcome = generate(job(tmp_path, model, plan=plan, stages=(1,)))
    assert "2 of 2 answers pass the cases" in outcome.failed["1.1"]
    assert "stage 1 has no optimisation (it uses functools, lru_cache)" in outcome.failed["1.1"]


def test_a_component_without_cases_is_named(tmp_path):
    bare = DOUBLE.model_copy(update={"cases": ComponentCases()})
    plan = PLAN.model_copy(update={"components": (bare, QUADRUPLE)})
    outcome = generate(job(tmp_path, plan=plan, verifier=TrustingVerifier()))
    assert "component 1.1 has no executable case (line 1" in outcome.failed["1.1"]


def test_a_plan_without_any_case_is_refused_before_anything_is_written(tmp_path):
    bare = DOUBLE.model_copy(update={"cases": ComponentCases()})
    plan = PLAN.model_copy(update={"components": (bare,)})
    with pytest.raises(UserError, match=r"no component has an executable case: 1\.1"):
        generate(job(tmp_path, plan=plan, verifier=TrustingVerifier()))
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_was_asked_in_vain_has_a_pass_rate(built):
    card = built[1].cards[0]
    assert card.pass_at_1["3"] == 0.0


def test_progress_counts_answers_and_components(tmp_path):
    seen = []
    generate(
        job(tmp_path, verifier=TrustingVerifier(), on_progress=lambda *given: seen.append(given), stages=(1,))
    )
    assert [each for each in seen if each[0] == "stage 1: answers"] == [
        ("stage 1: answers", 1, 2),
        ("stage 1: answers", 2, 2),
    ] * 2
    assert ("components", 2, 2) in seen
    assert ("mutation score", 0, 2) in seen


def test_an_endpoint_that_dies_is_named_with_the_component_and_the_run_resumes(tmp_path):
    dying = ScriptedModel(answers() | {("1.2", 1): [EngineUnavailable("connection refused", attempts=5)]})
    with pytest.raises(EnvironmentFailure, match=r"component 1\.2, stage 1") as stopped:
        generate(job(tmp_path, dying, verifier=TrustingVerifier()))
    assert "connection refused" in stopped.value.why
    alive = ScriptedModel(answers())
    assert generate(job(tmp_path, alive, verifier=TrustingVerifier())).built == ("1.1", "1.2")
    assert {component for component, _, _ in alive.asked} == {"1.2"}


def test_a_spent_budget_stops_in_order_and_a_larger_one_resumes(tmp_path):
    with pytest.raises(GracefulStop, match="50 tokens"):
        generate(job(tmp_path, max_total_tokens=50, verifier=TrustingVerifier()))
    assert generate(job(tmp_path, verifier=TrustingVerifier())).built == ("1.1", "1.2")


def test_a_stub_gives_what_the_cases_give(tmp_path):
    names = {}
    exec(write_stub(DOUBLE), names)
    assert names["double"](5) == 10
    with pytest.raises(TypeError):
        names["double"]("a")
    with pytest.raises(NotImplementedError):
        names["double"](77)


def run_until(out, number, *, torn):
    """In a child process that kills itself at this entry of the journal; True if it came to its end."""
    child = os.fork()
    if child == 0:
        written = 0
        append = Journal.append

        def fatal(self, value, *, durable=False):
            nonlocal written
            written += 1
            if written == number:
                if torn:
                    line = json.dumps(value).encode()
                    with self.path.open("ab") as file:
                        file.write(line[: len(line) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            append(self, value, durable=durable)

        Journal.append = fatal
        os.fsync = lambda _descriptor: None  # What a killed process has written stays in the kernel.
        try:
            verifier = TrustingVerifier()
            generate(job(out, verifier=verifier))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@pytest.mark.parametrize("furthest", [8, pytest.param(3, marks=pytest.mark.slow)])
def test_kills_before_and_in_entries_lose_nothing_and_verify_nothing_twice(tmp_path, furthest):
    out = tmp_path / "killed"
    number = 1
    while not run_until(out, number % furthest + 1, torn=number // furthest % 2 == 1):
        number += 1
        assert number < 200
    untouched = tmp_path / "untouched"
    assert run_until(untouched, 0, torn=False)
    killed = GenerationJournal(out / "generation").entries
    for kind in ("answer", "verdict", "evidence", "accepted", "mutation", "attempt"):
        keys = [entry["key"] for entry in killed if entry["kind"] == kind]
        assert len(keys) == len(set(keys)), kind
        assert set(keys) == {
            entry["key"]
            for entry in GenerationJournal(untouched / "generation").entries
            if entry["kind"] == kind
        }
    assert number > 10
    assert verify_package(out, plan=PLAN).ok
    same = [path.relative_to(untouched) for path in untouched.rglob("*.py")]
    assert all((out / path).read_bytes() == (untouched / path).read_bytes() for path in same)


def test_a_kill_between_the_files_of_a_package_leaves_no_file_that_counts_as_handwritten(
    tmp_path, monkeypatch
):
    manifest = PackageManifest(
        package="numbers_demo", language="python", spec_hash="", model="", model_identity="", journal="",
        components={}, files={},
    )  # fmt: skip
    names = ["numbers_demo/double.py", "tests/test_double.py"]

    def write(text):
        return write_package(tmp_path, dict.fromkeys(names, text), manifest, handwritten=set())

    for number, text in enumerate(("first", "second", "third")):
        with monkeypatch.context() as patched:
            patched.setattr(results, "write_atomic", stop_at(names[number % 2 - 1]))
            with pytest.raises(KeyboardInterrupt):
                write(text)
        assert find_handwritten(tmp_path, PLAN) == {}
    assert write("last").files == dict.fromkeys(names, text_hash("last"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "numbers_demo", "tests"]
    (tmp_path / names[0]).write_text("mine")
    assert find_handwritten(tmp_path, PLAN) == {"double": "mine"}
    with pytest.raises(UserError, match="already exists"):
        write("again")


def stop_at(name):
    def write(path, text):
        if path.as_posix().endswith(name):
            raise KeyboardInterrupt
        write_atomic(path, text)

    return write


def state(source, *, events=10, values="v", statements=(), cases=None, **facts):
    verdict = SourceVerdict(
        ok=True,
        cases=cases or {"a": ""},
        facts=SourceFacts(public=("f",), statements=statements, **facts),
        values=values,
    )
    return StageState(
        source=source, verdict=verdict, evidence=Evidence(events=events, peak_bytes=100, ran=1, executable=1)
    )


def test_stage_1_with_a_cache_does_not_keep_to_the_method():
    assert check_stage(1, None, state("a")) == {"stage 1 has no optimisation": True}
    assert check_stage(1, None, state("a", optimisations=("lru_cache",))) == {
        "stage 1 has no optimisation": False
    }


def test_stage_2_may_not_lose_a_case_or_change_the_interface():
    before = state("a", cases={"a": "", "b": "no"}, parameters=({"name": "x", "needed": True},))
    lost = state("b", cases={"a": "no", "b": ""}, parameters=({"name": "x", "needed": True},))
    wider = state("b", parameters=({"name": "x", "needed": True}, {"name": "y", "needed": True}))
    assert not check_stage(2, before, lost)["stage 2 keeps what passed"]
    assert not check_stage(2, before, wider)["stage 2 keeps the interface"]


def test_stage_3_needs_the_same_values_for_less():
    before = state("a")
    assert all(check_stage(3, before, state("b", events=5)).values())
    assert not check_stage(3, before, state("b", events=10))["stage 3 needs less"]
    assert not check_stage(3, before, state("b", events=5, values="w"))["stage 3 gives the same values"]


def test_stage_4_adds_only_handling_and_monitoring():
    body = (("Return", "return x + x"),)
    before = state("a", statements=body)
    guarded = state("b", statements=(("If", "x is None"), ("Raise", "raise TypeError"), *body))
    logged = state("b", statements=(("Expr", "log.info(x)"), *body))
    more = state("b", statements=(("AugAssign", "x += 1"), *body))
    other = state("b", statements=(("Return", "return 2 * x"),))
    name = "stage 4 adds only handling and monitoring"
    assert check_stage(4, before, guarded)[name]
    assert check_stage(4, before, logged)[name]
    assert not check_stage(4, before, more)[name]
    assert not check_stage(4, before, other)[name]
