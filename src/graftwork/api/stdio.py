"""`graft worker --stdio`: one run that another program drives over standard input and output.

Input: two streams. Output: an exit code of the design; messages on a stream, written by a thread that never
waits for the client. While more messages than the window are without an ack, progress is combined to the
newest and logs are counted instead of sent; all other messages are kept in order. The end of the input is a
request to stop: a client that dies leaves a checkpoint, and its next start resumes from there.

The messages are version 1 of a protocol, records with a JSON Schema.
"""

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field, TypeAdapter, ValidationError

from graftwork.pipeline.steps.plan import run_id_of
from graftwork.pipeline.table import run_pipeline
from graftwork.process.stdio import Framing, FramingError, encode, read_messages
from graftwork.process.worker import stoppable
from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject, name_entry, use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.base import Record
from graftwork.records.errors import (
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_RESUME,
    Busy,
    GracefulStop,
    GraftError,
    Interrupted,
    UserError,
)
from graftwork.records.plan import Plan
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.train.runs import Events
from graftwork.version import __version__

PROTOCOL_VERSION = 1
WorkerCommand = Literal["train", "run", "cycle"]


class StartRequest(Record):
    """Begin the work. The first message of a client; one for each process."""

    type: Literal["start"] = "start"
    v: Literal[1] = Field(description="The version of the protocol.")
    project: str = Field(min_length=1, description="The folder with graft.yaml.")
    command: WorkerCommand = Field(
        "train", description="What to do, as `graft train`, `graft run`, `graft up --once`."
    )
    model: str | None = Field(None, description="A model of the project; null: the main one.")
    window: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Messages that may be sent before an ack; beyond it progress is combined and logs are "
        "counted. 0: no acks.",
    )
    heartbeat_seconds: float = Field(5.0, gt=0, description="A heartbeat comes this often.")


class AckRequest(Record):
    """The client has taken everything up to this number."""

    type: Literal["ack"] = "ack"
    seq: int = Field(ge=0)


class CancelRequest(Record):
    """Stop at the next safe point. Closing the port does the same."""

    type: Literal["cancel"] = "cancel"
    reason: str = ""


class PingRequest(Record):
    """Answered by a heartbeat immediately."""

    type: Literal["ping"] = "ping"


class WorkerMessage(Record):
    """Fields of every message from the worker."""

    seq: int = Field(0, description="Counts the messages of this process.")
    at: float = Field(0.0, description="Seconds since 1970.")


class HelloMessage(WorkerMessage):
    """The first message of the worker."""

    type: Literal["hello"] = "hello"
    v: int = PROTOCOL_VERSION
    graftwork: str
    pid: int


class StartedMessage(WorkerMessage):
    type: Literal["started"] = "started"
    command: WorkerCommand
    project: str


class StepMessage(WorkerMessage):
    """A step of the pipeline began, was up to date, or is done."""

    type: Literal["step"] = "step"
    step: str
    state: Literal["started", "unchanged", "finished"]
    seconds: float | None = None


class ProgressMessage(WorkerMessage):
    """Progress of the work. Combined if the client is slow: only the newest counts."""

    type: Literal["progress"] = "progress"
    phase: str
    done: float
    total: float
    seconds_left: float | None = None
    detail: dict[str, float | str] = {}


class CheckpointMessage(WorkerMessage):
    """A checkpoint of the run is safe on disk."""

    type: Literal["checkpoint"] = "checkpoint"
    run: str
    step: int


class LogMessage(WorkerMessage):
    type: Literal["log"] = "log"
    level: Literal["info", "warning", "error"] = "info"
    text: str
    dropped: int = Field(0, description="Log messages that were left out before this one.")


class HeartbeatMessage(WorkerMessage):
    """The worker is alive. `busy` is true between start and end."""

    type: Literal["heartbeat"] = "heartbeat"
    busy: bool


class ErrorMessage(WorkerMessage):
    """The work failed; the process ends with this exit code. 1, 2, 3: a restart does not help."""

    type: Literal["error"] = "error"
    exit_code: int
    error: str
    what: str
    why: str = ""
    fix: str = ""
    where: str = ""


class StoppedMessage(WorkerMessage):
    """Stopped at a checkpoint, exit code 75: the same start resumes from there."""

    type: Literal["stopped"] = "stopped"
    exit_code: int
    reason: str


class DoneMessage(WorkerMessage):
    """The work is done; the process ends with this exit code (0, or that of the gate)."""

    type: Literal["done"] = "done"
    exit_code: int
    result: dict[str, Any]


Request = Annotated[StartRequest | AckRequest | CancelRequest | PingRequest, Field(discriminator="type")]
Reply = Annotated[
    HelloMessage
    | StartedMessage
    | StepMessage
    | ProgressMessage
    | CheckpointMessage
    | LogMessage
    | HeartbeatMessage
    | ErrorMessage
    | StoppedMessage
    | DoneMessage,
    Field(discriminator="type"),
]
REQUESTS: TypeAdapter[StartRequest | AckRequest | CancelRequest | PingRequest] = TypeAdapter(Request)


def protocol_schema() -> dict[str, Any]:
    """The JSON Schema of both directions."""
    to_worker = REQUESTS.json_schema(ref_template="#/$defs/{model}")
    from_worker = TypeAdapter(Reply).json_schema(ref_template="#/$defs/{model}")
    defs = {**to_worker.pop("$defs"), **from_worker.pop("$defs")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"graft worker --stdio, version {PROTOCOL_VERSION}",
        "oneOf": [{"$ref": "#/$defs/ToWorker"}, {"$ref": "#/$defs/FromWorker"}],
        "$defs": {"ToWorker": to_worker, "FromWorker": from_worker, **defs},
    }


CLOSING_SECONDS = 30.0
LAST_ACK_SECONDS = 5.0
"""How long a worker waits for the ack of its last message. A client whose acks meet a closed pipe may lose
what it has not read yet, so a worker with a window exits after its client has received everything.
"""


class MessageOutbox:
    def __init__(self, stream: BinaryIO, framing: Framing, *, window: int = 0) -> None:
        self.window = window
        self._stream, self._framing = stream, framing
        self._changed = threading.Condition()
        self._kept: deque[WorkerMessage] = deque()
        self._progress: ProgressMessage | None = None
        self._dropped = 0
        self._seq = self._acked = 0
        self._closing = self._broken = self._client_left = False
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="messages")
        self._thread.start()

    def send(self, message: WorkerMessage) -> None:
        """Queue it. Never blocks; nothing is sent once the client is gone."""
        with self._changed:
            if isinstance(message, ProgressMessage):
                self._progress = message
            elif isinstance(message, LogMessage) and self._is_full():
                self._dropped += 1
            else:
                if isinstance(message, LogMessage) and self._dropped:
                    message = message.model_copy(update={"dropped": self._dropped})
                    self._dropped = 0
                self._kept.append(message)
            self._changed.notify_all()

    def acknowledge(self, seq: int) -> None:
        with self._changed:
            self._acked = max(self._acked, min(seq, self._seq))
            self._changed.notify_all()

    def end_acks(self) -> None:
        """The client has closed its side: no more acks will come."""
        with self._changed:
            self._client_left = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, unless the client has stopped reading, and wait a moment for the last ack."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSING_SECONDS)
        with self._changed:
            self._changed.wait_for(self._is_taken, LAST_ACK_SECONDS)

    def _is_taken(self) -> bool:
        return self.window == 0 or self._client_left or self._broken or self._acked >= self._seq

    def _is_full(self) -> bool:
        waiting = self._seq - self._acked + len(self._kept)
        return self.window > 0 and waiting >= self.window

    def _write_all(self) -> None:
        while (message := self._next()) is not None:
            try:
                body = json.dumps({"type": None, **message.model_dump(mode="json")}, ensure_ascii=False)
                self._stream.write(encode(body.encode("utf-8", "replace"), self._framing))
                self._stream.flush()
            except (OSError, ValueError):
                # The client is gone: the end of standard input says the same to the work.
                with self._changed:
                    self._broken = True
                return

    def _next(self) -> WorkerMessage | None:
        """Return the next message with its number; from here on it waits for an ack."""
        with self._changed:
            while True:
                if self._kept:
                    return self._number(self._kept.popleft())
                if self._progress is not None and not self._is_full() and not self._closing:
                    newest, self._progress = self._progress, None
                    return self._number(newest)
                if self._closing:
                    return None
                self._changed.wait()

    def _number(self, message: WorkerMessage) -> WorkerMessage:
        self._seq += 1
        return message.model_copy(update={"seq": self._seq, "at": time.time()})


LOOK_SECONDS = 0.2
BUSY_SECONDS = 60.0
"""A worker whose client died may still write its checkpoint: a new worker waits this long for it."""


class PortReporter(NullReporter):
    """Turns the progress of the work into messages."""

    def __init__(self, outbox: MessageOutbox, on_plan: Callable[[str, Plan | None], None]) -> None:
        self._outbox, self._on_plan = outbox, on_plan
        self._last: tuple[str, float, float] | None = None

    def started(self, step: str, title: str) -> None:
        self._outbox.send(StepMessage(step=step, state="started"))

    def unchanged(self, step: str, title: str) -> None:
        self._outbox.send(StepMessage(step=step, state="unchanged"))
        self._on_plan(step, None)

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None:
        # The supervisor reports the heartbeat as often as it looks at it.
        if self._last != (phase, done, total):
            self._last = (phase, done, total)
            self._outbox.send(
                ProgressMessage(phase=phase, done=done, total=total, seconds_left=seconds_left, detail=detail)
            )

    def info(self, text: str) -> None:
        self._outbox.send(LogMessage(text=text))

    def finished(self, step: str, output: Record, seconds: float) -> None:
        self._outbox.send(StepMessage(step=step, state="finished", seconds=seconds))
        if isinstance(output, Plan):
            self._on_plan(step, output)


class WorkerSession:
    def __init__(self, read: BinaryIO, write: BinaryIO, framing: Framing) -> None:
        self._read, self._framing = read, framing
        self._outbox = MessageOutbox(write, framing)
        self._start: StartRequest | None = None
        self._arrived = threading.Event()
        self._over = threading.Event()
        self._busy = False
        self._guard = threading.Lock()
        self._stopping = ""
        self._mistake: GraftError | None = None
        self._events: Events | None = None
        self._run = ""
        self._work: OpenProject | None = None

    def run(self) -> int:
        """Wait for the start, do the work, and return the exit code of the process."""
        self._outbox.send(HelloMessage(graftwork=__version__, pid=os.getpid()))
        threading.Thread(target=self._listen, daemon=True, name="requests").start()
        self._arrived.wait()
        try:
            if self._mistake is not None:
                return self._fail(self._mistake)
            if self._start is None:
                return EXIT_DONE
            return self._do(self._start)
        finally:
            self._over.set()
            self._outbox.close()

    def _do(self, start: StartRequest) -> int:
        self._outbox.window = start.window
        self._outbox.send(StartedMessage(command=start.command, project=start.project))
        watcher = threading.Thread(target=self._watch, args=(start.heartbeat_seconds,), daemon=True)
        try:
            with stoppable():
                self._set_busy(True)
                watcher.start()
                try:
                    if self._stopping:
                        # A client that closed the port at once has nothing begun.
                        raise GracefulStop(self._stopping)
                    result, code = self._carry_out(start)
                finally:
                    self._set_busy(False)
        except (GracefulStop, Interrupted, KeyboardInterrupt) as stopped:
            self._end_watch(watcher)
            reason = self._stopping or str(stopped) or "stopped"
            self._outbox.send(StoppedMessage(exit_code=EXIT_RESUME, reason=reason))
            return EXIT_RESUME
        except GraftError as error:
            self._end_watch(watcher)
            return self._fail(error)
        except Exception as bug:
            self._end_watch(watcher)
            what = f"{type(bug).__name__}: {bug}"
            self._outbox.send(ErrorMessage(exit_code=EXIT_ENVIRONMENT, error="Bug", what=what))
            raise
        self._end_watch(watcher)
        self._outbox.send(DoneMessage(exit_code=code, result=result))
        return code

    def _set_busy(self, busy: bool) -> None:
        """Signals are only delivered while the work can handle them."""
        with self._guard:
            self._busy = busy

    def _carry_out(self, start: StartRequest) -> tuple[dict[str, Any], int]:
        project = open_project(Path(start.project))
        waited = 0.0
        while True:
            try:
                reporter = PortReporter(self._outbox, self._plan_known)
                with use_project(project, reporter, model=start.model) as work:
                    self._work = work
                    return _run(work, start)
            except Busy as busy:
                if waited >= BUSY_SECONDS:
                    raise
                if not waited:
                    self._outbox.send(LogMessage(level="warning", text=f"{busy.what}; waiting for it to end"))
                self._over.wait(LOOK_SECONDS)
                waited += LOOK_SECONDS
            finally:
                self._work = None

    def _fail(self, error: GraftError) -> int:
        known = {name: str(value) for name, value in error.as_json().items() if name in FAILURE_FIELDS}
        self._outbox.send(ErrorMessage.model_validate({"exit_code": error.exit_code, **known}))
        return error.exit_code

    def _plan_known(self, step: str, plan: Plan | None) -> None:
        """Watch the run's folder for checkpoints from now on."""
        if step != "plan" or self._work is None:
            return
        if plan is None:
            entry = self._work.ledger.get(name_entry(self._work, "plan"))
            if entry is None:
                return
            plan = Plan.model_validate(entry.output)
        self._run = run_id_of(plan)
        events = Events(self._work.project.runs / self._run)
        # What an earlier process has reported is not reported again.
        events.new()
        self._events = events

    def _listen(self) -> None:
        """Read requests until the end of the input, which counts as the last request."""
        try:
            for text in read_messages(self._read, self._framing):
                self._take(text)
        except (FramingError, OSError, ValueError) as error:
            self._refuse(str(error))
        self._outbox.end_acks()
        self._ask_to_stop("the port was closed")
        self._arrived.set()

    def _take(self, text: bytes) -> None:
        try:
            request = REQUESTS.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            self._refuse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            return
        match request:
            case StartRequest() if self._start is None:
                self._start = request
                self._arrived.set()
            case StartRequest():
                self._outbox.send(LogMessage(level="error", text="one process does one start"))
            case AckRequest():
                self._outbox.acknowledge(request.seq)
            case CancelRequest():
                self._ask_to_stop(request.reason or "canceled by the client")
            case PingRequest():
                self._outbox.send(HeartbeatMessage(busy=self._busy))

    def _refuse(self, why: str) -> None:
        """Handle a message that cannot be read: exit before the start, log a remark later."""
        if self._start is None and self._mistake is None:
            self._mistake = UserError(
                "the message cannot be read",
                why=why,
                fix=f"`graft worker --schema` prints version {PROTOCOL_VERSION} of the protocol",
            )
            self._arrived.set()
        else:
            self._outbox.send(LogMessage(level="error", text=f"the message cannot be read: {why}"))

    def _ask_to_stop(self, reason: str) -> None:
        if self._over.is_set() or self._stopping:
            return
        with self._guard:
            self._stopping = reason
            if self._busy:
                # As Ctrl-C would: the work ends at a safe point, in the main thread.
                os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, heartbeat_seconds: float) -> None:
        """Heartbeats, and the checkpoints that the run reports."""
        since = heartbeat_seconds
        while not self._over.wait(LOOK_SECONDS):
            self._report_events()
            since += LOOK_SECONDS
            if since >= heartbeat_seconds:
                since = 0.0
                self._outbox.send(HeartbeatMessage(busy=self._busy))

    def _end_watch(self, watcher: threading.Thread) -> None:
        self._over.set()
        if watcher.is_alive():
            watcher.join()
        self._report_events()

    def _report_events(self) -> None:
        for event in self._events.new() if self._events is not None else ():
            if event.kind == "checkpoint":
                step = int(event.body.get("step", 0))
                self._outbox.send(CheckpointMessage(run=self._run, step=step))
            elif event.kind == "alert":
                texts = (event.body.get("what", ""), event.body.get("why", ""))
                self._outbox.send(LogMessage(level="warning", text=": ".join(text for text in texts if text)))


FAILURE_FIELDS = ("error", "what", "why", "fix", "where")


def _run(work: OpenProject, start: StartRequest) -> tuple[dict[str, Any], int]:
    """Return the result as JSON, and the exit code."""
    if start.command == "cycle":
        from graftwork.cycle.session import run_once

        ended = run_once(work)
        code = EXIT_DONE if ended.outcome in ("promoted", "nothing_new") else 1
        return {"cycle": ended.number, "outcome": ended.outcome, "reason": ended.reason}, code
    if start.command == "run":
        made = run_pipeline(work)
        verdict = made.get("gate", Verdict)
        return {"decision": verdict.decision, "reason": verdict.reason}, verdict.exit_code
    outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
    kept = {
        "run_id",
        "steps",
        "final_loss",
        "validation_loss_after",
        "restarts",
        "adapter_folder",
        "adapter_hash",
    }
    return outcome.model_dump(mode="json", include=kept), EXIT_DONE


def serve_stdio(framing: Framing) -> int:
    """Reserve standard output for messages: anything else that is printed goes to standard error."""
    write = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    read = os.fdopen(os.dup(0), "rb")
    return WorkerSession(read, write, framing).run()
