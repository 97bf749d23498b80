"""The canary of a training cycle: what ends it, and how. Its error rates are in tests/statistics."""

import pytest
import yaml
from registry_samples import PROJECT, alias_move, parts, publish_parts, write_adapter

from graftwork.cycle.runner import watch_canary
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.interaction import Capture
from graftwork.registry.project import open_store
from graftwork.serve.routing import make_experiment

MINUTES, FEWEST = 10, 30
CYCLE = CycleState(
    number=1,
    model="main",
    cause="x",
    version="",
    started_at=0.0,
    steps=(CycleStepState(name="canary", status="running", started_at=0.0),),
)


@pytest.fixture
def work(tmp_path):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"metrics": ["json_valid"]},
        "serve": {"split": {"share": 0.5}},
        "cycle": {"canary": {"minutes": MINUTES, "fewest_sessions": FEWEST, "metric": "json_valid"}},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


@pytest.fixture
def pair(work, tmp_path):
    releases = [
        publish_parts(
            folder=open_store(work),
            index=work.releases,
            **parts(write_adapter(tmp_path / name, weights=name.encode())),
        )
        for name in ("old", "new")
    ]
    work.releases.move_alias(alias_move("champion", releases[0].id))
    return releases


def serve(work, pair, of, count, *, reply="{}", **more):
    """So many sessions of an arm of the experiment."""
    champion, challenger = (release.id for release in pair)
    running = make_experiment(work.settings.serve.split, champion=champion, challenger=challenger)
    before = work.captures.count()
    facts = {"dealt": running.experiment, "arm": of, "share": running.share, "finish_reason": "stop", **more}
    work.captures.add(
        Capture(
            id=f"c{n}", at="2026-01-01T00:00:00Z", session=f"s{n}", model="champion",
            release=running.release_of(of), request={"messages": [{"role": "user", "content": "JSON"}]},
            reply=reply, prompt_tokens=1, reply_tokens=1, first_token_ms=None, total_ms=1.0, **facts,
        )
        for n in range(before, before + count)
    )  # fmt: skip


def watch(work, pair, minutes):
    return watch_canary(work, CYCLE, pair[1], now=minutes * 60.0)


def test_nothing_is_decided_before_the_time_is_over_and_then_the_gates_verdict_counts(work, pair):
    serve(work, pair, "champion", 40)
    serve(work, pair, "challenger", 40)
    assert watch(work, pair, MINUTES - 1).again_at is not None
    decided = watch(work, pair, MINUTES)
    assert decided.summary["verdict"] == "promote"
    assert "no harm seen" in decided.summary["why"]


def test_too_few_sessions_are_waited_for_three_times_as_long(work, pair):
    serve(work, pair, "champion", 10)
    serve(work, pair, "challenger", 10)
    assert watch(work, pair, MINUTES).again_at is not None
    assert "the gate's verdict counts" in watch(work, pair, 3 * MINUTES).summary["why"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [({"reply": "no JSON"}, "worse by json_valid"), ({"failed_check": "other"}, "more failed requests")],
)
def test_harm_rolls_back_before_the_time_is_over(work, pair, harm, why):
    for _ in range(20):
        serve(work, pair, "champion", 3)
        serve(work, pair, "challenger", 3, **harm)
    decided = watch(work, pair, 1)
    assert decided.summary["verdict"] == "roll_back"
    assert why in decided.summary["why"]


def test_sessions_that_are_not_in_the_assigned_shares_roll_back(work, pair):
    serve(work, pair, "champion", 150)
    serve(work, pair, "challenger", 50)
    decided = watch(work, pair, MINUTES)
    assert decided.summary["verdict"] == "roll_back"
    assert "sample ratio mismatch" in decided.summary["why"]


def test_what_a_release_answered_before_its_canary_is_no_part_of_it(work, pair):
    for arm in ("champion", "challenger"):
        serve(work, pair, arm, 60, dealt=None, arm=None, share=None)
    assert watch(work, pair, MINUTES).again_at is not None
