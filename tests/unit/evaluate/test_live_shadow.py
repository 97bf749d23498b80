"""`graft release ab --traffic shadow`: pairs of live answers and copies, one a session."""

from dataclasses import replace

import pytest
import yaml
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.data.capture_export import CaptureExport
from graftwork.data.settings import CaptureSettings
from graftwork.evaluate.live.comparison import compare_live
from graftwork.evaluate.live.shadow import compare_shadow, summarize_shadow
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.interaction import Capture
from graftwork.registry.project import open_store, promote_release
from graftwork.serve.settings import ShadowSettings


@pytest.fixture
def work(tmp_path):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"metrics": ["json_valid"]},
        "serve": {"failover": {"endpoints": {"large": {"url": "http://127.0.0.1:9/v1", "model": "m"}}}},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


@pytest.fixture
def pair(work, tmp_path):
    return [
        publish_parts(
            folder=open_store(work),
            index=work.releases,
            **parts(write_adapter(tmp_path / name, weights=name.encode())),
        ).id
        for name in ("one", "two")
    ]


def serve(work, number, release, reply, *, shadow_of=None, finish_reason="stop", session=None, **more):
    capture = Capture(
        id=f"{release[:6]}-{number}", at="2026-01-01T00:00:00Z", session=session or f"s{number}", model="m",
        release=release, request={"messages": [{"role": "user", "content": "JSON"}]}, reply=reply,
        finish_reason=finish_reason, prompt_tokens=1, reply_tokens=1, first_token_ms=None, total_ms=1.0,
        shadow_of=shadow_of, **more,
    )  # fmt: skip
    work.captures.add([capture])
    return capture.id


@pytest.mark.parametrize("endpoint", [False, True])
def test_copies_are_paired_with_what_users_got(work, pair, endpoint):
    challenger = "large" if endpoint else pair[1]
    for n in range(20):
        live = serve(work, n, pair[0], "no JSON")
        serve(work, n, challenger, "{}", shadow_of=live)
    found = compare_shadow(work, pair[0], challenger, metric="json_valid")
    assert (found.winner, found.traffic, found.asked) == ("B", "shadow", 20)
    assert found.counts["wins"] == found.used
    if not endpoint:  # the copies are no part of a comparison of what users got
        assert compare_live(work, *pair, metric="json_valid").arms["B"].exchanges == 0


def test_a_challenger_that_fails_loses_and_a_session_counts_once(work, pair):
    for n in range(20):
        live = serve(work, n, pair[0], "{}", session="same" if n < 5 else None)
        serve(work, n, pair[1], "", shadow_of=live, finish_reason="error")
    found = compare_shadow(work, *pair, metric="json_valid")
    assert found.winner == "A"
    assert found.used <= 16


def serve_escalated(work, number, release):
    """Half of the champion's answers fail a check, and the large model answers well in their place."""
    if number % 2:
        return serve(work, number, release, "{}")
    facts = {"escalated_from": release, "failed_check": "json_valid", "rejected": "no JSON"}
    return serve(work, number, "large", "{}", **facts)


def test_a_champion_is_compared_by_its_own_answers_where_a_large_model_answered(work, pair):
    for n in range(40):
        serve(work, n, pair[1], "{}", shadow_of=serve_escalated(work, n, pair[0]))
    found = compare_shadow(work, *pair, metric="json_valid")
    assert (found.winner, found.asked) == ("B", 40)


@pytest.mark.parametrize(("interrupted", "remarks"), [(1, 0), (5, 1)])
def test_interrupted_copies_are_not_compared_and_many_of_them_are_a_remark(work, pair, interrupted, remarks):
    for n in range(20):
        live = serve(work, n, pair[0], "{}")
        reason = "interrupted" if n < interrupted else "stop"
        serve(work, n, pair[1], "{}", shadow_of=live, finish_reason=reason)
    found = compare_shadow(work, *pair, metric="json_valid")
    assert (found.asked, found.counts["losses"]) == (20 - interrupted, 0)
    shown = [remark for remark in found.remarks if "were interrupted" in remark]
    assert len(shown) == remarks


def test_nothing_copied_is_a_remark_and_an_unknown_challenger_is_refused(work, pair):
    assert "serve.shadow" in compare_shadow(work, *pair).remarks[0]
    with pytest.raises(UserError) as refused:
        compare_shadow(work, pair[0], "nobody")
    assert "large" in refused.value.why


def test_shadow_answers_never_become_training_rows(work, pair):
    live = serve(work, 1, pair[0], "{}")
    serve(work, 1, pair[1], "{}", shadow_of=live)
    export = CaptureExport(work, CaptureSettings(), feedback="all")
    assert [capture.id for capture in export] == [live]
    assert export.left_out["no user got it: it is a shadow answer"] == 1


@pytest.fixture
def shadowed(work, pair):
    """The project with a champion and a challenger that answers its requests in the shadow."""
    for alias, release in zip(("champion", "challenger"), pair, strict=True):
        promote_release(work, release, alias=alias, reason="test", force=True)
    serving = work.project.settings.serve.model_copy(update={"shadow": ShadowSettings(to="challenger")})
    settings = work.project.settings.model_copy(update={"serve": serving})
    project = replace(work.project, settings=settings)
    return replace(work, project=project)


def test_a_summary_compares_the_pairs_by_every_check_that_needs_no_reference(shadowed, pair):
    for n in range(60):
        live = serve(shadowed, n, pair[0], "{}" if n % 2 else "no JSON")
        serve(shadowed, n, pair[1], "{}", shadow_of=live)
    found = summarize_shadow(shadowed)
    assert (found.champion, found.challenger, found.sessions) == (*pair, 60)
    (check,) = found.checks
    assert (check.check, check.pairs, check.wins, check.losses, check.ties) == ("json_valid", 60, 30, 0, 30)
    assert (check.champion, check.challenger) == (0.5, 1.0)
    assert 0 < check.low <= 0.5 <= check.high < 1
    assert check.outcome == "better"


def test_a_summary_holds_escalated_answers_against_the_champion(shadowed, pair):
    for n in range(60):
        serve(shadowed, n, pair[1], "{}", shadow_of=serve_escalated(shadowed, n, pair[0]))
    found = summarize_shadow(shadowed)
    assert (found.sessions, found.checks[0].champion, found.checks[0].challenger) == (60, 0.5, 1.0)


def test_a_summary_counts_failures_against_the_challenger_and_leaves_interrupted_copies_out(shadowed, pair):
    for n in range(30):
        live = serve(shadowed, n, pair[0], "{}", session="same" if n < 5 else None)
        reason = "interrupted" if n >= 20 else "error"
        serve(shadowed, n, pair[1], "", shadow_of=live, finish_reason=reason)
    found = summarize_shadow(shadowed)
    assert (found.copies, found.sessions, found.failed, found.interrupted) == (30, 16, 16, 10)
    assert found.checks[0].challenger == 0.0
    assert "interrupted" in found.remarks[0]


def test_a_summary_without_copies_says_so_and_without_a_shadow_there_is_none(shadowed, work):
    assert summarize_shadow(work) is None
    found = summarize_shadow(shadowed)
    assert found.remarks == ("challenger has answered no copies of live requests yet",)
    assert found.checks[0].outcome == "open"
