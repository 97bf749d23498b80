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
