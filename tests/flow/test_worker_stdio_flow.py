"""`graft worker --stdio`: a run that another program drives, over lines and over {packet, 4}."""

import json
import signal
import subprocess
from pathlib import Path

import jsonschema_rs
import pytest
from flows import GRAFT, ONE_THREAD

from graftwork.api.stdio import protocol_schema
from graftwork.process.stdio import encode, read_messages

SCHEMA = jsonschema_rs.validator_for(protocol_schema())


class Client:
    """Another program: it writes requests and reads messages."""

    def __init__(self, framing="lines"):
        self.framing = framing
        more = ["--packet", "4"] if framing == "packet4" else []
        self.process = subprocess.Popen(
            [*GRAFT, "worker", "--stdio", *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ONE_THREAD,
        )
        self.messages = read_messages(self.process.stdout, framing)
        self.seen = []

    def send(self, **message):
        self.process.stdin.write(encode(json.dumps(message).encode(), self.framing))
        self.process.stdin.flush()

    def start(self, folder, **more):
        self.send(type="start", v=1, project=str(folder), heartbeat_seconds=0.2, **more)

    def until(self, *kinds):
        """The first message of one of these kinds."""
        for text in self.messages:
            message = json.loads(text)
            SCHEMA.validate(message)
            self.seen.append(message)
            if message["type"] in kinds:
                return message
        raise AssertionError(f"the worker ended: {self.seen[-3:]}")

    def end(self):
        """Close the port; the exit code."""
        self.process.stdin.close()
        for text in self.messages:
            self.seen.append(json.loads(text))
        return self.process.wait()

    def kinds(self):
        return {message["type"] for message in self.seen}


@pytest.fixture
def client():
    made = []

    def make(framing="lines"):
        made.append(Client(framing))
        return made[-1]

    yield make
    for started in made:
        started.process.kill()
        started.process.wait()
        started.process.stdout.close()


def test_a_run_is_closed_killed_and_canceled_in_the_middle_and_the_next_start_ends_it(
    released_project, change_settings, client
):
    change_settings(released_project, train={"epochs": 6})
    closed = client("packet4")
    closed.start(released_project)
    reached = closed.until("checkpoint")["step"]
    assert closed.end() == 75
    assert closed.seen[-1]["type"] == "stopped"
    assert closed.seen[-1]["reason"] == "the port was closed"
    assert {"hello", "started", "step", "progress", "heartbeat"} <= closed.kinds()

    killed = client()
    killed.start(released_project)
    assert killed.until("checkpoint")["step"] > reached
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    # Its training process notices, writes a checkpoint and ends; the next worker waits for it.
    canceled = client()
    canceled.start(released_project)
    reached = canceled.until("checkpoint")["step"]
    canceled.send(type="cancel", reason="the card is needed")
    assert canceled.until("stopped")["reason"] == "the card is needed"
    assert canceled.process.wait() == 75

    last = client()
    last.start(released_project)
    done = last.until("done")
    assert (done["exit_code"], last.end()) == (0, 0)
    assert done["result"]["steps"] > reached
    assert Path(done["result"]["adapter_folder"]).is_dir()
    states = {m["step"]: m["state"] for m in last.seen if m["type"] == "step"}
    assert (states["prepare"], states["plan"], states["train"]) == ("unchanged", "unchanged", "finished")
    steps = [m["step"] for m in last.seen if m["type"] == "checkpoint"]
    assert steps == sorted(set(steps))
    assert min(steps) > reached


def test_a_mistake_ends_with_its_exit_code(tmp_path, client):
    missing = client()
    missing.start(tmp_path)
    error = missing.until("error")
    assert (error["exit_code"], error["error"]) == (2, "UserError")
    assert "graft.yaml" in error["what"]
    assert missing.end() == 2


@pytest.mark.parametrize(
    "text",
    ["no JSON", '{"type": "start", "v": 2, "project": "."}', '{"type": "begin"}', "[]", '{"type": "start"}'],
)
def test_a_message_that_cannot_be_read_is_refused(client, text):
    broken = client()
    broken.process.stdin.write(text.encode() + b"\n")
    broken.process.stdin.flush()
    error = broken.until("error")
    assert error["what"] == "the message cannot be read"
    assert "graft worker --schema" in error["fix"]
    assert broken.end() == 2


def test_a_client_that_closes_at_once_leaves_nothing(client):
    assert client().end() == 0


def test_a_ping_is_answered_before_the_start(client):
    waiting = client()
    waiting.send(type="ping")
    assert waiting.until("heartbeat")["busy"] is False
