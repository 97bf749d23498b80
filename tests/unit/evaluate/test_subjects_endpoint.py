"""An endpoint asked over real HTTP: busy, broken, slow and torn answers; keys that stay where they are."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gate_samples import new_case

from graftwork.engines.endpoint import EndpointEngine, TryAgain
from graftwork.engines.interface import DecodingSettings
from graftwork.evaluate.ask import runner
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.ask.runner import ask_endpoint
from graftwork.evaluate.ask.worker import GENERATION_FILE, evaluate
from graftwork.evaluate.cases import write_cases
from graftwork.records.errors import EnvironmentFailure, GracefulStop, UserError
from graftwork.records.report import Endpoint, EvalJob, Generation


class Stand:
    """An endpoint with a memory: each question goes through the faults that were planned for it."""

    def __init__(self):
        self.faults: list[str] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.hold = threading.Event()
        self.hold.set()
        self.release_slow = threading.Event()
        stand = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_arguments): ...

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stand.lock:
                    stand.requests.append(body)
                    stand.headers.append(dict(self.headers))
                    stand.at_once += 1
                    stand.most_at_once = max(stand.most_at_once, stand.at_once)
                    fault = stand.faults.pop(0) if stand.faults else ""
                try:
                    stand.hold.wait(120)
                    self.answer(body, fault)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with stand.lock:
                        stand.at_once -= 1
                    self.close_connection = True

            def answer(self, body, fault):
                if fault.startswith("status "):
                    _, code, words = fault.split(" ", 2)
                    return self.refuse(int(code), words)
                if fault == "redirect":
                    return self.refuse(307, "there", Location="http://127.0.0.1:9/elsewhere")
                if fault == "drop":
                    return self.connection.close()
                words = f"answer to {body['messages'][-1]['content']}".split(" ")
                if fault == "plain":
                    whole = {"message": {"content": " ".join(words)}, "finish_reason": "stop"}
                    return self.reply(json.dumps({"choices": [whole]}).encode(), "application/json")
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for place, word in enumerate(words):
                    self.event({"choices": [{"delta": {"content": word if place == 0 else f" {word}"}}]})
                    if fault == "cut" and place == 1:
                        return None
                    if fault == "slow" and place == 1:
                        stand.release_slow.wait(120)
                if fault == "error":
                    return self.event({"error": {"message": "the card is gone"}})
                reason = "length" if fault == "length" else "stop"
                self.event({"choices": [{"delta": {}, "finish_reason": reason}]})
                self.event({"choices": [], "usage": {"completion_tokens": 11, "prompt_tokens": 5}})
                self.wfile.write(b"data: [DONE]\n\n")
                return None

            def event(self, value):
                self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
                self.wfile.flush()

            def reply(self, body, kind, code=200, **headers):
                self.send_response(code)
                for name, value in {
                    "Content-Type": kind,
                    "Content-Length": str(len(body)),
                    **headers,
                }.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body)

            def refuse(self, code, words, **headers):
                extra = {"Retry_After": "0.01"} if code == 429 else {}
                self.reply(words.encode(), "text/plain", code, **extra, **headers)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def stand(monkeypatch):
    monkeypatch.setattr(runner, "FIRST_WAIT", 0.001)
    found = Stand()
    yield found
    found.hold.set()
    found.release_slow.set()
    found.server.shutdown()


class Silent:
    def __init__(self):
        self.beats = []

    def beat(self, phase, done, total, **_detail):
        self.beats.append((phase, done, total))


def make_cases(n):
    return [new_case(f"c{i}", f"question {i}", "r") for i in range(n)]


def make_job(folder, stand, **changes):
    fields = {"attempts": 3, "timeout_seconds": 10.0, "concurrency": 4, **changes}
    keep = {name: fields.pop(name) for name in ("temperature", "repeats", "latency_cases") if name in fields}
    job = EvalJob(
        subject="there",
        folder=str(folder / "job"),
        base_folder=str(folder),
        adapter_folder=None,
        cases_file=str(folder / "cases.jsonl"),
        max_new_tokens=16,
        batch_size=4,
        identity="address",
        answers_folder=str(folder / "answers"),
        endpoint=Endpoint(url=stand.url, model="m", **fields),
        **{"latency_cases": 2, **keep},
    )
    write_cases(Path(job.cases_file), cases=make_cases(1))
    return job


def ask(job, cases, stop=None):
    return ask_endpoint(job, cases, progress=Silent(), stop_asked=stop or threading.Event())


def client(stand, **fields):
    return EndpointEngine(Endpoint(url=stand.url, model="m", **fields))


def texts(job):
    return {a.case_id: a.text for a in read_answers(Path(job.folder))}


def test_an_answer_is_streamed_and_timed_to_its_first_token(stand):
    reply = client(stand).ask_once(make_cases(1)[0].messages, DecodingSettings(16))
    assert reply.text == "answer to question 0"
    assert (reply.tokens, reply.prompt_tokens, reply.finish_reason) == (11, 5, "stop")
    assert 0 < reply.first_token_seconds <= reply.seconds
    assert stand.requests[0]["temperature"] == 0.0
    assert stand.requests[0]["max_tokens"] == 16


def test_an_endpoint_that_does_not_stream_is_understood(stand):
    stand.faults = ["plain"]
    assert (
        client(stand).ask_once(make_cases(1)[0].messages, DecodingSettings(16)).text == "answer to question 0"
    )


@pytest.mark.parametrize(
    "fault", ["status 429 busy", "status 500 oh", "status 503 later", "cut", "error", "drop"]
)
def test_a_temporary_failure_is_retried(stand, tmp_path, fault):
    stand.faults = [fault, fault]
    job = make_job(tmp_path, stand)
    asked = ask(job, make_cases(1))
    assert texts(job) == {"c0": "answer to question 0"}
    assert len(stand.requests) == 3
    assert asked.settings["asked_again"] == 2


def test_an_endpoint_that_dribbles_for_ever_is_given_up(stand):
    stand.faults = ["slow"]
    with pytest.raises(TryAgain):
        client(stand, timeout_seconds=0.3).ask_once(make_cases(1)[0].messages, DecodingSettings(16))


def test_an_endpoint_that_stays_broken_ends_the_job_and_what_was_answered_stays(stand, tmp_path):
    job, cases = make_job(tmp_path, stand, concurrency=1), make_cases(5)
    stand.faults = ["", "", "", *["status 500 broken"] * 3]
    with pytest.raises(EnvironmentFailure, match=r"case c3 in 3 attempt.*500 broken"):
        ask(job, cases)
    assert len(texts(job)) == 3
    before = len(stand.requests)
    ask(job, cases)
    assert len(texts(job)) == 5
    assert len(stand.requests) == before + 2


@pytest.mark.parametrize("code", [400, 404])
def test_a_permanent_failure_is_not_retried(stand, tmp_path, code):
    stand.faults = [f"status {code} no such model"]
    with pytest.raises(UserError, match="no such model"):
        ask(make_job(tmp_path, stand), make_cases(1))
    assert len(stand.requests) == 1


def test_an_endpoint_with_other_words_is_asked_in_them(stand, tmp_path):
    stand.faults = [
        "status 400 max_tokens is not known, use max_completion_tokens",
        "status 400 seed: unknown",
    ]
    asked = ask(make_job(tmp_path, stand), make_cases(1))
    last = stand.requests[-1]
    assert "max_tokens" not in last
    assert "seed" not in last
    assert last["max_completion_tokens"] == 16
    assert asked.settings["left_out"] == ["seed"]


def test_the_first_cases_are_asked_alone_the_rest_some_at_a_time(stand, tmp_path):
    job = make_job(tmp_path, stand, concurrency=3, latency_cases=2)
    asked = ask(job, make_cases(12))
    assert [r["messages"][-1]["content"] for r in stand.requests[:2]] == ["question 0", "question 1"]
    assert stand.most_at_once <= 3
    assert len(asked.single_latency_seconds) == len(asked.first_token_seconds) == 2
    assert len(texts(job)) == 12


def test_never_more_at_a_time_than_allowed_even_when_nothing_is_answered(stand, tmp_path):
    stand.hold.clear()
    job = make_job(tmp_path, stand, concurrency=3, latency_cases=0)
    worker = threading.Thread(target=ask, args=(job, make_cases(9)))
    worker.start()
    while stand.at_once < 3:
        threading.Event().wait(0.01)
    threading.Event().wait(0.2)
    assert stand.most_at_once == 3
    stand.hold.set()
    worker.join(120)
    assert stand.most_at_once == 3
    assert len(texts(job)) == 9


def test_a_stop_keeps_what_is_on_its_way(stand, tmp_path):
    stop = threading.Event()
    stop.set()
    job = make_job(tmp_path, stand, latency_cases=0, concurrency=2)
    with pytest.raises(GracefulStop):
        ask(job, make_cases(8), stop)
    assert 0 < len(texts(job)) < 8


def test_repeats_have_seeds_of_their_own(stand, tmp_path):
    job = make_job(tmp_path, stand, temperature=0.7, repeats=3)
    ask(job, make_cases(2))
    assert len(read_answers(Path(job.folder))) == 6
    assert sorted(r["seed"] for r in stand.requests) == [0, 0, 1, 1, 2, 2]


def test_the_key_goes_into_the_header_and_nowhere_else(stand, tmp_path, monkeypatch):
    monkeypatch.setenv("ACME_KEY", "sk-very-secret")
    job = make_job(tmp_path, stand, api_key_env="ACME_KEY")
    evaluate(job)
    assert stand.headers[0]["Authorization"] == "Bearer sk-very-secret"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sk-very-secret" not in path.read_bytes(), path
    stand.faults = ["status 401 the key sk-very-secret is not valid"]
    with pytest.raises(EnvironmentFailure) as refused:
        client(stand, api_key_env="ACME_KEY").ask_once(make_cases(1)[0].messages, DecodingSettings(16))
    assert "sk-very-secret" not in json.dumps(refused.value.as_json())


def test_a_redirect_does_not_carry_the_key_away(stand, monkeypatch):
    monkeypatch.setenv("ACME_KEY", "sk-very-secret")
    stand.faults = ["redirect"]
    with pytest.raises(UserError, match="307"):
        client(stand, api_key_env="ACME_KEY").ask_once(make_cases(1)[0].messages, DecodingSettings(16))


def test_a_missing_key_is_reported_before_anything_is_sent(stand, monkeypatch):
    monkeypatch.delenv("ACME_KEY", raising=False)
    with pytest.raises(EnvironmentFailure, match="ACME_KEY"):
        client(stand, api_key_env="ACME_KEY").ask_once(make_cases(1)[0].messages, DecodingSettings(16))
    assert stand.requests == []


def test_the_worker_asks_an_endpoint_and_says_how(stand, tmp_path):
    job = make_job(tmp_path, stand, latency_cases=1)
    evaluate(job)
    made = Generation.from_json((Path(job.folder) / GENERATION_FILE).read_bytes())
    assert (made.answers, made.peak_memory_gib, made.settings["engine"]) == (1, 0.0, "endpoint")
    assert len(made.first_token_seconds) == 1
    asked = len(stand.requests)
    evaluate(job.model_copy(update={"folder": str(tmp_path / "later")}))
    assert len(stand.requests) == asked
