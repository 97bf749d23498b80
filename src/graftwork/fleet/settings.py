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
    gpu: str = Field("", description="Its GPU, from which the planner computes its speed.")
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
        labels = [site.label for site in self.places]
        if double := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two places are called {min(double)}: give each a `name`")
        if self.quorum is not None and self.quorum > len(self.places):
            raise ValueError(f"quorum: {self.quorum} places must finish, and there are {len(self.places)}")
        return self


class CapSettings(Record):
    """The most that jobs may cost, in dollars. An open job counts with its largest possible cost."""

    job_usd: float = Field(5.0, ge=0, description="The most that one job may cost.")
    month_usd: float = Field(50.0, ge=0, description="The most that all jobs of a calendar month may cost.")
    project_usd: float | None = Field(None, ge=0, description="The most that this project may ever cost.")


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
