"""The first day: an upstream key and nothing else; captures with their cost; what they would save."""

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from graftwork.api.project import open_project
from graftwork.evaluate.chat import find_chat_subject, open_chat
from graftwork.process.http_client import HttpClient
from graftwork.records.interaction import Message

TIMEOUT = 120.0
KEY = "upstream-key-0123456789"
USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 200,
    "total_tokens": 1200,
    "prompt_tokens_details": {"cached_tokens": 400},
}


class Upstream:
    """An OpenAI-compatible API that takes one key. Set `usage` to what its answers state, and `lists` to
    whether the key may list models."""

    def __init__(self):
        self.usage, self.asked, self.lists = dict(USAGE), [], True
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def refuse(self):
                if self.headers.get("authorization") == f"Bearer {KEY}":
                    return False
                self.answer(401, {"error": {"message": f"wrong: {self.headers.get('authorization')}"}})
                return True

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.refuse():
                    return
                if upstream.lists:
                    self.answer(200, {"data": [{"id": "gpt-4o"}]})
                else:
                    self.answer(403, {"error": {"message": "missing scope: models.read"}})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.refuse():
                    return
                upstream.asked.append(body)
                message = {"role": "assistant", "content": f"{body['model']} answers"}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {} if upstream.usage is None else {"usage": upstream.usage}
                self.answer(200, {"choices": [choice], **usage})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def upstream(monkeypatch):
    monkeypatch.setenv("UPSTREAM_KEY", KEY)
    upstream = Upstream()
    thread = threading.Thread(target=upstream.server.serve_forever, daemon=True)
    thread.start()
    yield upstream
    upstream.server.shutdown()
    upstream.server.server_close()
    thread.join()


def serve_models(upstream, **more):
    """Settings of `serve` that pass gpt-4o on to the upstream."""
    large = {"url": upstream.url, "model": "gpt-4o", "api_key_env": "UPSTREAM_KEY"}
    return {
        "port": 0,
        "models": {"gpt-4o": {"to": "large"}},
        "failover": {"endpoints": {"large": large}},
        **more,
    }


def write_project(folder, serve, **sections):
    folder.mkdir(exist_ok=True)
    settings = {"project": "dayone", "data": {"logs": ["logs/*.jsonl"]}, "serve": serve, **sections}
    (folder / "graft.yaml").write_text(json.dumps(settings))
    return folder


class Client:
    def __init__(self, started):
        self.started, self.url = started, started["url"]

    def send(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with HttpClient(proxies=False).send(request, seconds=60) as answer:
            return answer.status, answer.header, json.loads(answer.read())

    def chat(self, **body):
        return self.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **body})


def run_graft(*arguments, check=True):
    """A command, to its end."""
    command = [sys.executable, "-m", "graftwork.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


@contextmanager
def served(folder):
    """`graft serve --json` until the block ends; yields a client, with what was printed at the start."""
    command = [
        sys.executable,
        "-m",
        "graftwork.cli.main",
        "serve",
        "--port",
        "0",
        "--json",
        "-C",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as endpoint:
        try:
            text = ""
            while not text.endswith("\n}\n"):
                line = endpoint.stdout.readline()
                assert line, "the endpoint ended before it was ready"
                text += line
            yield Client(json.loads(text))
        finally:
            endpoint.send_signal(signal.SIGINT)
            endpoint.stdout.read()
            endpoint.wait(TIMEOUT)


def captures_of(folder):
    """The captures, the oldest first."""
    with open_project(folder).open() as work:
        return work.captures.page(limit=100)[::-1]


def test_an_upstream_alone_answers_under_its_clients_names_and_each_capture_has_its_cost(upstream, tmp_path):
    serve = serve_models(upstream)
    serve["models"]["assistant"] = {"to": "large"}
    folder = write_project(tmp_path / "project", serve, base="no-such-base-model")
    with served(folder) as client:
        status, header, answer = client.chat(model="gpt-4o")
        assert (status, header("x-graft-release"), header("x-graft-fallback")) == (200, "large", None)
        assert answer["model"] == "gpt-4o"
        assert answer["choices"][0]["message"]["content"] == "gpt-4o answers"
        assert client.chat()[2]["model"] == "gpt-4o", "the first name is the default"
        assert client.chat(model="assistant")[0] == 200
        assert [body["model"] for body in upstream.asked] == ["gpt-4o"] * 3
        assert client.chat(model="gpt-5")[0] == 404
        assert client.chat(model="base")[0] == 404
        models = [model["id"] for model in client.send("/v1/models")[2]["data"]]
        assert models == ["gpt-4o", "assistant"]
        assert client.send("/health")[2]["status"] == "ok"

        upstream.usage = {**USAGE, "cost": 0.0421}
        client.chat()
        upstream.usage = None
        client.chat()
        upstream.usage = {**USAGE, "cost": -3.0, "prompt_tokens_details": None}
        client.chat()
    captures = captures_of(folder)
    assert [capture.model for capture in captures[:3]] == ["gpt-4o", "gpt-4o", "assistant"]
    # 600 tokens at $2.50, 400 cached ones at $1.25 and 200 at $10 a million.
    priced = (600 * 2.5 + 400 * 1.25 + 200 * 10) / 1e6
    assert captures[0].cost == pytest.approx(priced)
    assert (captures[0].prompt_tokens, captures[0].cached_tokens) == (1000, 400)
    assert captures[3].cost == 0.0421, "the upstream's own figure comes before the table"
    assert captures[4].cost is None, "a cost is not computed from estimated tokens"
    assert captures[5].cost == pytest.approx((1000 * 2.5 + 200 * 10) / 1e6)


def test_a_refused_or_missing_key_is_said_at_the_start_with_the_name_of_its_variable(
    upstream, tmp_path, monkeypatch
):
    folder = write_project(tmp_path / "project", serve_models(upstream))
    monkeypatch.setenv("UPSTREAM_KEY", "another-key-0123456789")
    refused = run_graft("serve", "-C", folder, check=False)
    assert refused.returncode == 3
    assert "refuses the key in UPSTREAM_KEY" in refused.stderr
    assert "another-key" not in refused.stderr + refused.stdout
    monkeypatch.delenv("UPSTREAM_KEY")
    missing = run_graft("serve", "-C", folder, check=False)
    assert missing.returncode == 3
    assert "UPSTREAM_KEY is empty or not set" in missing.stderr


def test_a_key_that_may_answer_and_not_list_models_is_served(upstream, tmp_path):
    upstream.lists = False
    with served(write_project(tmp_path / "project", serve_models(upstream))) as client:
        assert client.chat(model="gpt-4o")[0] == 200


def test_a_model_name_that_goes_to_nobody_is_refused_at_the_start(upstream, tmp_path):
    folder = write_project(tmp_path / "project", serve_models(upstream, models={"gpt-4o": {"to": "lage"}}))
    refused = run_graft("serve", "-C", folder, check=False)
    assert refused.returncode == 2
    assert "there is no 'lage' to answer for gpt-4o" in refused.stderr


def test_the_upstream_is_talked_to_whatever_the_endpoint_listens_with(upstream, tmp_path):
    own = {"tls_certificate": "server.pem", "tls_key": "server.key", "admin_port": 1, "access_log": True}
    folder = write_project(tmp_path / "project", serve_models(upstream, **own))
    question = [Message(role="user", content="hello")]
    with open_project(folder).open() as work, open_chat(work, find_chat_subject(work, "large")) as chat:
        assert chat.ask(question).text == "gpt-4o answers"


def test_from_an_upstream_to_captures_by_two_commands(upstream, tmp_path):
    folder = tmp_path / "front"
    folder.mkdir()
    written = run_graft("init", "--upstream", f"{upstream.url}#gpt-4o,key=UPSTREAM_KEY", "-C", folder)
    assert "UPSTREAM_KEY" in written.stdout
    settings = open_project(folder).settings.serve
    assert (settings.default_model, settings.models["gpt-4o"].to) == ("gpt-4o", "large")
    with served(folder) as client:
        assert client.started["models"] == ["gpt-4o"]
        shown = subprocess.run(
            ["bash", "-c", client.started["curl"]], check=True, capture_output=True, text=True
        )
        assert json.loads(shown.stdout)["choices"][0]["message"]["content"] == "gpt-4o answers"
        header = client.chat(max_tokens=5000)[1]
        feedback = {"capture": header("x-graft-capture"), "score": True}
        assert client.send("/v1/feedback", feedback)[0] == 200
    assert [capture.upstream for capture in captures_of(folder)] == ["gpt-4o"] * 2

    again = run_graft("init", "--upstream", f"{upstream.url}#gpt-4o", "-C", folder, check=False)
    assert again.returncode == 2
    assert "there is a graft.yaml already" in again.stderr
    wrong = run_graft("init", "--upstream", f"{upstream.url}#gpt-4o,key={KEY}", "-C", tmp_path, check=False)
    assert wrong.returncode == 2
    assert KEY not in wrong.stderr + wrong.stdout
