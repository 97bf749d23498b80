"""The back-pressure of `graft worker`: the work never waits for its client."""

import json
import os
import threading

import pytest

from graftwork.api import stdio as outbox
from graftwork.api.stdio import (
    CheckpointMessage,
    DoneMessage,
    LogMessage,
    MessageOutbox,
    ProgressMessage,
)


class Pipe:
    """A client that reads when the test says so."""

    def __init__(self, window):
        read, write = os.pipe()
        self.read, self.write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.outbox = MessageOutbox(self.write, "lines", window=window)

    def take(self, count):
        return [json.loads(self.read.readline()) for _ in range(count)]

    def close(self):
        self.outbox.close()
        self.write.close()
        return [json.loads(line) for line in self.read]


@pytest.fixture(autouse=True)
def no_wait_for_the_last_ack(monkeypatch):
    monkeypatch.setattr(outbox, "LAST_ACK_SECONDS", 0.0)


@pytest.fixture
def pipe(request):
    made = Pipe(getattr(request, "param", 0))
    yield made
    made.read.close()
    made.outbox.close()


def progress(done):
    return ProgressMessage(phase="training", done=done, total=1000)


@pytest.mark.parametrize("pipe", [4], indirect=True)
def test_a_slow_client_gets_the_newest_progress_and_every_checkpoint(pipe):
    for step in range(500):
        pipe.outbox.send(progress(step))
        pipe.outbox.send(LogMessage(text=f"step {step}"))
        if step % 100 == 0:
            pipe.outbox.send(CheckpointMessage(run="r", step=step))
    pipe.outbox.send(DoneMessage(exit_code=0, result={}))
    found = pipe.close()
    kinds = [message["type"] for message in found]
    assert [m["step"] for m in found if m["type"] == "checkpoint"] == [0, 100, 200, 300, 400]
    assert kinds[-1] == "done"
    assert kinds.count("log") <= 8
    assert [message["seq"] for message in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize("pipe", [2], indirect=True)
def test_an_ack_opens_the_window_again_and_reports_what_was_dropped(pipe):
    for number in range(10):
        pipe.outbox.send(LogMessage(text=str(number)))
    first = pipe.take(2)
    assert [message["text"] for message in first] == ["0", "1"]
    pipe.outbox.acknowledge(2)
    pipe.outbox.send(LogMessage(text="later"))
    (later,) = pipe.take(1)
    assert (later["text"], later["dropped"]) == ("later", 8)


@pytest.mark.parametrize("message", [LogMessage(text="fills the window"), progress(1)])
def test_a_message_that_is_about_to_be_written_counts_for_the_window(message, monkeypatch):
    taken, go_on = threading.Event(), threading.Event()
    take_next = MessageOutbox._next

    def pause(self):
        found = take_next(self)
        taken.set()
        assert go_on.wait(300)
        return found

    monkeypatch.setattr(MessageOutbox, "_next", pause)
    pipe = Pipe(window=1)
    pipe.outbox.send(message)
    assert taken.wait(300)
    pipe.outbox.send(LogMessage(text="too much"))
    go_on.set()
    assert pipe.take(1)[0]["seq"] == 1
    pipe.outbox.acknowledge(1)
    pipe.outbox.send(LogMessage(text="later"))
    assert pipe.take(1)[0]["dropped"] == 1
    assert pipe.close() == []


@pytest.mark.parametrize("pipe", [1], indirect=True)
def test_progress_waits_for_an_ack_and_is_then_the_newest(pipe):
    pipe.outbox.send(LogMessage(text="fills the window"))
    assert pipe.take(1)[0]["text"] == "fills the window"
    for done in range(50):
        pipe.outbox.send(progress(done))
    pipe.outbox.acknowledge(1)
    assert pipe.take(1)[0]["done"] == 49


def test_a_client_that_does_not_read_does_not_block_the_work(pipe):
    """The pipe is full after 64 KiB; sending goes on."""
    finished = threading.Event()

    def work():
        for number in range(3000):
            pipe.outbox.send(LogMessage(text="x" * 100 + str(number)))
        finished.set()

    threading.Thread(target=work, daemon=True).start()
    assert finished.wait(300)
    # Read it, so that the writing thread ends.
    assert len(pipe.take(3000)) == 3000


def test_a_client_that_is_gone_is_no_error(pipe):
    pipe.read.close()
    for number in range(10):
        pipe.outbox.send(LogMessage(text=str(number)))
    pipe.outbox.close()


@pytest.mark.parametrize("pipe", [4], indirect=True)
@pytest.mark.parametrize("end", ["ack", "left"])
def test_a_worker_leaves_when_its_last_message_was_taken_or_its_client_left(pipe, end, monkeypatch):
    monkeypatch.setattr(outbox, "LAST_ACK_SECONDS", 600.0)
    pipe.outbox.send(DoneMessage(exit_code=0, result={}))
    closing = threading.Thread(target=pipe.outbox.close)
    closing.start()
    (last,) = pipe.take(1)
    assert closing.is_alive()
    if end == "ack":
        pipe.outbox.acknowledge(last["seq"])
    else:
        pipe.outbox.end_acks()
    closing.join()


@pytest.mark.parametrize("pipe", [0, 4], indirect=True)
def test_a_client_without_acks_is_not_waited_for_long(pipe, monkeypatch):
    monkeypatch.setattr(outbox, "LAST_ACK_SECONDS", 600.0 if pipe.outbox.window == 0 else 0.0)
    pipe.outbox.send(DoneMessage(exit_code=0, result={}))
    assert [message["type"] for message in pipe.close()] == ["done"]
