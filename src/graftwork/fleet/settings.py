"""The settings of the fleet: hosts, limits on cost, times; the calendar of places; federated rounds."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record, SecretAddress
from graftwork.records.week import MomentText, WindowText, ZoneName


class QuotaSettings(Record):
    """Hours that a place gives: between resets, or within any so many hours."""

    hours: float = Field(gt=0, description="Hours of sessions, set-up included.")
    per: Literal["week", "day"] | None = Field(None, description="Reset every week or every day.")
    resets: MomentText | None = Field(
        None,
        description="When it resets: `sat 00:00` for a week, `00:00` for a day. Default: mon 00:00, 00:00.",
    )
    within_hours: float | None = Field(
        None, gt=0, description="Instead of `per`: the hours count within any window of this length, as 24."
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.per is None) == (self.within_hours is None):
            raise ValueError(
                "a quota is either per week or day, or within some hours: give `per` or `within_hours`"
            )
        if self.within_hours is not None and self.hours > self.within_hours:
            raise ValueError("a quota of more hours than its window has limits nothing")
        return self


class PlaceCalendarSettings(Record):
    """A place in the plan of a week. What is not set comes from the catalog's place of the same name."""

    place: str = Field(
        "", description="The place that runs the jobs, as --place takes it. Default: this name."
    )
    catalog: str = Field(
        "", description="A place of `graft plan catalog places` whose terms hold here. Default: this name."
    )
    gpu: str = Field("", description="Its card, from which the planner computes its speed.")
    gpus: int = Field(1, ge=1, description="How many of them a session has.")
    speed: float | None = Field(
        None, gt=0, description="Training per hour in hours of the reference place, instead of the planner's."
    )
    models: tuple[str, ...] = Field((), description="Train only these models here. Default: all.")
    at_once: int = Field(1, ge=1, le=8, description="Sessions at the same time.")
    windows: tuple[WindowText, ...] = Field(
        (), description="When sessions may run, as `22:00-07:00` or `sat-sun 00:00-24:00`. Default: always."
    )
    quotas: tuple[QuotaSettings, ...] = Field((), description="Limits on the hours of sessions.")
    timezone: ZoneName | None = Field(None, description="Of windows and resets. Default: plan.week.timezone.")
    session_hours: float | None = Field(None, gt=0, description="The longest session, set-up included.")
    shortest_minutes: int = Field(60, ge=5, description="A session trains at least so long.")
    setup_minutes: float | None = Field(None, ge=0, description="From the start of a session to training.")
    transfer_minutes: float = Field(
        0.0,
        ge=0,
        description="Fetching the checkpoint at the start of a session, and again saving it at the end.",
    )
    usd_per_hour: float | None = Field(None, ge=0, description="Price of an hour of a session.")
    by_hand: Literal["no", "start", "whole"] | None = Field(
        None, description="Whether a person must be there: to start a session, or during all of it."
    )


NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class FederatedPlace(Record):
    """A place that trains on data of its own."""

    place: str = Field(pattern=r"^(local|ssh:.+)$", description="Where it trains: local or ssh:HOST.")
    data: str = Field(
        min_length=1,
        description="Its data: the folder there of a prepared dataset, or of a project that prepared one.",
    )
    name: str = Field("", pattern=r"^$|" + NAME, description="Its name in reports; default: the place.")
    model: str = Field("main", description="The model of that project whose dataset is used.")
    base: str = Field("", description="Folder of the base at the place; default: the job brings it.")

    @property
    def label(self) -> str:
        return self.name or self.place.removeprefix("ssh:")


class FederatedSettings(Record):
    """Rounds of training at places whose data stays there: only adapters travel."""

    rounds: int = Field(3, ge=1, le=1000, description="Rounds of training and averaging.")
    places: tuple[FederatedPlace, ...] = Field(min_length=2, description="The places that take part.")
    proximal: float = Field(
        0.0,
        ge=0,
        description="Pull of each place towards the round's start (FedProx), as `train.proximal`; "
        "0: plain averaging (FedAvg).",
    )
    quorum: int | None = Field(
        None, ge=2, description="Places that must finish a round; default: more than half, at least two."
    )
    retries: int = Field(1, ge=0, description="How often a place is tried again in a round.")
    evaluate: bool = Field(
        True, description="Evaluate and gate the merged adapter of every round on this project's test cases."
    )

    @property
    def needed(self) -> int:
        """Places that must finish a round."""
        return self.quorum if self.quorum is not None else max(len(self.places) // 2 + 1, 2)

    @model_validator(mode="after")
    def _places_can_take_part(self) -> Self:
        labels = [place.label for place in self.places]
        if double := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two places are called {min(double)}: give each a `name`")
        if self.quorum is not None and self.quorum > len(self.places):
            raise ValueError(f"quorum: {self.quorum} places must finish, and there are {len(self.places)}")
        return self


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
    timer: bool = Field(
        True, description="Let the pod end itself after the time limit, by runpodctl in the image."
    )
    python: str = Field("python3", description="Python 3.11 or later in the image.")
    disk_gb: int = Field(40, ge=10, description="Disk of the pod in GB.")
    public_key: Annotated[str, NotSecret("the path of a public key")] = Field(
        "~/.ssh/id_ed25519.pub", description="The SSH key that may log in to the pod."
    )


class LambdaSettings(Record):
    """Instances of Lambda Cloud. The key of the account is in LAMBDA_API_KEY."""

    ssh_key: Annotated[str, NotSecret("the name of a key")] = Field(
        "", description="Name of the SSH key in Lambda's console; default: the one with `public_key`."
    )
    public_key: Annotated[str, NotSecret("the path of a public key")] = Field(
        "~/.ssh/id_ed25519.pub", description="The SSH key that may log in to the instance."
    )
    regions: tuple[str, ...] = Field((), description="Regions that may be used; default: all.")
    python: str = Field("python3", description="Python 3.11 or later in the image.")


class AzureMLSettings(Record):
    """Jobs of Azure Machine Learning. The login is that of azure-identity: `az login`, or AZURE_CLIENT_ID,
    AZURE_TENANT_ID and AZURE_CLIENT_SECRET."""

    subscription: Annotated[str, NotSecret("an id, not a login")] = Field(
        min_length=1, description="Id of the subscription."
    )
    resource_group: str = Field(min_length=1, description="Resource group of the workspace.")
    workspace: str = Field(min_length=1, description="Name of the workspace.")
    image: str = Field(
        "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime",
        description="Docker image with Python 3.11 or later (`graft fleet image`).",
    )
    instances: dict[str, float] = Field(
        {},
        description="Machine sizes that may be used, with their price an hour in your region; "
        "default: those of the catalog.",
    )
    spot: bool = Field(True, description="Use low-priority machines: cheaper, may be taken and come back.")
    compute: str = Field(
        "", description="A compute cluster of the workspace; default: serverless, Azure brings the machine."
    )
    datastore: Annotated[str, NotSecret("a name")] = Field(
        "workspaceblobstore", description="Datastore for bundles and results."
    )
    container: Annotated[str, NotSecret("an address without a login")] = Field(
        "", description="Address of the datastore's container, if it is not that of the public cloud."
    )
    vault: Annotated[str, NotSecret("an address without a login")] = Field(
        "", description="Address of the Key Vault for secrets; default: that of the workspace."
    )


class SlurmSettings(Record):
    """A Slurm cluster whose commands are on this machine."""

    folder: str = Field("~/.graftwork", description="Where jobs are kept; all nodes see it.")
    partition: str = Field("", description="The partition; empty: the default one.")
    gpus: int = Field(0, ge=0, description="GPUs of a job (--gres=gpu:N); 0: one if --gpu names it.")
    options: tuple[str, ...] = Field((), description="More options of sbatch, as --account=NAME.")
    python: str = Field("", description="Python 3.11 or later on the nodes; default: this one.")


class RaySettings(Record):
    """A Ray cluster that is running already."""

    address: Annotated[str, NotSecret("a host and a port")] = Field(
        "auto", description="HOST:PORT of the head; auto: that of this machine's node."
    )
    jobs: str = Field("http://127.0.0.1:8265", description="Address of the dashboard, which takes jobs.")
    folder: str = Field("~/.graftwork", description="Where jobs are kept; all nodes see it.")
    token: Annotated[str, NotSecret("the path of a file")] = Field(
        "", description="File with the token of the cluster; default: as Ray finds it (~/.ray/auth_token)."
    )
    authentication: Literal["token", "none"] = Field(
        "token", description="none: use a cluster that takes work from anybody who reaches it."
    )
    cpus: float = Field(1.0, gt=0, description="Cores of a job.")
    gpus: float = Field(0.0, ge=0, description="GPUs of a job.")
    python: str = Field("", description="Python 3.11 or later on the nodes; default: this one.")


class KaggleSettings(Record):
    """Kernels of Kaggle. The login is that of Kaggle's own client: KAGGLE_API_TOKEN, or KAGGLE_USERNAME and
    KAGGLE_KEY, or ~/.kaggle."""

    user: str = Field("", description="The account; default: the one that the login belongs to.")
    accelerator: str = Field(
        "NvidiaTeslaT4",
        description="Machine shape of kernels, as Kaggle names it; empty: kernels without a GPU.",
    )


class SageMakerSettings(Record):
    """Training jobs of SageMaker. The login and the region are those of boto3."""

    role: Annotated[str, NotSecret("the name of a role")] = Field(
        description="ARN of the role that jobs run as; it needs the bucket and Secrets Manager."
    )
    bucket: str = Field(min_length=3, description="S3 bucket for bundles, checkpoints and results.")
    image: str = Field(
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.11.0-gpu-py312-cu128-ubuntu24.04-sagemaker",
        description="Docker image in ECR with Python 3.11 or later and boto3 (`graft fleet image`).",
    )
    instances: dict[str, float] = Field(
        {},
        description="Instance types that may be used, with their on-demand price an hour in your region; "
        "default: those of the catalog.",
    )
    spot: bool = Field(
        True, description="Use managed spot training: cheaper, may be interrupted and resumed."
    )
    volume_gb: int = Field(50, ge=10, description="Disk of the machine in GB.")


class HuggingFaceSettings(Record):
    """Jobs of Hugging Face. The token is that of `hf auth login`, or HF_TOKEN."""

    repository: str = Field(
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="A private dataset repository for bundles and results; it is made if it does not exist.",
    )
    namespace: str = Field("", description="User or organization that pays; default: that of the repository.")
    image: str = Field(
        "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime",
        description="Docker image with Python 3.11 or later; `graft fleet image` writes one.",
    )


class SkyPilotSettings(Record):
    """Managed jobs of SkyPilot, which is installed in an environment of its own."""

    command: Annotated[str, NotSecret("the path of a program")] = Field(
        "sky", description="SkyPilot's command, as ~/sky/bin/sky."
    )
    bucket: str = Field(
        pattern=r"^(s3|gs|r2|https)://[^/?#@]+",
        description="Bucket that jobs mount, as s3://name; files of jobs are kept in it.",
    )
    local_storage: str = Field("", description="The same bucket as an fsspec URL, if it is another one.")
    accelerators: dict[str, float] = Field(
        min_length=1, description="Cards as SkyPilot names them, and the most that an hour may cost."
    )
    infra: str = Field(
        "", description="Where SkyPilot looks, as aws or gcp/us-central1; default: all clouds."
    )
    spot: bool = Field(True, description="Use spot machines; SkyPilot recovers a job that lost its machine.")
    image: str = Field("", description="Docker image of the job; default: SkyPilot's own image.")


class FleetSettings(Record):
    """Where jobs run besides this machine, and what they may cost."""

    hosts: dict[str, HostSettings] = Field({}, description="Machines over SSH, by a name of your choice.")
    runpod: RunPodSettings | None = Field(None, description="Pods of RunPod; unset: not used.")
    lambda_cloud: LambdaSettings | None = Field(
        None, description="Instances of Lambda Cloud, the place `lambda`; unset: not used."
    )
    azureml: AzureMLSettings | None = Field(
        None, description="Jobs of Azure Machine Learning; unset: not used."
    )
    slurm: SlurmSettings | None = Field(None, description="A Slurm cluster; unset: not used.")
    places: dict[str, PlaceCalendarSettings] = Field(
        {}, description="Quotas, windows, speeds and prices of places, by name: what `graft plan week` uses."
    )
    kaggle: KaggleSettings | None = Field(None, description="Kernels of Kaggle; unset: not used.")
    sagemaker: SageMakerSettings | None = Field(
        None, description="Training jobs of SageMaker; unset: not used."
    )
    huggingface: HuggingFaceSettings | None = Field(
        None, description="Jobs of Hugging Face; unset: not used."
    )
    skypilot: SkyPilotSettings | None = Field(None, description="Managed jobs of SkyPilot; unset: not used.")
    ray: RaySettings | None = Field(None, description="A Ray cluster; unset: not used.")
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
