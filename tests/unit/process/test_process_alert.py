"""Alerts reach a real command and a real server; what does not is said without secrets."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from graftwork.files.disk import Journal
from graftwork.process.alert import Alarm, post, run_command
from graftwork.records.errors import UserError
from graftwork.records.fleet import Alert


class Server(ThreadingHTTPServer):
    """Answers with the statuses it was given, then with 200; keeps what it got."""

    daemon_threads = True

    def __init__(self, *statuses):
        self.statuses, self.got = list(statuses), []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/hook/secret-token"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.headers["Content-Type"], json.loads(body)))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.elsewhere)
        self.end_headers()

    def do_GET(self):
        self.do_POST()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(*statuses):
        servers.append(Server(*statuses))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def command_that_keeps(tmp_path):
    code = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read() + b'\\n')"
    return f'"{sys.executable}" -c "{code}" "{tmp_path}/kept by the command; $(no shell)"'


def test_an_alert_reaches_the_log_the_command_and_the_webhook(tmp_path, serve):
    server, words = serve(), []
    with Alarm(
        tmp_path,
        run="r1",
        project="p",
        command=command_that_keeps(tmp_path),
        webhook=server.address,
        on_info=words.append,
    ) as alarm:
        first = alarm.send("stalled", "it stands still", why="the device is idle")
        second = alarm.send("recovered", "it goes on")
    assert [Alert.model_validate(line) for line in Journal(tmp_path / "alerts.jsonl").read()] == [
        first,
        second,
    ]
    kept = (tmp_path / "kept by the command; $(no shell)").read_text().splitlines()
    assert [Alert.from_json(line) for line in kept] == [first, second]
    assert [(kind, body["kind"]) for kind, body in server.got] == [
        ("application/json", "stalled"),
        ("application/json", "recovered"),
    ]
    assert words == ["it stands still: the device is idle", "it goes on"]


def test_a_server_in_trouble_is_tried_again_and_one_that_refuses_is_not(serve):
    busy = serve(503, 500)
    assert post(busy.address, b"{}", pauses=(0.0, 0.0)) == ""
    assert len(busy.got) == 3
    refusing = serve(403, 403)
    assert "403" in post(refusing.address, b"{}", pauses=(0.0, 0.0))
    assert len(refusing.got) == 1


def test_a_redirect_is_not_followed(serve):
    other, server = serve(), serve(302)
    server.elsewhere = other.address
    assert "302" in post(server.address, b"{}", pauses=())
    assert other.got == []


def test_an_undelivered_alert_is_reported_without_the_secret_in_its_address(tmp_path, serve):
    server, words = serve(500, 500), []
    with Alarm(
        tmp_path,
        run="r",
        command="/no/such/program --token=hush",
        webhook=server.address,
        on_info=words.append,
        pauses=(0.0,),
    ) as alarm:
        alarm.send("failed", "it failed")
    assert any("could not be started" in word for word in words)
    assert any("127.0.0.1 answered with status 500" in word for word in words)
    assert not any("secret-token" in word or "hush" in word for word in words)


def test_a_command_that_does_not_end_is_ended():
    hanging = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert "was ended" in run_command(hanging, b"{}", seconds=0.2)


def test_a_command_that_fails_is_reported():
    assert "exit code 3" in run_command([sys.executable, "-c", "raise SystemExit(3)"], b"{}")
    words = [sys.executable, "-c", "import sys; print('sent'); sys.exit('no route to the pager')"]
    assert run_command(words, b"{}") == "ended with exit code 1: no route to the pager"
    words = [sys.executable, "-c", "import sys; sys.exit(f'cannot use {sys.argv[1]}')", "--token=hunter2"]
    assert run_command(words, b"{}") == "ended with exit code 1: cannot use …"


@pytest.mark.parametrize("wrong", ["ftp://host/x", "host/x", "file:///etc/passwd", "http://"])
def test_only_web_addresses_are_taken(tmp_path, wrong):
    with pytest.raises(UserError, match="http"):
        Alarm(tmp_path, run="r", webhook=wrong)


@pytest.mark.parametrize("wrong", ["echo 'open", "   "])
def test_a_command_that_cannot_be_read_is_a_mistake_with_a_fix(tmp_path, wrong):
    with pytest.raises(UserError) as caught:
        Alarm(tmp_path, run="r", command=wrong)
    assert "shell" in caught.value.fix
