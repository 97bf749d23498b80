"""Work that a place can run: a module, the file that holds its job, the folder it works in."""

from typing import Literal

from graftwork.records.base import Record


class DeviceVitals(Record):
    """One accelerator. `use_percent` is the share of time in which it computed anything."""

    index: int
    name: str = ""
    use_percent: float | None = None
    memory_gib: float | None = None
    memory_total_gib: float | None = None
    temperature_c: float | None = None
    power_watts: float | None = None


class Vitals(Record):
    """One sample. Rates are over the time since the sample before."""

    at: float
    memory_gib: float
    """Resident memory of the worker."""
    memory_growth_gib_per_minute: float = 0.0
    """Over the last minutes; what was allocated and freed again does not count."""
    memory_limit_gib: float | None = None
    """What the machine, or the container, has in all."""
    memory_free_gib: float | None = None
    swap_used_gib: float | None = None
    swapped_mib_per_second: float | None = None
    processor_cores: float | None = None
    """Cores that the worker kept busy."""
    load: float | None = None
    cores: int = 1
    data_share: float | None = None
    """Share of the time inside steps that went into waiting for data."""
    devices: tuple[DeviceVitals, ...] = ()


Health = Literal["starting", "working", "slow", "stuck", "gone"]


class Job(Record):
    """`python -m module job_file`, in a folder that only one worker may hold at a time."""

    name: str
    module: str
    job_file: str
    folder: str
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    """Arguments of the module where it starts other processes, instead of the job's file alone."""


class JobHandle(Record):
    """A submitted job. It can be written down: a reader can find the job again at its place."""

    place: str
    id: str
    """As the place names it: a process id, the id of a pod."""
    name: str
    folder: str


class JobStatus(Record):
    """What a place knows of a job now."""

    running: bool
    exit_code: int | None = None
    """Negative for the signal that ended it; None while it runs."""
    process_state: str = ""
    """The letter that Linux gives the process (R, S, D, T, Z); empty where the place does not know."""
    memory_kills: int = 0
    """How often the kernel there has killed for want of memory since the job was submitted."""


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


AlertKind = Literal["stalled", "recovered", "restarted", "out_of_memory", "failed"]


class Alert(Record):
    """What a command gets on its input and a webhook as its body. Holds nothing secret."""

    kind: AlertKind
    run: str
    project: str = ""
    what: str
    why: str = ""
    fix: str = ""
    at: float
    host: str = ""
