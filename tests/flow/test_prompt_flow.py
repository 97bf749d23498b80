"""The prompted base on the tiny model: asked, compared, released without an adapter and served; and costs."""

import json
from urllib.request import Request, urlopen

import pytest

from graftwork.api.project import open_project
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.records.errors import NegativeResult
from graftwork.records.release import PROMPT_FILE
from graftwork.registry.prompt_release import without_itself

SYSTEM = (
    "You are a gardener. Answer in JSON with the keys answer, citations and refused, from the sources only."
)


@pytest.fixture
def logged(small_project, change_settings):
    """The project with a system prompt, times, tokens and a model with a known price in its log."""
    path = small_project / "logs" / "log.jsonl"
    lines = []
    for number, line in enumerate(path.read_text().splitlines()[:-1]):
        row = json.loads(line)
        row["messages"].insert(0, {"role": "system", "content": SYSTEM})
        row |= {"model": "gpt-4o-mini-2024-07-18", "timestamp": f"2026-10-{1 + number % 10:02d}T08:00:00Z"}
        row |= {"usage": {"prompt_tokens": 1000 + number, "completion_tokens": 100}, "duration_ms": 900.0}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    change_settings(small_project, evaluate={"max_cases": 6, "latency_cases": 6})
    return small_project


def ask(url, model):
    """The release that answered a question, and the tokens of its prompt."""
    body = {"model": model, "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3}
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)) as answer:
        usage = json.loads(answer.read())["usage"]
        return {"release": answer.headers["x-graft-release"], "prompt_tokens": usage["prompt_tokens"]}


def of(report, name):
    subjects = (report.baseline, report.candidate, *report.others)
    return next(subject for subject in subjects if subject.subject == name)


def test_a_dropped_system_prompt_and_the_log_are_compared_by_what_they_cost(
    logged, change_settings, listener
):
    costs = {"usd_per_hour": 0.5, "success": "json_valid"}
    change_settings(logged, data={"logged_system_prompt": "drop"}, evaluate={"costs": costs})
    project = open_project(logged, reporter=listener)
    report = project.evaluate(("base", "base+prompt", "base+logged_prompt", "log"), limit=4).report
    plain, long = (of(report, name).metrics["tokens_per_task"] for name in ("base", "base+logged_prompt"))
    assert long.value > plain.value
    assert any("trained away" in remark and "tokens less" in remark for remark in report.remarks)
    assert of(report, "base+prompt").generation.settings["worked_examples"] == 4
    assert of(report, "base+logged_prompt").generation.settings["logged_system_prompt"] is True
    log = of(report, "log").metrics
    assert 1100 <= log["tokens_per_task"].value <= 1170
    # 1,000 to 1,069 tokens in at $0.15 a million and 100 out at $0.60.
    assert log["cost_per_success"].value == pytest.approx(0.00022, rel=0.05)
    assert log["latency_p95_seconds"].value == pytest.approx(0.9)


def test_a_month_of_the_log_is_priced_and_hosting_is_found(logged, listener):
    found = open_project(logged, reporter=listener).savings()
    assert found.days == 10
    assert found.logged_usd_per_month.value == pytest.approx(7 * 30.4375 * 0.000215, rel=0.05)
    assert [price.model for price in found.prices] == ["gpt-4o-mini"]
    assert found.hosting.usd_per_month.value > 10
    assert found.saved_usd_per_month.value < 0


def test_a_prompt_is_gated_released_verified_and_served_without_an_adapter_by_both_engines(
    logged, change_settings, listener, monkeypatch, tmp_path
):
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))

    def require_served(project):
        with project.serving() as url:
            prompted = ask(url, "champion")
            assert prompted["release"] == release.id
            # The worked examples go before the question.
            assert prompted["prompt_tokens"] > ask(url, "base")["prompt_tokens"] + 100

    project = open_project(logged, reporter=listener)
    release = project.release_prompt()
    names = {file.path for file in release.files}
    assert PROMPT_FILE in names
    assert not any(name.endswith(".safetensors") for name in names)
    assert project.releases()[0].aliases == ("champion",)
    assert "train" not in listener.done
    require_served(project)
    kept = {path.name for path in (logged / ".graft" / "answers").rglob("*.json")}
    project.evaluate(("base", "release:champion"), limit=4)
    assert {path.name for path in (logged / ".graft" / "answers").rglob("*.json")} == kept

    engine = {"kind": "llamacpp", "precision": "f32", "context": 2048}
    change_settings(logged, serve={"engine": engine, "port": 0, "threads": 1})
    project = open_project(logged, reporter=listener)
    with pytest.raises(NegativeResult, match="may not be served by llamacpp"), project.serving():
        pass
    assert project.gate_engine(release="champion").decision == "deploy"
    require_served(project)


def test_a_prompt_that_the_gate_refuses_is_not_released(logged, change_settings, listener):
    change_settings(logged, gate={"rules": [{"metric": "truncated", "under": 0.5}]})
    project = open_project(logged, reporter=listener)
    with pytest.raises(NegativeResult, match="not released"):
        project.release_prompt()
    assert project.releases() == ()


def test_an_adapter_without_the_long_prompt_is_guarded_against_the_base_that_has_it_or_a_prompt(
    logged, change_settings, listener
):
    rules = [
        {"metric": "latency_seconds", "against": against, "margin": 1000.0}
        for against in ("logged_prompt", "prompt")
    ]
    short = {"logged_system_prompt": "replace", "system_prompt": "Be brief."}
    change_settings(logged, data=short, gate={"rules": rules}, train={"epochs": 1})
    project = open_project(logged, reporter=listener)
    verdict = project.gate(update=True)
    assert [rule.against for rule in verdict.rules] == ["base+logged_prompt", "base+prompt"]
    assert verdict.rules[0].outcome == "pass"
    assert all(rule.n for rule in verdict.rules)
    report = project.evaluate().report
    tokens = {name: of(report, name).metrics["tokens_per_task"].value for name in ("adapter", "base")}
    # The adapter answers what the base is asked with a prompt of twenty words more.
    assert of(report, "base+logged_prompt").metrics["tokens_per_task"].value > max(tokens.values()) + 10


def test_the_prompted_base_itself_is_held_against_the_base():
    settings = GateSettings.model_validate(
        {
            "rules": [{"metric": "json_valid", "against": "prompt", "margin": 0.1}],
            "primary": {"metric": "answer_match", "against": "prompt"},
        }
    )
    changed = without_itself(settings)
    assert changed.rules[0].against == "base"
    assert changed.primary_rule.against == "base"
