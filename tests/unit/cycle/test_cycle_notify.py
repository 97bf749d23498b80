"""Notices reach a command and a webhook; secrets stay where they are."""

import http.server
import json
import threading

from graftwork.cycle.runner import send_notice
from graftwork.cycle.settings import NotifySettings
from graftwork.cycle.state import Notice

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
