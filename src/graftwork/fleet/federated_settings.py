"""The settings of federated rounds: which places take part, how often, and when a round counts."""

from typing import Self

from pydantic import Field, model_validator

from graftwork.records.base import Record

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
