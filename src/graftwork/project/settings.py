"""The whole of graft.yaml: each stage's settings stand in that stage; here they are put together."""

from typing import Annotated

from pydantic import Field

from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.evaluate.settings import EvaluateSettings, GateSettings
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import Record
from graftwork.registry.settings import ReleaseSettings
from graftwork.serve.settings import ServeSettings
from graftwork.train.settings import TrainSettings

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names become parts of folders, releases and addresses."""

ModelName = Annotated[str, Field(pattern=NAME)]
THE_ONLY_MODEL = "main"


class ProjectSettings(Record):
    """One project: its logs, its base model, and what each stage does with them."""

    project: str = Field(pattern=NAME, description="Name of the project; releases carry it.")
    base: str = Field("smollm2-135m-instruct", description="The base model: the embedded one or a folder.")
    data: DataSettings = Field(description="From logs to a dataset.")
    models: dict[ModelName, ModelSettings] = Field(
        {},
        description="The models made from the same logs, by name, the main one first; "
        "one model with every row if none is named.",
        json_schema_extra={"additionalProperties": False},
    )
    plan: PlanSettings = Field(default_factory=PlanSettings, description="Limits of time and memory.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="How the adapter is trained.")
    evaluate: EvaluateSettings = Field(
        default_factory=EvaluateSettings, description="How base and adapter are measured."
    )
    gate: GateSettings = Field(default_factory=GateSettings, description="When it may be shipped.")
    release: ReleaseSettings = Field(default_factory=ReleaseSettings, description="How it is released.")
    serve: ServeSettings = Field(default_factory=ServeSettings, description="How it is served.")

    @property
    def main_model(self) -> str:
        """The model that a verb means when none is named."""
        return next(iter(self.models), THE_ONLY_MODEL)

    @property
    def all_models(self) -> dict[str, ModelSettings]:
        """Every model that is prepared, the main one first."""
        return dict(self.models) or {THE_ONLY_MODEL: ModelSettings()}
