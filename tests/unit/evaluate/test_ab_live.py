"""`graft release ab` on live traffic: one experiment counts, users may grade, and looking changes nothing."""

import json
import random
from dataclasses import replace

import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_samples import PROJECT, parts, publish_parts, write_adapter
from typer.testing import CliRunner

from graftwork.cli.release import ab
from graftwork.evaluate.live.ab import LiveAnswer, LiveTest
from graftwork.evaluate.live.comparison import LiveComparison, as_case, compare_live, find_pair, watch_live
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.interaction import Capture, Feedback
from graftwork.registry.project import open_store
from graftwork.serve.routing import make_experiment
from graftwork.serve.settings import SplitSettings
from graftwork.store.captures import FeedbackStore

app = typer.Typer()
app.command("ab")(ab)
WHEN = "2026-01-01T00:00:00Z"


@pytest.fixture
def work(tmp_path):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"metrics": ["json_valid", "token_f1"]},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


@pytest.fixture
def pair(work, tmp_path):
    """The ids of two releases."""
    return [
        publish_parts(
            folder=open_store(work),
            index=work.releases,
            **parts(write_adapter(tmp_path / name, weights=name.encode())),
        ).id
        for name in ("one", "two")
    ]


class Traffic:
    """Sessions as an endpoint with a split would serve and keep them."""

    def __init__(self, work, pair, *, share=0.5, experiment="", by_lot=True):
        self.work, self.count, self.by_lot = work, 0, by_lot
        self.feedback = FeedbackStore(work.database, project=work.settings.project)
        split = SplitSettings(share=share, experiment=experiment)
        self.running = make_experiment(split, champion=pair[0], challenger=pair[1])

    def serve(self, session, reply="{}", **more):
        arm = self.running.assign(session)
        self.count += 1
        capture = Capture(
            id=f"{self.running.experiment}-{self.count}",
            at=WHEN,
            session=session,
            model="champion",
            release=more.pop("release", self.running.release_of(arm)),
            request={"messages": [{"role": "user", "content": "give me JSON"}]},
            reply=reply(arm) if callable(reply) else reply,
            finish_reason=more.pop("finish_reason", "stop"),
            prompt_tokens=1,
            reply_tokens=1,
            first_token_ms=None,
            total_ms=100.0 if arm == "champion" else 40.0,
            dealt=self.running.experiment if self.by_lot else None,
            arm=arm if self.by_lot else None,
            share=self.running.share if self.by_lot else None,
            **more,
        )
        self.work.captures.add([capture])
        return capture

    def say(self, capture, score):
        assert self.feedback.add(Feedback(capture=capture.id, at=WHEN, score=score))


def only_challenger_is_right(arm):
    return "{}" if arm == "challenger" else "no JSON"


def test_what_the_team_asks_in_a_chat_is_no_evidence_about_users(work, pair):
    traffic = Traffic(work, pair, by_lot=False)
    for n in range(60):
        rated = traffic.serve(f"graft-chat-{n}", only_challenger_is_right)
        traffic.say(rated, 1.0 if rated.release == pair[1] else 0.0)
    for metric in ("json_valid", "feedback"):
        found = compare_live(work, *pair, metric=metric)
        assert (found.winner, found.used) == (None, 0)


def test_only_what_one_experiment_assigned_counts_and_by_default_the_latest(work, pair):
    old, new = Traffic(work, pair, experiment="old"), Traffic(work, pair, experiment="new")
    for n in range(60):
        old.serve(f"s{n}", lambda arm: "no JSON" if arm == "challenger" else "{}")
    for n in range(60):
        new.serve(f"s{n}", only_challenger_is_right)
    found = compare_live(work, *pair, metric="json_valid")
    assert (found.experiment, found.winner) == (new.running.experiment, "B")
    assert any("2 experiments" in remark for remark in found.remarks)
    assert not any("drawn by lot" in remark for remark in found.remarks)
    before = compare_live(work, *pair, metric="json_valid", experiment=old.running.experiment)
    assert (before.experiment, before.winner) == (old.running.experiment, "A")
    assert compare_live(work, pair[1], pair[0], metric="json_valid").winner == "A"


def test_how_each_arm_did_is_next_to_the_test(work, pair):
    traffic = Traffic(work, pair)
    for n in range(30):
        traffic.serve(f"s{n}")
        traffic.serve(f"s{n}", finish_reason="error" if n % 3 == 0 else "stop", disconnected=n % 3 == 1)
    found = compare_live(work, *pair, metric="json_valid")
    a, b = found.arms["A"], found.arms["B"]
    assert a.sessions + b.sessions == 30
    assert a.exchanges + b.exchanges == 60
    assert (a.failures + b.failures, a.hung_up + b.hung_up) == (10, 10)
    assert (a.median_ms, b.p95_ms) == (100.0, 40.0)


def test_an_exchange_without_an_answer_counts_against_its_arm_and_so_does_one_who_left(work, pair):
    traffic = Traffic(work, pair)
    for n in range(80):
        arm = traffic.running.assign(f"s{n}")
        traffic.serve(f"s{n}", "{}", finish_reason="error" if arm == "challenger" else "stop")
    assert compare_live(work, *pair, metric="json_valid").winner == "A"
    left = Traffic(work, pair, experiment="left")
    for n in range(80):
        arm = left.running.assign(f"s{n}")
        left.serve(f"s{n}", "{}", disconnected=arm == "challenger")
    found = compare_live(work, *pair, metric="json_valid")
    assert (found.ungraded, found.winner) == (0, "A")
    assert found.arms["B"].hung_up == found.arms["B"].exchanges


def test_a_release_does_not_win_by_bad_answers_whose_callers_left(work, pair):
    traffic, chance = Traffic(work, pair), random.Random(5)
    # The ids of the releases change with the folder of the test: without a fixed key, chance would decide.
    traffic.running = replace(traffic.running, key=bytes(32))
    for n in range(400):
        bad = chance.random() < 0.3
        left = bad and traffic.running.assign(f"s{n}") == "challenger" and chance.random() < 0.5
        traffic.serve(f"s{n}", "no JSON" if bad else "{}", disconnected=left)
    assert compare_live(work, *pair, metric="json_valid").winner is None


def test_users_decide_by_what_they_say_in_the_order_they_said_it_and_the_first_word_of_a_session_counts(
    work, pair
):
    traffic = Traffic(work, pair)
    captures = [traffic.serve(f"s{n // 2}") for n in range(160)]
    traffic.serve("silent")
    for capture in captures[1::2]:
        traffic.say(capture, float(capture.arm == "challenger"))
        traffic.say(capture, float(capture.arm == "champion"))  # a second word changes nothing any more
    found = compare_live(work, *pair, metric="feedback")
    assert found.winner == "B"
    assert found.used < 80
    assert found.counts["a_successes"] == found.counts["b_failures"] == 0
    assert found.ungraded == 1
    assert found.arms["A"].feedback + found.arms["B"].feedback == 80


def test_marks_between_good_and_bad_count_for_what_they_are(work, pair):
    traffic = Traffic(work, pair)
    for n in range(120):
        capture = traffic.serve(f"s{n}")
        traffic.say(capture, 0.9 if capture.arm == "challenger" else 0.2)
    found = compare_live(work, *pair, metric="feedback")
    assert found.winner == "B"
    assert found.low <= 0.7 <= found.high
    b_sessions = found.counts["b_successes"] + found.counts["b_failures"]
    assert found.counts["b_successes"] / b_sessions == pytest.approx(0.9)


def test_sessions_that_are_not_in_the_assigned_shares_decide_nothing(work, pair):
    traffic = Traffic(work, pair, share=0.5)
    for n in range(120):
        if traffic.running.assign(f"s{n}") == "champion" or n % 6 == 0:  # most of the challenger's are lost
            traffic.serve(f"s{n}", only_challenger_is_right)
    found = watch_live(work, *pair, metric="json_valid", every_seconds=1, pause=pytest.fail)
    assert (found.winner, found.exit_code) == (None, 12)
    assert "50.0% were assigned" in found.mismatch
    assert found.mismatch in found.sentence
    whole = Traffic(work, pair, share=0.5, experiment="whole")
    for n in range(120):
        whole.serve(f"s{n}")
    assert compare_live(work, *pair, metric="json_valid").mismatch is None


def escalate(traffic, session, own_reply):
    """The large model answers well in place of the arm, whose own answer failed a check."""
    release = traffic.running.release_of(traffic.running.assign(session))
    facts = {"release": "large", "escalated_from": release, "rejected": own_reply}
    return traffic.serve(session, "{}", failed_check="json_valid", **facts)


def is_new(traffic, n):
    return traffic.running.assign(f"s{n}") == "challenger"


@pytest.mark.parametrize("by_lot", [True, False])
@pytest.mark.parametrize("own_reply", ["no JSON", None])
def test_an_arm_is_judged_by_its_own_answers_where_a_large_model_answered(work, pair, by_lot, own_reply):
    traffic = Traffic(work, pair, by_lot=by_lot)
    for n in range(80):
        if is_new(traffic, n) and n % 5 < 3:
            escalate(traffic, f"s{n}", own_reply)
        else:
            traffic.serve(f"s{n}")
    found = compare_live(work, *pair, metric="json_valid")
    assert (found.winner, found.mismatch, found.experiment is None) == ("A", None, not by_lot)
    assert found.arms["A"].sessions + found.arms["B"].sessions == 80
    assert found.arms["A"].failed_checks == 0
    assert found.arms["B"].failed_checks == sum(is_new(traffic, n) and n % 5 < 3 for n in range(80))


def test_users_who_like_the_large_models_answer_do_not_praise_the_one_that_failed(work, pair):
    traffic = Traffic(work, pair)
    for n in range(120):
        if is_new(traffic, n) and n % 5 < 3:
            traffic.say(escalate(traffic, f"s{n}", "no JSON"), 1.0)
        else:
            traffic.say(traffic.serve(f"s{n}"), 1.0)
    found = compare_live(work, *pair, metric="feedback")
    assert found.winner == "A"
    assert found.arms["A"].feedback + found.arms["B"].feedback == 120


def test_looking_again_goes_on_where_it_ended_and_finds_what_one_look_would(work, pair):
    traffic, chance = Traffic(work, pair), random.Random(5)
    look = LiveComparison(
        work, find_pair(work, *pair), metric="json_valid", experiment=traffic.running.experiment
    )
    for n in range(90):
        traffic.serve(f"s{n // 2}", lambda arm: "{}" if chance.random() < 0.6 else "no")
        if n % 7 == 0:
            look.look()
    assert look.look() == compare_live(work, *pair, metric="json_valid")


def test_watching_ends_when_it_is_decided_and_reports_how_it_goes(work, pair, tmp_path):
    traffic, reported, pauses = Traffic(work, pair), [], []

    class Listener(NullReporter):
        def progress(self, phase, done, total, *, seconds_left, detail):
            reported.append((done, seconds_left, detail["subject"]))

    def pause(seconds):
        pauses.append(seconds)
        for _ in range(5):
            traffic.serve(f"s{traffic.count}", only_challenger_is_right)

    object.__setattr__(work, "reporter", Listener())
    found = watch_live(work, *pair, metric="json_valid", every_seconds=3.0, pause=pause)
    assert found.winner == "B"
    assert set(pauses) == {3.0}
    assert len(reported) == len(pauses) + 1
    assert [done for done, _, _ in reported] == sorted(done for done, _, _ in reported)
    assert {left for _, left, _ in reported} == {None}
    assert found.model_copy(update={"remarks": ()}) == compare_live(
        work, *pair, metric="json_valid"
    ).model_copy(update={"remarks": ()})


def test_a_metric_that_cannot_grade_live_traffic_is_reported_and_not_waited_for(work, pair):
    traffic = Traffic(work, pair)
    for n in range(30):
        traffic.serve(f"s{n}")
    found = watch_live(work, *pair, metric="token_f1", every_seconds=1, pause=pytest.fail)
    assert (found.used, found.winner) == (0, None)
    assert any("none of 30 sessions can be graded by token_f1" in remark for remark in found.remarks)
    # It has shown nothing, so it does not count as a trial.
    assert not any(
        "was tried by" in remark for remark in compare_live(work, *pair, metric="json_valid").remarks
    )


def test_ctrl_c_ends_the_watching_with_what_is_known(work, pair):
    traffic = Traffic(work, pair)
    for n in range(4):
        traffic.serve(f"s{n}")

    def interrupt(_seconds):
        raise KeyboardInterrupt

    found = watch_live(work, *pair, metric="json_valid", every_seconds=1, pause=interrupt)
    assert (found.winner, found.used, found.exit_code) == (None, 4, 12)


def run(root, *words, code):
    done = CliRunner().invoke(app, [*words, "-C", str(root), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_command_watches_shows_and_exits_as_before(work, pair, tmp_path):
    traffic = Traffic(work, pair)
    for n in range(60):
        traffic.say(traffic.serve(f"s{n}"), float(traffic.running.assign(f"s{n}") == "challenger"))
    reported = json.loads(run(tmp_path, *pair, "--metric", "feedback", "--watch", "--every", "0.1", code=0))
    assert (reported["winner"], reported["experiment"]) == ("B", traffic.running.experiment)
    part = traffic.running.experiment[-8:]
    reported = json.loads(run(tmp_path, *pair, "--metric", "token_f1", "--experiment", part, code=12))
    assert reported["experiment"] == traffic.running.experiment
    done = CliRunner().invoke(app, [*pair, "--metric", "feedback", "-C", str(tmp_path)])
    assert done.exit_code == 0
    assert traffic.running.experiment in done.stdout
    assert "40 ms" in done.stdout


@pytest.mark.parametrize(
    "words", [("--experiment", "nothing"), ("--cases", "x.jsonl", "--watch"), ("--metric", "feedbak")]
)
def test_a_metric_that_live_traffic_cannot_answer_is_refused_with_a_fix(work, pair, tmp_path, words):
    with pytest.raises(UserError) as reported:
        run(tmp_path, *pair, *words, code=2)
    assert reported.value.fix


exchanges = st.builds(
    LiveAnswer,
    st.sampled_from("AB"),
    st.sampled_from([None, "s", "t", "u"]),
    st.sampled_from([None, 0.0, 0.25, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(exchanges, max_size=40), st.data())
def test_however_the_traffic_is_cut_into_looks_the_result_is_the_same(traffic, data):
    cut = data.draw(st.integers(0, len(traffic)))
    live = LiveTest(0.05)
    for exchange in traffic[:cut]:
        live.take(exchange)
    decided = live.test.winner
    for exchange in traffic[cut:]:
        live.take(exchange)
    whole = LiveTest(0.05)
    for exchange in traffic:
        whole.take(exchange)
    assert live == whole
    assert decided in (None, live.test.winner)


def test_a_served_exchange_is_a_case_without_a_reference():
    request = {"messages": [{"role": "user", "content": "hello"}, {"role": "odd", "content": "x"}, "no turn"]}
    facts = {"session": "s", "model": "m", "release": "r", "reply": "", "finish_reason": None}
    numbers = {"prompt_tokens": 0, "reply_tokens": 0, "first_token_ms": None, "total_ms": 0.0}
    found = as_case(Capture(id="c", at=WHEN, request=request, **facts, **numbers))
    assert [message.content for message in found.messages] == ["hello"]
    assert found.reference == ""
