"""How the machine under a worker feels at one moment: memory, processor, devices. None: not known."""

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
