"""The settings of the fleet: hosts, limits on cost, and the times after which a job counts as lost."""

from typing import Annotated, Literal

from pydantic import Field

from graftwork.records.base import NotSecret, Record, SecretAddress


class HostSettings(Record):
    """A machine that is reached over SSH."""

    address: Annotated[str, NotSecret("a host, as ssh takes it")] = Field(
        min_length=1,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@%:\[\]-]*$",
        description="[user@]host, as ssh takes it.",
    )
    python: str = Field("python3", description="Python 3.11 or later on that machine.")
    folder: str = Field("~/.graftwork", description="Where jobs and their files are kept there.")


class CapSettings(Record):
    """The most that jobs may cost, in dollars. An open job counts with its largest possible cost."""

    job_usd: float = Field(5.0, ge=0, description="The most that one job may cost.")
    month_usd: float = Field(50.0, ge=0, description="The most that all jobs of a calendar month may cost.")
    project_usd: float | None = Field(None, ge=0, description="The most that this project may ever cost.")


class RunPodSettings(Record):
    """Pods of RunPod. The key of the account is in RUNPOD_API_KEY."""

    cloud: Literal["secure", "community"] = Field("secure", description="Tier of the pods.")
    image: str = Field(
        "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        description="Docker image with sshd and Python 3.11 or later.",
    )
    start: str = Field("/start.sh", description="The command that starts sshd in the image.")
    timer: bool = Field(
        True, description="Let the pod end itself after the time limit, by runpodctl in the image."
    )
    python: str = Field("python3", description="Python 3.11 or later in the image.")
    folder: str = Field("/root/graftwork", description="Where the job works in the pod.")
    disk_gb: int = Field(40, ge=10, description="Disk of the pod in GB.")
    public_key: Annotated[str, NotSecret("the path of a public key")] = Field(
        "~/.ssh/id_ed25519.pub", description="The SSH key that may log in to the pod."
    )


class SlurmSettings(Record):
    """A Slurm cluster whose commands are on this machine."""

    folder: str = Field("~/.graftwork", description="Where jobs are kept; all nodes see it.")
    partition: str = Field("", description="The partition; empty: the default one.")
    gpus: int = Field(0, ge=0, description="GPUs of a job (--gres=gpu:N).")
    options: tuple[str, ...] = Field((), description="More options of sbatch, as --account=NAME.")
    python: str = Field("", description="Python 3.11 or later on the nodes; default: this one.")


class FleetSettings(Record):
    """Where jobs run besides this machine, and what they may cost."""

    hosts: dict[str, HostSettings] = Field({}, description="Machines over SSH, by a name of your choice.")
    runpod: RunPodSettings | None = Field(None, description="Pods of RunPod; unset: not used.")
    slurm: SlurmSettings | None = Field(None, description="A Slurm cluster; unset: not used.")
    mirror: SecretAddress | None = Field(
        None, description="Where jobs copy heartbeat, journals and checkpoints; default: train.run.mirror."
    )
    caps: CapSettings = Field(default_factory=CapSettings, description="Limits on cost.")
    boot_minutes: float = Field(
        15.0, gt=0, description="A rented machine without a sign of life for so long is given back."
    )
    reconcile_minutes: float = Field(
        10.0,
        gt=0,
        description="How often `graft fleet reconcile` runs at least; the reserve for lost machines "
        "is computed from it.",
    )
