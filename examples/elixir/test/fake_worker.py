"""Speaks the protocol without training: `fake_worker.py BEHAVIOUR worker --stdio [--packet 4]`."""

import contextlib
import itertools
import json
import os
import pathlib
import struct
import sys
import threading
import time

behaviour, packed = sys.argv[1], "--packet" in sys.argv
numbers = itertools.count(1)


def send(**message: object) -> None:
    text = json.dumps({"seq": next(numbers), "at": time.time(), **message}).encode()
    sys.stdout.buffer.write(struct.pack(">I", len(text)) + text if packed else text + b"\n")
    sys.stdout.buffer.flush()


def finish(code: int, **message: object) -> None:
    """Leave when the client has taken the last message, or is gone; at once if hasty."""
    with contextlib.suppress(BrokenPipeError):
        send(exit_code=code, **message)
        last = next(numbers) - 1
        hasty = behaviour.startswith("hasty")
        while not hasty and (reply := receive()) is not None and reply.get("seq", 0) < last:
            pass
    # Not by the interpreter's shutdown, which would wait for the thread that reads.
    os._exit(code)


def receive() -> dict | None:
    if not packed:
        line = sys.stdin.buffer.readline()
        return json.loads(line) if line else None
    head = sys.stdin.buffer.read(4)
    return json.loads(sys.stdin.buffer.read(struct.unpack(">I", head)[0])) if len(head) == 4 else None


send(type="hello", v=2 if behaviour == "version" else 1, graftwork="0", pid=os.getpid())
start = receive()
note = pathlib.Path(start["project"])
tries = len(list(note.glob("try-*")))
(note / f"try-{tries}").write_text(str(os.getpid()))
send(type="started", command=start["command"], project=start["project"])
if behaviour == "silent":
    time.sleep(60)
if behaviour.endswith("mistake"):
    finish(2, type="error", error="UserError", what="the data is wrong")
if behaviour == "crash_once" and tries == 0:
    send(type="checkpoint", run="r", step=4)
    os.kill(os.getpid(), 9)
if behaviour == "crash":
    os.kill(os.getpid(), 9)
if behaviour == "wait":
    stopped = threading.Event()

    def listen() -> None:
        while (message := receive()) is not None and message["type"] != "cancel":
            pass
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    while not stopped.wait(0.05):
        with contextlib.suppress(BrokenPipeError):
            send(type="heartbeat", busy=True)
    (note / "stopped").write_text("")
    finish(75, type="stopped", reason="canceled")
send(
    type="progress", phase="training", done=1.5, total=2e1, seconds_left=None, detail={"text": 'Füße "☂" \n'}
)
send(type="checkpoint", run="r", step=8)
finish(0, type="done", result={"steps": 8, "adapter_hash": "abc"})
