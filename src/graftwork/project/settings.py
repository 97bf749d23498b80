"""The whole of graft.yaml: each stage's settings stand in that stage; here they are put together."""

from pydantic import Field

from graftwork.data.settings import DataSettings
from graftwork.evaluate.settings import EvaluateSettings, GateSettings
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import Record
from graftwork.registry.settings import ReleaseSettings
from graftwork.serve.settings import ServeSettings
from graftwork.train.settings import TrainSettings


class ProjectSettings(Record):
    """One project: its logs, its base model, and what each stage does with them."""

    project: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="Name of the project; releases carry it."
    )
    base: str = Field("smollm2-135m-instruct", description="The base model: the embedded one or a folder.")
    data: DataSettings = Field(description="From logs to a dataset.")
    plan: PlanSettings = Field(default_factory=PlanSettings, description="Limits of time and memory.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="How the adapter is trained.")
    evaluate: EvaluateSettings = Field(
        default_factory=EvaluateSettings, description="How base and adapter are measured."
    )
    gate: GateSettings = Field(default_factory=GateSettings, description="When it may be shipped.")
    release: ReleaseSettings = Field(default_factory=ReleaseSettings, description="How it is released.")
    serve: ServeSettings = Field(default_factory=ServeSettings, description="How it is served.")
