"""Notices reach a command, a webhook and a mail server; secrets stay where they are."""

import http.server
import json
import socket
import threading

import pytest

from free_ports import free_port
from graftwork.cycle.settings import EmailSettings, NotifySettings
from graftwork.cycle.state import Notice
from graftwork.pipeline.cycle.notify import MailServer, send_mail, send_notice

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


class MailBox:
    """A mail server for one message."""

    def __init__(self, refuse=""):
        self.lines, self._refuse = [], refuse
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        connection, _ = self._socket.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream:
            stream.write(b"220 here\r\n")
            data = False
            for line in stream:
                text = line.decode().rstrip("\r\n")
                self.lines.append(text)
                if data:
                    data = text != "."
                    if not data:
                        stream.write(b"250 taken\r\n")
                elif self._refuse and text.startswith(self._refuse):
                    stream.write(b"550 no\r\n")
                elif text.upper() == "DATA":
                    data = True
                    stream.write(b"354 go on\r\n")
                else:
                    stream.write(b"221 bye\r\n" if text.upper() == "QUIT" else b"250 yes\r\n")

    def close(self):
        self._thread.join(60)
        self._socket.close()


@pytest.fixture
def mailbox():
    made = MailBox()
    yield made
    made.close()


def email(port, **more):
    return EmailSettings(
        host="127.0.0.1",
        port=port,
        security="none",
        sender="graft@example.org",
        to=["ada@example.org"],
        **more,
    )


def test_a_notice_is_sent_by_mail(mailbox):
    assert send_notice(NOTICE, NotifySettings(email=email(mailbox.port))) == ""
    assert "Subject: [graft helpdesk] the gate said deploy" in mailbox.lines
    assert "rcpt TO:<ada@example.org>" in mailbox.lines
    assert "The rule holds." in mailbox.lines
    assert any(line == "Message-ID: <helpdesk.3-gate.1800000000@graftwork>" for line in mailbox.lines)


def test_a_subject_cannot_add_headers(mailbox):
    forged = NOTICE.model_copy(update={"what": "done\r\nBcc: eve@example.org"})
    assert send_notice(forged, NotifySettings(email=email(mailbox.port))) == ""
    headers = mailbox.lines[: mailbox.lines.index("")]
    assert not any(line.startswith("Bcc:") for line in headers)


def test_a_refused_mail_says_why():
    mailbox = MailBox(refuse="rcpt")
    failure = send_notice(NOTICE, NotifySettings(email=email(mailbox.port)))
    assert "the mail server 127.0.0.1 failed" in failure
    mailbox.close()


def test_a_login_is_never_sent_without_encryption(mailbox):
    server = MailServer("127.0.0.1", mailbox.port, "none", user="graft", password="Xk29fjDk20")
    failure = send_mail(server, sender="a@example.org", to=("b@example.org",), subject="x", text="y")
    assert failure == "a login is not sent without encryption"
    mailbox.close()
    assert not any("Xk29" in line or "AUTH" in line for line in mailbox.lines)


def test_a_server_that_is_not_there_is_no_crash():
    assert "failed" in send_notice(NOTICE, NotifySettings(email=email(free_port())))


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
