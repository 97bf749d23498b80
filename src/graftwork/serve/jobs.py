"""What the engine process is told, as a file."""

from graftwork.records.base import Record


class EngineJob(Record):
    """One base and the adapters beside it, behind a socket that only this user can open."""

    folder: str
    """The engine's own folder: lock, heartbeat, log, error."""

    base_folder: str
    template_fingerprint: str | None = None
    """The template that the releases were trained with; another one is refused."""

    reasoning: bool = True
    """Whether the template may let the model think first, as the rows were rendered."""

    adapters: dict[str, str] = {}
    """Release id to the folder of its adapter."""

    socket: str | None = None
    """Path of the unix socket; None lets the gateway choose one."""

    batch_size: int = 8
    batch_wait_ms: float = 4.0
    queue_limit: int = 128
    threads: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
