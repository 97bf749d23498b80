"""The judge over real HTTP: patient with a busy server, clear about a wrong one, silent about the key."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from gate_samples import new_case

from graftwork.evaluate import judge as judge_module
from graftwork.evaluate.judge import REPLIES_FILE, JudgeBudget, JudgeClient, open_judge
from graftwork.evaluate.judge_statistics import count_pairs
from graftwork.evaluate.settings import JudgeSettings
from graftwork.grading.checks import grade
from graftwork.grading.interface import GradeContext
from graftwork.process.asking import NoReply
from graftwork.records.errors import EnvironmentFailure

CHAT = [{"role": "user", "content": "hello"}]
TIE = '{"reason": "alike", "winner": "tie"}'


class Endpoint:
    """Speaks the protocol; `faults` are met first, one a request; `decide` makes the replies."""

    def __init__(self):
        self.faults = []
        self.decide = lambda _body: TIE
        self.requests = []
        self.lock = threading.Lock()
        self.release = threading.Event()

    @contextmanager
    def listening(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            self.release.set()
            server.shutdown()
            thread.join()
            server.server_close()


def _handler_for(endpoint):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.lock:
                endpoint.requests.append((self.path, dict(self.headers), body))
                fault = endpoint.faults.pop(0) if endpoint.faults else None
            if fault is not None:
                fault(self)
                return
            text = endpoint.decide(body)
            reply = {
                "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10},
            }
            send(self, 200, json.dumps(reply).encode())

        def log_message(self, *_arguments):
            return None

    return Handler


def send(handler, status, body=b"{}", **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def status(code, body=b"{}", **headers):
    return lambda handler: send(handler, code, body, **headers)


def cut_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


@pytest.fixture
def endpoint():
    return Endpoint()


@pytest.fixture
def url(endpoint):
    with endpoint.listening() as address:
        yield address


def settings_for(url, **more):
    return JudgeSettings(url=url, model="judge-1", **more)


def client_for(url, pauses=None, **more):
    return JudgeClient(settings_for(url, **more), wait=(pauses if pauses is not None else []).append)


@pytest.mark.parametrize(
    "fault",
    [
        status(429),
        status(500),
        status(503, b"<html>busy</html>"),
        status(200, b"not json"),
        status(200, b'{"choices": []}'),
        status(200, b'{"choices": [{"message": {"content": null}}]}'),
        status(200, b"[" * 5000),
        cut_off,
    ],
)
def test_a_temporary_failure_is_retried(endpoint, url, fault):
    endpoint.faults = [fault, fault]
    pauses = []
    output = client_for(url, pauses).say(CHAT)
    assert output.text == TIE
    assert (output.tokens_in, output.tokens_out) == (100, 10)
    assert len(endpoint.requests) == 3
    assert len(pauses) == 2
    assert 0.25 <= pauses[0] <= 0.5 <= pauses[1] <= 1.0


def test_a_server_that_asks_for_time_gets_it_within_reason(endpoint, url):
    endpoint.faults = [status(429, Retry_After="7"), status(429, Retry_After="86400")]
    pauses = []
    client_for(url, pauses).say(CHAT)
    assert pauses == [7.0, 30.0]


def test_after_all_attempts_the_question_is_unanswered(endpoint, url):
    endpoint.faults = [status(500)] * 9
    with pytest.raises(NoReply, match=r"status 500 \{\}, 5 times"):
        client_for(url).say(CHAT)
    assert len(endpoint.requests) == 5


def test_a_slow_server_is_left_and_asked_again(endpoint, url, monkeypatch):
    endpoint.faults = [lambda _handler: endpoint.release.wait(120)]
    # A busy machine may need more than the second attempt.
    monkeypatch.setattr(judge_module, "ATTEMPTS", 20)
    monkeypatch.setattr(judge_module, "ANSWER_SECONDS", 0.5)
    assert client_for(url).say(CHAT).text == TIE
    assert len(endpoint.requests) > 1


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (status(401), "rejected us"),
        (status(404, b'{"error": {"message": "no model judge-1"}}'), "status 404"),
        (status(400, b'{"error": "bad"}'), "status 400"),
        (status(302, Location="http://127.0.0.1:9/elsewhere"), "status 302"),
    ],
)
def test_a_permanent_failure_is_reported_at_once(endpoint, url, fault, reported):
    endpoint.faults = [fault]
    with pytest.raises(EnvironmentFailure, match=reported) as caught:
        client_for(url).say(CHAT)
    assert caught.value.fix
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("code", [400, 401])
def test_the_key_goes_into_the_header_and_nowhere_else(endpoint, url, monkeypatch, tmp_path, code):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    judge = open_judge(settings_for(url, api_key_env="JUDGE_KEY"), folder=tmp_path)
    judge.compare([make_case()], baseline={"c": "one"}, candidate={"c": "two"})
    _, headers, body = endpoint.requests[0]
    assert headers["Authorization"] == "Bearer sk-very-secret"
    assert "sk-very" not in json.dumps(body)
    assert "sk-very" not in (tmp_path / REPLIES_FILE).read_text()
    repeated = b'{"error": {"message": "bad key sk-very-secret"}}'
    endpoint.faults = [status(code, repeated)]
    with pytest.raises(EnvironmentFailure) as caught:
        judge.compare([make_case()], baseline={"c": "one"}, candidate={"c": "three"})
    assert "sk-very" not in json.dumps(caught.value.as_json())


@pytest.mark.parametrize("key", ["", "line\nbreak", "schlüssel"])
def test_a_key_that_is_not_there_or_none_is_reported_by_its_variable(url, monkeypatch, key):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(EnvironmentFailure, match="JUDGE_KEY"):
        client_for(url, api_key_env="JUDGE_KEY").say(CHAT)


def make_case(case_id="c"):
    return new_case(case_id, f"When, {case_id}?", "At six.")


def prefer(word):
    """A judge that likes the answer with this word, wherever it stands."""

    def decide(body):
        first, _, second = body["messages"][1]["content"].partition("Answer B:")
        in_first, in_second = word in first.partition("Answer A:")[2], word in second
        winner = "tie" if in_first == in_second else "A" if in_first else "B"
        return json.dumps({"reason": "r", "winner": winner})

    return decide


def test_a_judge_who_knows_what_he_wants_is_consistent_over_http(endpoint, url, tmp_path):
    endpoint.decide = prefer("good")
    cases = [make_case(f"case {n}") for n in range(8)]
    before = {case.id: "plain" for case in cases}
    after = {case.id: "good" if n < 6 else "bad" for n, case in enumerate(cases)}
    judge = open_judge(settings_for(url), folder=tmp_path)
    seen = []
    verdicts = judge.compare(
        cases, baseline=before, candidate=after, progress=lambda done, of: seen.append((done, of))
    )
    tally = count_pairs(verdicts, baseline="base", candidate="adapter", model="judge-1")
    assert (tally.wins, tally.losses, tally.ties, tally.inconsistent) == (6, 0, 2, 0)
    assert tally.agreement == 1.0
    assert tally.first_place_share == 0.5
    assert seen == [(n, 8) for n in range(1, 9)]
    assert len(endpoint.requests) == 16


def test_a_second_run_asks_nothing_and_a_killed_one_goes_on(endpoint, url, tmp_path):
    endpoint.decide = prefer("good")
    cases = [make_case(f"case {n}") for n in range(4)]
    before, after = {case.id: "plain" for case in cases}, {case.id: "good" for case in cases}

    def run(some):
        return open_judge(settings_for(url), folder=tmp_path).compare(some, baseline=before, candidate=after)

    run(cases[:2])
    journal = tmp_path / REPLIES_FILE
    # What a kill leaves: the last line torn.
    journal.write_bytes(journal.read_bytes()[:-20])
    asked = len(endpoint.requests)
    verdicts = run(cases)
    assert len(endpoint.requests) == asked + 1 + 4
    assert [verdict.grade for verdict in verdicts] == [1.0] * 4
    asked = len(endpoint.requests)
    assert run(cases) == verdicts
    assert len(endpoint.requests) == asked


def test_an_unclear_reply_is_asked_once_more_and_then_reported(endpoint, url):
    replies = iter(["A is better", '{"winner": "A"}', "well", "well"])
    endpoint.decide = lambda _body: next(replies)
    judge = open_judge(settings_for(url, concurrency=1), folder=None)
    [verdict] = judge.compare([make_case()], baseline={"c": "one"}, candidate={"c": "two"})
    assert verdict.grade is None
    assert "no JSON object" in verdict.reason
    assert endpoint.requests[1][2]["messages"][-1]["content"].startswith("That was not")


def test_a_budget_of_questions_ends_the_run_in_order(endpoint, url):
    cases = [make_case(f"case {n}") for n in range(5)]
    before, after = {case.id: "x" for case in cases}, {case.id: "y" for case in cases}
    judge = open_judge(settings_for(url, concurrency=1, max_questions=4), folder=None)
    verdicts = judge.compare(cases, baseline=before, candidate=after)
    assert [verdict.grade for verdict in verdicts] == [0.5, 0.5, None, None, None]
    assert "max_questions 4" in verdicts[-1].reason
    assert len(endpoint.requests) == 4


def test_a_budget_of_money_ends_the_run_in_order(endpoint, url):
    cases = [make_case(f"case {n}") for n in range(5)]
    before, after = {case.id: "x" for case in cases}, {case.id: "y" for case in cases}
    # 100 tokens in at 10 a million and 10 out at 100 a million: 0.002 a question.
    judge = open_judge(
        settings_for(url, concurrency=1, max_cost=0.005, price_in=10, price_out=100), folder=None
    )
    verdicts = judge.compare(cases, baseline=before, candidate=after)
    assert judge.budget.questions == 3
    assert judge.budget.cost == pytest.approx(0.006)
    assert [verdict.grade for verdict in verdicts] == [0.5, None, None, None, None]


def test_a_judge_who_is_away_is_not_asked_for_ever(endpoint, url, monkeypatch):
    monkeypatch.setattr(judge_module, "ATTEMPTS", 1)
    endpoint.faults = [status(500)] * 100
    cases = [make_case(f"case {n}") for n in range(12)]
    before, after = {case.id: "x" for case in cases}, {case.id: "y" for case in cases}
    judge = open_judge(settings_for(url, concurrency=1), folder=None)
    verdicts = judge.compare(cases, baseline=before, candidate=after)
    assert len(endpoint.requests) == 5
    assert all(verdict.grade is None for verdict in verdicts)


def test_a_wrong_key_stops_those_that_wait_for_a_busy_server_too(endpoint, url):
    # Three are asked to come back in half a minute; the fourth is refused for good.
    endpoint.faults = [status(429, Retry_After="30")] * 3 + [status(401)]
    cases = [make_case(f"case {n}") for n in range(4)]
    before, after = {case.id: "x" for case in cases}, {case.id: "y" for case in cases}
    judge = open_judge(settings_for(url, concurrency=4), folder=None)
    with pytest.raises(EnvironmentFailure, match="rejected us"):
        judge.compare(cases, baseline=before, candidate=after)
    # Nobody waited for his half minute to ask once more.
    assert len(endpoint.requests) == 4


def test_a_judge_without_prices_has_no_cost():
    budget = JudgeBudget(settings_for("http://localhost:1/v1", max_questions=1))
    assert [budget.refuse() is None for _ in range(2)] == [True, False]
    assert budget.questions == 1
    assert budget.cost is None


def test_marks_become_the_metric_judge_score(endpoint, url):
    endpoint.decide = lambda _body: '```json\n{"reason": "r", "mark": 4}\n```'
    context = GradeContext(judge=open_judge(settings_for(url), folder=None))
    assert grade("judge_score", make_case(), "At six.", context=context) == 0.75
    endpoint.decide = lambda _body: '{"mark": 6}'
    assert grade("judge_score", make_case(), "At seven.", context=context) is None
    [failed] = context.failed
    assert failed.case_id == "c"
    assert "1 to 5" in failed.reason


def test_many_marks_at_once_are_known_afterwards(endpoint, url):
    endpoint.decide = lambda _body: '{"mark": 3}'
    judge = open_judge(settings_for(url), folder=None)
    cases = [make_case(f"case {n}") for n in range(6)]
    marks = judge.rate_all(cases, {case.id: "x" for case in cases})
    assert marks == {case.id: 0.5 for case in cases}
    asked = len(endpoint.requests)
    assert judge.rate(cases[0], "x") == 0.5
    assert len(endpoint.requests) == asked
