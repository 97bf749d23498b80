"""A family served from one base: chains, the family's gate and forecasts through the endpoint."""

import json
from pathlib import Path

import pytest
import yaml
from flows import PLANTS
from typer.testing import CliRunner

from graftwork.api.project import open_project
from graftwork.cli.main import app
from graftwork.evaluate.ask.served_endpoint import EndpointQuestions, ask_served
from graftwork.evaluate.gate.family import gate_family, read_route
from graftwork.evaluate.project_subjects import find_trained
from graftwork.process.worker import hold_lock
from graftwork.records.errors import UserError
from graftwork.registry.deploy import import_release
from graftwork.registry.project import promote_release
from graftwork.serve.own_endpoint import gateway_folder
from graftwork.serve.project import open_chain_checks, with_threshold
from graftwork.serve.settings import ServeSettings

SMALL = {"rank": 2, "epochs": 1, "batch_size": 4, "threads": 1, "max_rows": 8, "validation_rows": 4}
CHAIN = {"steps": [{"name": "draft", "model": "champion"}, {"name": "last", "model": "plants/champion"}]}


@pytest.fixture(scope="module")
def family(tmp_path_factory, tiny_base):
    """Two models; both are released and live. Rows of every third question belong to `plants`."""
    folder = tmp_path_factory.mktemp("family")
    settings = {
        "project": "small",
        "base": str(tiny_base),
        "data": {"logs": ["log.jsonl"], "test": 0.3, "validation": 0.25, "question_similarity": 0.95},
        "models": {"main": {}, "plants": {"keep": {"role": ["plants"]}}},
        "train": SMALL,
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6, "metrics": ["token_f1"]},
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
        "serve": {
            "family": {
                "rules": [{"to": "plants", "role": ["plants"]}],
                "gate": {"max_cases": 12, "max_memory_gib": 8.0},
            },
            "chains": {"pair": CHAIN},
            "threads": 1,
        },
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    rows = [
        {
            "id": str(number),
            "status": "success",
            "role": "plants" if number % 3 == 0 else "other",
            "messages": [
                {
                    "role": "user",
                    "content": f"Where is {PLANTS[number % 16]} {number} of month {number % 12}?",
                },
                {"role": "assistant", "content": f"By the {PLANTS[(number * 7) % 16]} {number % 5}."},
            ],
        }
        for number in range(70)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    project = open_project(folder)
    project.train_all()
    for model in ("main", "plants"):
        with project.with_model(model).open() as work:
            outcome = find_trained(work, model)
            assert outcome is not None
            made = import_release(work, Path(outcome.adapter_folder)).release
            promote_release(work, made.id, reason="a test", force=True)
    return project


def test_the_family_is_gated_through_the_real_endpoint(family):
    # A live endpoint holds the serving folder while its family is gated.
    with family.open() as work, hold_lock(gateway_folder(work.project.serving)):
        verdict = gate_family(work)
        rules = {rule.rule: rule for rule in verdict.rules}
        assert rules["every request is answered (answered)"].outcome == "pass"
        assert rules["the chain pair answers"].outcome == "pass"
        assert rules["memory_gib at most 8"].value > 0
        assert 0 < rules["rule 1 (to plants) matches some requests and not all"].value < 1
        assert verdict.decision == "deploy"
        live = work.releases.aliases()["champion"]
        # The main model's adapter as a new release of the specialist: other answers, perhaps.
        outcome = find_trained(work, "main")
    with family.with_model("plants").open() as work:
        new = import_release(work, Path(outcome.adapter_folder)).release
        assert new.id != live
        verdict = gate_family(work, release=new.id)
        names = [rule.rule for rule in verdict.rules]
        assert "the route plants is not worse by 0.1" in names
        assert "every request is answered (fallback)" in names
        assert not [
            rule for rule in verdict.rules if rule.rule.endswith("(fallback)") and rule.outcome != "pass"
        ]
        assert work.releases.aliases()["plants/champion"] != new.id
        assert not list(work.captures.page())
    made = CliRunner().invoke(app, ["gate", "--family", "--json", "-C", str(family.root)])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["decision"] == "deploy"
    refused = CliRunner().invoke(app, ["gate", "--family", "--all", "-C", str(family.root)])
    assert refused.exit_code == 2


def test_a_family_gate_without_a_family_and_a_chain_without_a_model_are_refused(small_project):
    project = open_project(small_project)
    with project.open() as work, pytest.raises(UserError, match="serves no family"):
        gate_family(work)
    settings = ServeSettings.model_validate({"chains": {"c": {"steps": [{"name": "a", "model": "nobody"}]}}})
    with project.open() as work, pytest.raises(UserError, match="no model 'nobody'"):
        open_chain_checks(work, settings)
    step = {"name": "b", "model": "base", "when": {"fails": ["token_f1"]}}
    settings = ServeSettings.model_validate(
        {"chains": {"c": {"steps": [{"name": "a", "model": "base"}, step]}}}
    )
    with project.open() as work, pytest.raises(UserError, match="needs the reference"):
        open_chain_checks(work, settings)


def test_a_threshold_is_chosen_through_the_endpoint_kept_and_used(family, tmp_path):
    auto = ServeSettings.model_validate({"escalate": {"to": "base", "min_logprob": "auto"}})
    with family.open() as work, pytest.raises(UserError, match="no threshold"):
        with_threshold(work, auto)
    with pytest.raises(UserError, match="no forecast"):
        family.live_escalation()
    found = family.predict_escalation(large="log", max_rate=0.3)
    assert found.curve is not None
    assert found.curve.validation_escalated <= 0.3
    assert found.curve.points[-1].escalated.value == 1
    assert found.curve.chosen.threshold < 0
    with family.open() as work:
        assert with_threshold(work, auto).escalate.min_logprob == found.curve.chosen.threshold
    live = family.live_escalation()
    assert (live.requests, live.agrees) == (0, True)
    made = CliRunner().invoke(app, ["eval", "escalation", "--live", "-C", str(family.root)])
    assert made.exit_code == 0, made.output
    refused = CliRunner().invoke(app, ["eval", "escalation", "--plot", "x.svg", "-C", str(family.root)])
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("interface (rule 1)", ("interface", "rule 1")),
        ("learning (router 0.97)", ("learning", "router")),
        ("main (router unsure 0.41)", ("main", "unsure")),
        ("main (router 0.88, people is not loaded)", ("main", "away")),
        ("main (router 0.88, people is not ready)", ("main", "away")),
        ("main (rule 2, people is not loaded)", ("main", "rule 2")),
        ("main (default)", ("main", "default")),
        ("", ("", "")),
    ],
)
def test_the_route_header_is_read_back(header, found):
    assert read_route(header) == found


def test_an_endpoint_that_is_gone_is_an_answer_with_status_0():
    from graftwork.records.interaction import Message, Origin
    from graftwork.records.report import Case

    case = Case(
        id="c",
        origin=Origin(file="f", line=1),
        messages=(Message(role="user", content="q"),),
        reference="",
    )
    (answer,) = ask_served("http://127.0.0.1:9", [case], EndpointQuestions("auto", 4))
    assert (answer.status, answer.answered) == (0, False)
