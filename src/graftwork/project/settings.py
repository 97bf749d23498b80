"""All of graft.yaml: each stage defines its own settings; this module combines them."""

from collections.abc import Iterable, Iterator
from copy import copy
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from graftwork.components.settings import GenerateSettings
from graftwork.cycle.settings import CycleSettings
from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.evaluate.gate.settings import NO_PRIMARY, GateSettings
from graftwork.evaluate.settings import EvaluateSettings, choose_primary, require_evaluated, require_known
from graftwork.fleet.settings import FederatedSettings, FleetSettings
from graftwork.grading.metrics import OF_ANSWERS
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import Record
from graftwork.registry.settings import ReleaseSettings
from graftwork.serve.settings import ServeSettings
from graftwork.train.settings import (
    LOSS,
    OBJECTIVE_SETTINGS,
    REWARD,
    USED_BY,
    TrainSettings,
    given_settings,
    why_unused,
)

R = TypeVar("R", bound=Record)


class Part(Record):
    """Only set keys are shown: an unset key is absent, whatever its default."""

    @model_serializer(mode="plain")
    def _given(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }


def part_of(kind: type[Record]) -> type[Part]:
    """Return a class with some of the keys of `kind`, and of nested settings."""
    fields: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        if info.annotation is None:
            continue
        field, inner = copy(info), info.annotation
        field.default, field.default_factory = None, None
        # An editor must not offer the class's own default here: what is not given is the project's.
        field.json_schema_extra = _drop_default
        if isinstance(inner, type) and issubclass(inner, Record):
            inner = part_of(inner)
        fields[name] = (inner, field)
    part_type = create_model(f"Part{kind.__name__}", __base__=Part, __doc__=kind.__doc__, **fields)
    part_type.model_config = ConfigDict(**{**part_type.model_config, "title": kind.__name__})
    return part_type


def merge(whole: R, part: Record) -> R:
    """`whole` with the values of `part` in its place, validated as if written out."""
    merged = _over(whole.model_dump(mode="json"), part.model_dump(mode="json"))
    return type(whole).model_validate(merged)


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _over(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    merged = dict(whole)
    for key, value in part.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Names become parts of folders, releases and addresses."""

ModelName = Annotated[str, Field(pattern=NAME)]
THE_ONLY_MODEL = "main"


FROM_MAIN = "main"
"""Value of `train.start_from` for the adapter of the main model."""


if TYPE_CHECKING:
    PartOfTraining = TrainSettings
else:
    PartOfTraining = part_of(TrainSettings)


class OneModel(ModelSettings):
    """One of the project's models: its rows, and how its base and training differ."""

    base: str | None = Field(None, description="Base model, if not the project's.")
    train: PartOfTraining = Field(default_factory=PartOfTraining, description="Overrides of `train:`.")


class ProjectSettings(Record):
    """One project: its logs, its base model, and what each stage does with them."""

    project: str = Field(pattern=NAME, description="Name of the project; recorded in releases.")
    base: str = Field(
        "smollm2-135m-instruct",
        description="The base model: the embedded one, a folder, or a name on the Hugging Face Hub such as "
        "Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION.",
    )
    data: DataSettings = Field(default_factory=DataSettings, description="How logs become a dataset.")
    models: dict[ModelName, OneModel] = Field(
        {},
        description="Models made from the same logs, by name, the main one first. Default: one model with "
        "every row.",
        json_schema_extra={"additionalProperties": False},
    )
    plan: PlanSettings = Field(default_factory=PlanSettings, description="Time and memory limits.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="How the adapter is trained.")
    evaluate: EvaluateSettings = Field(
        default_factory=EvaluateSettings, description="How base and adapter are evaluated."
    )
    gate: GateSettings = Field(
        default_factory=GateSettings, validate_default=True, description="When the adapter may be deployed."
    )
    release: ReleaseSettings = Field(
        default_factory=ReleaseSettings, description="How the adapter is released."
    )
    serve: ServeSettings = Field(default_factory=ServeSettings, description="How the adapter is served.")
    fleet: FleetSettings = Field(
        default_factory=FleetSettings,
        # Where a run was trained changes nothing about it: releases do not record it.
        exclude=True,
        description="Where jobs run besides this machine, and cost limits.",
    )
    cycle: CycleSettings = Field(
        default_factory=CycleSettings,
        # When a run was begun changes nothing about it: releases do not record it.
        exclude=True,
        description="What `graft up` does: when to train again, where, who approves and who is notified.",
    )
    federated: FederatedSettings | None = Field(
        None,
        # Other runs do not depend on it: releases do not record it.
        exclude=True,
        description="Places that train together with `graft train federated`; their data stays where it is.",
    )
    engine: Literal["local", "ray", "slurm"] = Field(
        "local",
        # The same bytes come out wherever the pieces are worked on.
        exclude=True,
        description="Where to run the pieces of `data prepare`, the shards of `eval` and the runs of `train "
        "--all`: this machine, or the Ray cluster of fleet.ray. `slurm`: training only.",
    )
    generate: GenerateSettings = Field(
        default_factory=GenerateSettings,
        # No run depends on it: releases do not record it.
        exclude=True,
        description="How components are generated from a specification.",
    )

    @property
    def main_model(self) -> str:
        """The default model of commands."""
        return next(iter(self.models), THE_ONLY_MODEL)

    @property
    def all_models(self) -> dict[str, ModelSettings]:
        """Every model that is prepared, the main one first: its dataset's dependencies."""
        fields = set(ModelSettings.model_fields)
        return {
            name: ModelSettings.model_validate(model.model_dump(include=fields))
            for name, model in self.models.items()
        } or {THE_ONLY_MODEL: ModelSettings()}

    def of_model(self, name: str) -> Self:
        """The settings of this model: with its own base and training."""
        model = self.models.get(name, OneModel())
        train = merge(self.train, model.train)
        if name == self.main_model and train.start_from == FROM_MAIN and model.train.start_from != FROM_MAIN:
            # Said for all under `train:`, it is meant for the specialists.
            train = train.model_copy(update={"start_from": None})
        return self.model_copy(update={"base": model.base or self.base, "train": train})

    @field_validator("train")
    @classmethod
    def _validate_check_metric(cls, train: TrainSettings) -> TrainSettings:
        """Training does not know the metrics of evaluation; the project does."""
        require_eval_metric(train, where="eval.metric")
        return train

    @field_validator("gate")
    @classmethod
    def _gate_is_about_what_is_evaluated(cls, gate: GateSettings, info: ValidationInfo) -> GateSettings:
        """Refuse a rule about a figure that is not measured: it could never be decided."""
        evaluate = info.data.get("evaluate")
        if evaluate is not None:
            # Only what graft.yaml says: the default rules may not fit.
            for key, name in _metrics_named(gate.model_dump(exclude_unset=True)):
                if key == "primary" and name == NO_PRIMARY:
                    continue
                try:
                    require_evaluated(name, evaluate)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from error
            if gate.primary is None and gate.win is None:
                # Well-formed nonsense keeps every rule of form: a deploy needs a better answer too.
                return gate.model_copy(update={"primary": choose_primary(evaluate)})
        return gate

    @model_validator(mode="after")
    def _routes_lead_to_models(self) -> Self:
        for number, rule in enumerate(self.serve.family.rules if self.serve.family else (), 1):
            if rule.to not in self.all_models:
                problem = suggest(rule.to, self.all_models, kind="model")
                raise ValueError(f"serve.family.rules[{number}].to: {problem}")
        for model in self.serve.family.remote if self.serve.family else ():
            if model not in self.all_models or model == self.main_model:
                specialists = ", ".join(name for name in self.all_models if name != self.main_model) or "none"
                raise ValueError(f"serve.family.remote: {model} is not a specialist; known: {specialists}")
        return self

    @model_validator(mode="after")
    def _cycle_fits(self) -> Self:
        cycle = self.cycle
        if unknown := [name for name in cycle.models if name not in self.all_models]:
            raise ValueError(f"cycle.models: {suggest(unknown[0], self.all_models, kind='model')}")
        if cycle.canary is not None and self.serve.split is None:
            raise ValueError("cycle.canary: live traffic has to be split first: set serve.split")
        if cycle.collect is not None and not any(
            fnmatch(cycle.collect, pattern) or cycle.collect == pattern for pattern in self.data.logs
        ):
            raise ValueError(
                f"cycle.collect: {cycle.collect} matches none of data.logs; captures would not become data"
            )
        return self

    @model_validator(mode="after")
    def _settings_of_objectives_are_used(self) -> Self:
        """A setting that no model's objective uses is an error: it would be ignored."""
        parts = {name: model.train.model_dump(exclude_none=True) for name, model in self.models.items()}
        objective_of = {name: part.get("objective", self.train.objective) for name, part in parts.items()}
        parts_by_location = [
            ("train", given_settings(self.train), set(objective_of.values()) or {self.train.objective})
        ]
        for name, part in parts.items():
            keys_given = {key for key in OBJECTIVE_SETTINGS if part.get(key)}
            parts_by_location.append((f"models.{name}.train", keys_given, {objective_of[name]}))
        for location, keys_given, objectives in parts_by_location:
            used = {key for objective in objectives for key in USED_BY[objective]} | {"objective"}
            if unused := sorted(keys_given - used):
                raise ValueError(f"{location}.{unused[0]} has no effect: {why_unused(unused[0])}")
        return self

    @model_validator(mode="after")
    def _each_model_can_be_trained(self) -> Self:
        for name in self.models:
            try:
                model_settings = self.of_model(name)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise ValueError(f"models.{name}.train: {first['msg']}") from error
            require_eval_metric(model_settings.train, where=f"models.{name}.train.eval.metric")
            if model_settings.train.start_from != FROM_MAIN:
                continue
            if name == self.main_model:
                raise ValueError(f"models.{name}.train: the main model cannot start from itself")
            if model_settings.base != self.of_model(self.main_model).base:
                raise ValueError(
                    f"models.{name} starts from the main model's adapter, but has a different base"
                )
        return self


def suggest(name: str, names: Iterable[str], *, kind: str) -> str:
    """Describe an unknown name, and suggest the nearest known one."""
    near = get_close_matches(name, list(names), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return f"there is no {kind} {name}; {hint}"


def require_eval_metric(train: TrainSettings, *, where: str) -> None:
    """Evaluations during training use the loss or a metric of evaluation."""
    try:
        require_known(train.eval.metric, (LOSS, REWARD, *OF_ANSWERS))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _metrics_named(gate: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every metric that the gate's settings name, with its key in the gate's settings."""
    for key, value in gate.items():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, dict):
                metrics = [part.get("metric"), *(part.get("worse_on") or ())]
                yield from ((key, name) for name in metrics if isinstance(name, str))
            elif key == "primary" and isinstance(part, str):
                yield key, part
