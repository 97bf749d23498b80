"""Jobs: what a worker gets and reports, its bundle, its place on another machine, the ledger."""

from typing import Literal

from graftwork.records.base import Record, fingerprint


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
    """Total memory of the machine, or of the container."""
    memory_free_gib: float | None = None
    swap_used_gib: float | None = None
    swapped_mib_per_second: float | None = None
    cpu_cores: float | None = None
    """Cores that the worker kept busy."""
    load: float | None = None
    cores: int = 1
    data_share: float | None = None
    """Share of the time inside steps spent waiting for data."""
    devices: tuple[DeviceVitals, ...] = ()


Health = Literal["starting", "working", "slow", "stuck", "gone"]


class Job(Record):
    """`python -m module job_file`, in a folder that only one worker may hold at a time."""

    module: str
    job_file: str
    folder: str
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    """Arguments of the module where it starts other processes, instead of only the job's file."""


class JobStatus(Record):
    """A place's current knowledge about a job."""

    running: bool
    exit_code: int | None = None
    """Negative for the signal that ended it; None while it runs."""
    process_state: str = ""
    """The letter that Linux gives the process (R, S, D, T, Z); empty if unknown."""
    memory_kills: int = 0
    """How often the kernel there has killed a process because memory ran out since the job was submitted."""


class Moment(Record):
    """A point in time: by the clock that people read, and by the machine's steady one (`process.clock`)."""

    at: float
    """Seconds since 1970."""
    steady: float
    boot: str
    """The start of the machine that `steady` counts from; empty if it is not known."""


class Beat(Record):
    """The heartbeat: who works, on what, how far, since when."""

    pid: int
    phase: str
    done: float
    total: float
    at: float
    started: float
    seconds_left: float | None = None
    detail: dict[str, float | str] = {}
    doing: str = ""
    """Activity inside a step: data, forward, backward, update, checkpoint; empty between steps."""
    vitals: Vitals | None = None
    steady: float = 0.0
    """`at` by the steady clock."""
    started_steady: float = 0.0
    boot: str = ""

    @property
    def moment(self) -> Moment:
        """Time of the beat."""
        return Moment(at=self.at, steady=self.steady, boot=self.boot)

    @property
    def start(self) -> Moment:
        """Start of the worker."""
        return Moment(at=self.started, steady=self.started_steady, boot=self.boot)


AlertKind = Literal["stalled", "recovered", "restarted", "out_of_memory", "failed"]


class Alert(Record):
    """Input of an alert command and body of a webhook. Contains nothing secret."""

    kind: AlertKind
    run: str
    project: str = ""
    what: str
    why: str = ""
    fix: str = ""
    at: float
    host: str = ""


BUNDLE_FORMAT = 1


class BundleFile(Record):
    """A file of a bundle: its content and its length."""

    sha256: str
    size: int


class BundleBase(Record):
    """Where the place finds the base model: on the Hub, in a folder there, or in the bundle itself."""

    kind: Literal["hub", "path", "bundled", "embedded", "none"]
    name: str
    """The name that the plan uses, with the commit of a model of the Hub."""
    revision: str
    """The fingerprint of its files; the place refuses other ones."""
    path: str = ""
    """A folder at the place, for the kind `path`."""


class Bundle(Record):
    """The manifest of a bundle: everything a place needs to run a job, each file by its hash."""

    format: int = BUNDLE_FORMAT
    run_id: str
    module: str
    """The worker: `python -m module job.json`."""
    graftwork: str
    """The version in the wheel."""
    files: dict[str, BundleFile]
    base: BundleBase
    dataset: str = ""
    """A folder at the place, if the data may not travel; empty: in the bundle."""
    resume_step: int | None = None
    """The checkpoint in the bundle, if there is one."""
    seconds: float | None = None
    """How long the job may run at a place; then it writes a checkpoint and ends."""
    max_usd: float | None = None
    mirror: str | None = None
    """Where heartbeat, journals and checkpoints are copied to. A login travels apart, as a secret."""

    @property
    def id(self) -> str:
        """The same content has the same id everywhere."""
        return fingerprint(self.model_dump(mode="json"))[:16]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class JobOrder(Record):
    """One job for a place."""

    job_id: str
    label: str
    """The name at the provider: exact, and unique to this job."""
    run_id: str
    trains: str = ""
    """What is trained, regardless of the device: plans for two devices have two run ids."""
    bundle: str
    """Folder of the bundle on this machine."""
    gpu: str = ""
    """The GPU that was ordered; empty: any, or none."""
    instance: str = ""
    """The machine type of the offer, as the place names it; empty: the cheapest one with the GPU."""
    seconds: float
    """The hard limit, for the timer in the job and for the provider."""
    usd_per_hour: float = 0.0
    max_usd: float = 0.0


class PlacedJob(Record):
    """A job at a place, by the place's own names. Written to the ledger: any process can continue from it."""

    place: str
    id: str
    label: str
    host: str = ""
    gpu: str = ""
    """The assigned GPU."""
    usd_per_hour: float = 0.0
    """The price that the place charges."""
    created_at: float = 0.0
    """Seconds since 1970, by the clock of the place."""


JobPhase = Literal["starting", "running", "ended", "gone"]


class JobPoll(Record):
    """A place's current knowledge about a job. `gone`: the place no longer has such a job."""

    phase: JobPhase
    exit_code: int | None = None
    beat: Beat | None = None
    message: str = ""


JobState = Literal["intended", "submitted", "stopping", "done", "stopped", "failed", "lost", "refused"]
"""`intended`: written down before the place is asked. The first three are open, the others are final."""
FinalState = Literal["done", "stopped", "failed", "lost", "refused"]
OPEN_STATES: frozenset[JobState] = frozenset({"intended", "submitted", "stopping"})


class MachineBill(Record):
    """What one machine of a job has cost so far, by the times at which it was seen."""

    created_at: float
    last_seen: float
    usd_per_hour: float

    @property
    def usd(self) -> float:
        return max(self.last_seen - self.created_at, 0.0) / 3600 * self.usd_per_hour


class FleetJob(Record):
    """A line of the ledger: one job at one place, its limits and its cost."""

    id: str
    label: str
    place: str
    run_id: str
    trains: str = ""
    """As in its order."""
    state: JobState
    bundle: str
    created_at: float
    updated_at: float
    gpu: str = ""
    seconds: float
    """The time limit of the job itself."""
    usd_per_hour: float = 0.0
    """As offered when the job was planned."""
    planned_usd: float = 0.0
    """The expected cost by the plan."""
    committed_usd: float = 0.0
    """The largest possible cost while the job is open; it counts against the caps."""
    placed: PlacedJob | None = None
    machines: dict[str, MachineBill] = {}
    """All machines seen under this job's label; more than one if the provider created two."""
    booted_at: float | None = None
    absent_since: float | None = None
    """Time since which the place's list has not shown it."""
    outcome: FinalState | None = None
    """Final state of a stopping job, set once its end is confirmed."""
    reason: str = ""
    unseen_usd: float = 0.0
    """What it may have cost although the place never showed it; counts against the caps."""
    fetched: bool = False

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def actual_usd(self) -> float:
        return sum(bill.usd for bill in self.machines.values())

    @property
    def counted_usd(self) -> float:
        """What the caps count: the largest possible cost of an open job, the cost of a closed one."""
        if self.is_open:
            return max(self.committed_usd, self.actual_usd)
        return self.actual_usd + self.unseen_usd


class Reconciled(Record):
    """Findings and actions of a comparison of the ledger with the places."""

    checked: int = 0
    """Jobs that were open."""
    closed: tuple[str, ...] = ()
    """Jobs that came to a final state, with its reason."""
    ended: tuple[str, ...] = ()
    """Machines that were ended: orphans, duplicates, jobs over their limits."""
    unknown: tuple[str, ...] = ()
    """Machines with the key of this ledger whose job is not in it; they are left as they are."""
    unreachable: tuple[str, ...] = ()
    """Places that did not answer; their jobs are as before."""
    open: int = 0
    """Jobs that are still open."""
