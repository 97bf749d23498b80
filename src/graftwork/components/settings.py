"""Settings of component generation, checked when graft.yaml is read."""

from pydantic import Field, PositiveInt

from graftwork.records.base import Record


class ScoreThresholds(Record):
    """Scores that a component needs. Each is from 0 to 1; docs/components.md defines them."""

    atomicity: float | None = Field(0.95, ge=0, le=1, description="One function, no effect on import, small.")
    adherence: float | None = Field(0.95, ge=0, le=1, description="Every stage follows the method.")
    compliance: float | None = Field(0.90, ge=0, le=1, description="Signature, types, requirements.")
    supervision: float | None = Field(0.85, ge=0, le=1, description="Cases that no prompt showed.")
    integration: float | None = Field(1.0, ge=0, le=1, description="Cases with real dependencies.")
    performance: float | None = Field(None, ge=0, le=1, description="Limits of the cases.")
    quality: float | None = Field(None, ge=0, le=1, description="Code quality rules.")
    coverage: float | None = Field(None, ge=0, le=1, description="Lines that the cases execute.")
    mutation: float | None = Field(None, ge=0, le=1, description="Mutants that the cases detect.")
    consistency: float | None = Field(None, ge=0, le=1, description="Samples that behave the same.")


class GenerateSettings(Record):
    """How components are generated from a specification."""

    max_tokens: int = Field(768, ge=16, description="Maximum answer length.")
    hacks: bool = Field(True, description="Try the catalog of hacks on the cases before sending any request.")
    thresholds: ScoreThresholds = Field(
        default_factory=ScoreThresholds, description="Gates of the score card."
    )


class GenerateOptions(GenerateSettings):
    """The settings and the options of one generation."""

    samples: PositiveInt = 4
    """Answers per component, stage and round."""
    rounds: PositiveInt = 2
    """Rounds with feedback per component."""
