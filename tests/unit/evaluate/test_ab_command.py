"""`graft release ab` on what the endpoint kept and on cases, with a stand-in for the models."""

import json
import random

import pytest
import typer
import yaml
from registry_samples import PROJECT, parts, publish_parts, write_adapter
from typer.testing import CliRunner

from graftwork.cli.release import ab
from graftwork.evaluate.live import comparison as comparing
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.interaction import Capture
from graftwork.registry.project import open_store

app = typer.Typer()
app.command("ab")(ab)


@pytest.fixture
def pair(tmp_path):
    """A project with two releases; their ids."""
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"metrics": ["json_valid", "token_f1"], "checks": [{"name": "braces", "contains": "{"}]},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        return [
            publish_parts(
                folder=open_store(work),
                index=work.releases,
                **parts(write_adapter(tmp_path / name, weights=name.encode())),
            ).id
            for name in ("one", "two")
        ]


def serve(root, release, replies, *, start):
    with use_project(open_project(root), NullReporter()) as work:
        work.captures.add(
            Capture(
                id=f"{start + n:06d}",
                at="2026-01-01T00:00:00Z",
                session=None,
                model="m",
                release=release,
                request={"messages": [{"role": "user", "content": "give me JSON"}]},
                reply=reply,
                finish_reason="stop",
                prompt_tokens=1,
                reply_tokens=1,
                first_token_ms=None,
                total_ms=1.0,
            )
            for n, reply in enumerate(replies)
        )


def run(root, *words, code):
    done = CliRunner().invoke(app, [*words, "-C", str(root), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_live_traffic_decides_when_there_is_enough_of_it_and_not_before(tmp_path, pair):
    a, b = pair
    reported = run(tmp_path, a[:10], b[:10], "--metric", "json_valid", code=12)
    assert (reported["winner"], reported["used"]) == (None, 0)
    for n in range(3):
        serve(tmp_path, a, ["no JSON"], start=2 * n)
        serve(tmp_path, b, ["{}"], start=2 * n + 1)
    reported = run(tmp_path, a, b, "--metric", "json_valid", code=12)
    assert (reported["winner"], reported["used"]) == (None, 6)
    for n in range(3, 40):
        serve(tmp_path, a, ["no JSON"], start=2 * n)
        serve(tmp_path, b, ["{}"], start=2 * n + 1)
    reported = run(tmp_path, a, b, "--metric", "json_valid", code=0)
    assert reported["winner"] == "B"
    assert 6 < reported["used"] < 80
    assert reported["p_value"] <= 0.05
    assert reported["experiment"] is None
    assert ["not drawn by lot" in remark for remark in reported["remarks"]] == [True]
    other = run(tmp_path, b, a, "--metric", "json_valid", code=0)
    assert other["winner"] == "A"


def test_replayed_cases_are_asked_until_it_is_decided(tmp_path, pair, monkeypatch):
    a, b = pair
    lines = [{"prompt": f"question {n}", "reference": "{}"} for n in range(400)]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chance, asked = random.Random(1), []

    def ask(_work, release, cases, *, metric, grading):
        asked.append((release.id, len(cases), metric))
        return {case.id: float(chance.random() < (0.9 if release.id == b else 0.4)) for case in cases}

    monkeypatch.setattr(comparing, "_subjects", lambda _work, pair, _cases: pair)
    monkeypatch.setattr(comparing, "_ask", ask)
    reported = run(tmp_path, a, b, "--cases", str(tmp_path / "cases.jsonl"), "--metric", "json_valid", code=0)
    assert reported["winner"] == "B"
    assert reported["used"] <= reported["asked"] < 400
    assert reported["asked"] == sum(count for release, count, _ in asked if release == a)
    assert reported["asked"] == sum(count for release, count, _ in asked if release == b)


def test_a_pair_tried_by_several_metrics_is_reported(tmp_path, pair):
    for place, release in enumerate(pair):
        serve(tmp_path, release, ["{}"], start=place)
    run(tmp_path, *pair, "--metric", "json_valid", code=12)
    reported = run(tmp_path, *pair, "--metric", "braces", code=12)
    assert any("2 metrics" in remark for remark in reported["remarks"])


@pytest.mark.parametrize(
    "words", [("{0}", "{0}"), ("{0}", "{1}", "--metric", "nonsense"), ("{0}", "{1}", "--traffic", "dreams")]
)
def test_a_mistake_is_reported_with_its_fix(tmp_path, pair, words):
    with pytest.raises(UserError) as reported:
        run(tmp_path, *(word.format(*pair) for word in words), code=2)
    assert reported.value.fix
