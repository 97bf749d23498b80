"""Work that a place can run: a module, the file that holds its job, the folder it works in."""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.vitals import Vitals

Health = Literal["starting", "working", "slow", "stuck", "gone"]


class Job(Record):
    """`python -m module job_file`, in a folder that only one worker may hold at a time."""

    name: str
    module: str
    job_file: str
    folder: str
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    """What the module is told instead of the job's file alone, where it starts others."""


class Place(Record):
    """Somewhere a job can run."""

    name: str
    kind: Literal["local"]


class Moment(Record):
    """A point in time: by the clock that people read, and by the machine's steady one (`process.clock`)."""

    at: float
    """Seconds since 1970."""
    steady: float
    boot: str
    """The start of the machine that `steady` counts from; empty where it is not known."""


class Beat(Record):
    """The heartbeat: who works, at what, how far, since when."""

    pid: int
    phase: str
    done: float
    total: float
    at: float
    started: float
    seconds_left: float | None = None
    detail: dict[str, float | str] = {}
    doing: str = ""
    """What is being done inside a step: data, forward, backward, update, checkpoint; empty between."""
    vitals: Vitals | None = None
    steady: float = 0.0
    """`at` by the steady clock."""
    started_steady: float = 0.0
    boot: str = ""

    @property
    def moment(self) -> Moment:
        """When it was beaten."""
        return Moment(at=self.at, steady=self.steady, boot=self.boot)

    @property
    def start(self) -> Moment:
        """When the worker began."""
        return Moment(at=self.started, steady=self.started_steady, boot=self.boot)
