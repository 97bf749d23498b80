"""The messages of `graft worker --stdio`: version 1 of the protocol, as records with a JSON Schema."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from graftwork.records.base import Record

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
    """Answered by a heartbeat at once."""

    type: Literal["ping"] = "ping"


class WorkerMessage(Record):
    """What every message of the worker has."""

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
    """How far the work is. Combined where the client is slow: only the newest counts."""

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
    """The worker lives. `busy` is true between start and end."""

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
