"""Which notices a cycle gives, and how they reach a command and a webhook."""

import http.server
import json
import threading

import pytest
from test_cycle_decide import ADA, CYCLE_STEPS, HERE, NOW, act, do, do_until, opened

from graftwork.cycle.decide import COORDINATOR, Close, find_notices
from graftwork.cycle.runner import send_notice
from graftwork.cycle.settings import NOTICE_KINDS, CycleSettings, NotifySettings
from graftwork.cycle.state import CoordinatorState, Notice, begin, claim, fail, finish, pause, skip

ALL = CycleSettings(notify=NotifySettings(kinds=NOTICE_KINDS))
RELEASE = "a1" * 20


def ids(before, after, settings=ALL):
    return [notice.id for notice in find_notices(before, after, settings, now=NOW)]


def test_a_verdict_is_announced_once_and_other_steps_are_not():
    before = do_until("gate")
    after = do(before, "gate", {"decision": "iterate", "reason": "too few cases"})
    (notice,) = find_notices(before, after, ALL, now=NOW)
    assert (notice.id, notice.what) == ("1-gate", "the gate said iterate: too few cases")
    assert ids(after, after) == []
    assert ids(before, skip(before, "gate", why="", now=NOW)) == []
    assert ids(opened(), do(opened(), "collect", {"decision": "deploy"})) == []


@pytest.mark.parametrize("step", ["promote", "deliver"])
@pytest.mark.parametrize("action", ["promoted", "rolled_back"])
def test_a_release_that_goes_live_or_back_is_announced(step, action):
    before = do_until(step)
    after = do(before, step, {"action": action, "release": RELEASE, "alias": "champion", "to": ["a", "b"]})
    (notice,) = find_notices(before, after, ALL, now=NOW)
    said = {"promote": "is champion", "deliver": "is served by a, b"}[step]
    assert notice.id == f"1-{action}-{step}"
    assert notice.what == f"release a1a1a1a1a1a1 {said if action == 'promoted' else 'was rolled back'}"
    assert ids(before, do(before, step, {"release": RELEASE})) == []


def test_each_failed_attempt_and_the_end_are_announced():
    claimed, token = claim(do_until("train"), "train", HERE, now=NOW, lease=60)
    once = fail(claimed, "train", token, now=NOW, error={"what": "no memory"}, may_pass=True)
    assert ids(claimed, once) == ["1-failed-train-1"]
    again, token = claim(once, "train", HERE, now=NOW, lease=60)
    assert ids(once, again) == []
    twice = fail(again, "train", token, now=NOW, error={"what": "no key"}, may_pass=False)
    assert ids(again, twice) == ["1-failed-end"]
    assert ids(twice, twice) == []


def test_a_good_end_is_announced_only_where_it_is_asked_for():
    ended = finish(opened(), "promoted", reason="", now=NOW)
    assert ids(opened(), ended) == ["1-finished-end"]
    assert ids(opened(), ended, CycleSettings()) == []
    assert ids(CoordinatorState(), ended) == ["1-finished-end"]


def test_the_steps_of_the_last_cycle_are_not_taken_for_those_of_this_one():
    last = finish(do(do_until("gate"), "gate", {"decision": "abort"}), "not_promoted", reason="", now=NOW)
    state = begin(last, model="main", cause="", now=NOW, steps=("gate",), version="1")
    assert ids(last, do(state, "gate", {"decision": "abort"})) == ["2-gate"]


def test_only_a_pause_of_the_coordinator_itself_is_announced():
    own = ADA.model_copy(update={"who": COORDINATOR})
    assert ids(opened(), pause(opened(), own)) == ["1-paused"]
    assert ids(opened(), pause(opened(), ADA)) == []
    assert ids(pause(opened(), ADA), pause(opened(), own)) == []


@pytest.mark.parametrize(
    ("summaries", "end"),
    [
        ({}, Close("promoted", "release a1a1a1a1a1a1 is live")),
        ({"plan": {"same_as_last": True}}, "nothing_new"),
        ({"gate": {"decision": "not_enough_evidence", "reason": "few"}}, "not_promoted"),
        ({"promote": {"action": "rolled_back", "why": "worse"}}, Close("rolled_back", "worse")),
        ({"deliver": {"action": "rolled_back", "why": "worse"}}, Close("rolled_back", "worse")),
    ],
)
def test_the_end_of_a_cycle_is_what_its_steps_say(summaries, end):
    of_steps = {"gate": {"decision": "deploy"}, "release": {"id": RELEASE}} | summaries
    state = do(do_until("report", of_steps), "report")
    assert state.cycle.current is None
    assert len(state.cycle.steps) == len(CYCLE_STEPS)
    action = act(state)
    assert end in (action, action.outcome)


NOTICE = Notice(
    id="3-gate",
    kind="gate",
    project="helpdesk",
    cycle=3,
    at=1_800_000_000.0,
    what="the gate said deploy",
    why="The rule holds.",
    fix="graft up status",
)


def test_a_command_gets_the_notice_as_json(tmp_path):
    target = tmp_path / "notice"
    assert send_notice(NOTICE, NotifySettings(command=f"sh -c 'cat > {target}'")) == ""
    found = json.loads(target.read_text())
    assert (found["id"], found["kind"], found["cycle"]) == ("3-gate", "gate", 3)
    assert "tries" not in found


def test_every_channel_that_fails_is_named_without_its_secret():
    settings = NotifySettings(command="false", webhook="ftp://hooks.example.org/T0ken")
    failure = send_notice(NOTICE, settings)
    assert "the command ended with exit code 1" in failure
    assert "T0ken" not in failure


def test_a_webhook_gets_the_notice():
    taken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            taken.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/hook"
    assert send_notice(NOTICE, NotifySettings(webhook=address)) == ""
    server.server_close()
    assert taken[0]["what"] == "the gate said deploy"
