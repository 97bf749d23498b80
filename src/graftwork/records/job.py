"""Work that a place can run: a module, the file that holds its job, the folder it works in."""

from typing import Literal

from graftwork.records.base import Record

Health = Literal["starting", "working", "slow", "stuck", "gone"]


class Job(Record):
    """`python -m module job_file`, in a folder that only one worker may hold at a time."""

    name: str
    module: str
    job_file: str
    folder: str
    environment: dict[str, str] = {}


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
