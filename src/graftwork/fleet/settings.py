"""The settings of the fleet: limits on cost, times; the calendar of places; federated rounds.

The section of each place stands with the place, in `places/`.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from graftwork.fleet.places.azureml import AzureMLSettings
from graftwork.fleet.places.hosts import HostSettings
from graftwork.fleet.places.huggingface import HuggingFaceSettings
from graftwork.fleet.places.kaggle import KaggleSettings
from graftwork.fleet.places.lambda_cloud import LambdaSettings
from graftwork.fleet.places.ray import RaySettings
from graftwork.fleet.places.runpod import RunPodSettings
from graftwork.fleet.places.sagemaker import SageMakerSettings
from graftwork.fleet.places.skypilot import SkyPilotSettings
from graftwork.fleet.places.slurm import SlurmSettings
from graftwork.records.base import Record, SecretAddress
from graftwork.records.week import MomentText, WindowText, ZoneName


class QuotaSettings(Record):
    """Hours available at a place: between resets, or within any window of `within_hours`."""

    hours: float = Field(gt=0, description="Hours of sessions, set-up included.")
    per: Literal["week", "day"] | None = Field(None, description="Reset every week or every day.")
    resets: MomentText | None = Field(
        None,
        description="When it resets: `sat 00:00` for a week, `00:00` for a day. Default: mon 00:00, 00:00.",
    )
    within_hours: float | None = Field(
        None,
        gt=0,
        description="Instead of `per`: limit the hours within any window of this length, such as 24.",
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
    """A place in the plan of a week. Settings that are missing come from the catalog's place of the same
    name.
    """

    place: str = Field("", description="The place that runs the jobs, as in --place. Default: this name.")
    catalog: str = Field(
        "", description="A place from `graft plan catalog places` whose terms apply here. Default: this name."
    )
    gpu: str = Field("", description="Its GPU, from which the planner computes the speed.")
    gpus: int = Field(1, ge=1, description="Number of GPUs per session.")
    speed: float | None = Field(
        None,
        gt=0,
        description="Hours of training per hour, relative to the reference place, instead of the planner's "
        "estimate.",
    )
    models: tuple[str, ...] = Field((), description="Train only these models here. Default: all.")
    at_once: int = Field(1, ge=1, le=8, description="Concurrent sessions.")
    windows: tuple[WindowText, ...] = Field(
        (),
        description="When sessions may run, such as `22:00-07:00` or `sat-sun 00:00-24:00`. Default: always.",
    )
    quotas: tuple[QuotaSettings, ...] = Field((), description="Limits on the hours of sessions.")
    timezone: ZoneName | None = Field(
        None, description="Time zone of windows and resets. Default: plan.week.timezone."
    )
    session_hours: float | None = Field(None, gt=0, description="Longest session, set-up included.")
    setup_minutes: float | None = Field(
        None, ge=0, description="Time from the start of a session to the start of training."
    )
    transfer_minutes: float = Field(
        0.0,
        ge=0,
        description="Time to fetch the checkpoint at the start of a session, and to save it at the end.",
    )
    usd_per_hour: float | None = Field(None, ge=0, description="Price per session hour.")
    by_hand: Literal["no", "start", "whole"] | None = Field(
        None, description="Whether a person must be present: to start a session, or during all of it."
    )


NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class FederatedPlace(Record):
    """A place that trains on data of its own."""

    place: str = Field(pattern=r"^(local|ssh:.+)$", description="Where it trains: local or ssh:HOST.")
    data: str = Field(
        min_length=1,
        description="Its data: a folder at that place with a prepared dataset, or with a project that "
        "prepared one.",
    )
    name: str = Field("", pattern=r"^$|" + NAME, description="Its name in reports; default: the place.")
    model: str = Field("main", description="The model of that project whose dataset is used.")
    base: str = Field("", description="Folder of the base at the place. Default: sent with the job.")

    @property
    def label(self) -> str:
        return self.name or self.place.removeprefix("ssh:")


class FederatedSettings(Record):
    """Rounds of training at places whose data stays there: only adapters travel."""

    rounds: int = Field(3, ge=1, le=1000, description="Rounds of training and averaging.")
    places: tuple[FederatedPlace, ...] = Field(min_length=2, description="Places that take part.")
    quorum: int | None = Field(
        None, ge=2, description="Places that must finish a round; default: more than half, at least two."
    )
    evaluate: bool = Field(
        True, description="Evaluate and gate the merged adapter of every round on this project's test cases."
    )

    @property
    def needed(self) -> int:
        """Places that must finish a round."""
        return self.quorum if self.quorum is not None else max(len(self.places) // 2 + 1, 2)

    @model_validator(mode="after")
    def _places_can_take_part(self) -> Self:
        labels = [site.label for site in self.places]
        if double := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two places are named {min(double)}: give each a different `name`")
        if self.quorum is not None and self.quorum > len(self.places):
            raise ValueError(
                f"quorum: {self.quorum} places must finish, but there are only {len(self.places)}"
            )
        return self


class CapSettings(Record):
    """The most that jobs may cost, in dollars. An open job counts with its largest possible cost."""

    job_usd: float = Field(5.0, ge=0, description="Maximum cost of one job.")
    month_usd: float = Field(50.0, ge=0, description="Maximum cost of all jobs in a calendar month.")
    project_usd: float | None = Field(None, ge=0, description="Maximum total cost of this project.")


class FleetSettings(Record):
    """Where jobs run besides this machine, and what they may cost."""

    hosts: dict[str, HostSettings] = Field(
        {}, description="Machines reached over SSH, by a name of your choice."
    )
    runpod: RunPodSettings | None = Field(None, description="RunPod pods. Unset: not used.")
    lambda_cloud: LambdaSettings | None = Field(
        None, description="Lambda Cloud instances, the place `lambda`. Unset: not used."
    )
    azureml: AzureMLSettings | None = Field(None, description="Azure Machine Learning jobs. Unset: not used.")
    slurm: SlurmSettings | None = Field(None, description="A Slurm cluster. Unset: not used.")
    places: dict[str, PlaceCalendarSettings] = Field(
        {}, description="Quotas, windows, speeds and prices of places, by name; used by `graft plan week`."
    )
    kaggle: KaggleSettings | None = Field(None, description="Kaggle kernels. Unset: not used.")
    sagemaker: SageMakerSettings | None = Field(None, description="SageMaker training jobs. Unset: not used.")
    huggingface: HuggingFaceSettings | None = Field(None, description="Hugging Face jobs. Unset: not used.")
    skypilot: SkyPilotSettings | None = Field(None, description="SkyPilot managed jobs. Unset: not used.")
    ray: RaySettings | None = Field(None, description="A Ray cluster. Unset: not used.")
    mirror: SecretAddress | None = Field(
        None, description="Where jobs copy heartbeats, journals and checkpoints. Default: train.run.mirror."
    )
    caps: CapSettings = Field(default_factory=CapSettings, description="Limits on cost.")
    boot_minutes: float = Field(
        15.0, gt=0, description="Stop a rented machine after this long without a sign of life."
    )
    reconcile_minutes: float = Field(
        10.0,
        gt=0,
        description="Maximum interval between runs of `graft fleet reconcile`; the reserve for lost machines "
        "is computed from it.",
    )
