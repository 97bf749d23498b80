"""Types of a comparison of places: a run on a machine, an offer, a row of the table, the disk it needs.

In: values. Out: frozen records; every figure has a range.
"""

from datetime import date
from typing import Literal

from graftwork.records.base import Figure, Record
from graftwork.records.hardware import Offer, PlaceTerms
from graftwork.records.units import GIB

# torch with its CUDA libraries, transformers and the rest, as installed on Linux, with pip's cache.
PACKAGES_GIB = (7.0, 9.0, 14.0)
# A token of text is about four characters, and is kept as text and as numbers.
BYTES_A_TOKEN = 4 + 8
LOGS_GIB = 0.1
KEPT_CHECKPOINTS = 3
STATE_BYTES = 8
"""Adam's two states in float32."""
WEIGHT_BYTES = 2
ADAPTER_BYTES = 4


class DiskNeed(Record):
    """What must be free before the run."""

    parts_gib: dict[str, Figure]
    total_gib: Figure
    checkpoint_gib: float
    result_gib: float
    """What is carried away in the end: the adapter, or the model."""


def need_disk(
    *, total_parameters: float, trainable: float, full: bool, tokens: float, kept: int = KEPT_CHECKPOINTS
) -> DiskNeed:
    result = trainable * (WEIGHT_BYTES if full else ADAPTER_BYTES) / GIB
    checkpoint = result + trainable * STATE_BYTES / GIB
    low, value, high = PACKAGES_GIB
    weights = total_parameters * WEIGHT_BYTES / GIB
    parts = {
        "packages": Figure(value=value, low=low, high=high, unit="GiB"),
        # A hub that also stores another format or precision doubles them.
        "base weights": Figure(value=weights, low=weights, high=2 * weights, unit="GiB"),
        "data": Figure.about(tokens * BYTES_A_TOKEN / GIB, down=0.5, up=3.0, unit="GiB"),
        # One more than are kept: the new one is whole before the oldest goes.
        "checkpoints": Figure.exact((kept + 1) * checkpoint, unit="GiB"),
        "result": Figure.exact(result, unit="GiB"),
        "logs": Figure.about(LOGS_GIB, down=0.2, up=3.0, unit="GiB"),
    }
    total = Figure(
        value=sum(part.value for part in parts.values()),
        low=sum(part.low for part in parts.values()),
        high=sum(part.high for part in parts.values()),
        unit="GiB",
    )
    return DiskNeed(parts_gib=parts, total_gib=total, checkpoint_gib=checkpoint, result_gib=result)


Billing = Literal["on-demand", "spot", "subscription", "free", "electricity"]
Goal = Literal["cost", "time"]
HOST_SHARE = 0.26
"""Of a card's price, what Google's own machines around an A100 or an L4 cost on top of it (25 and 26 %)."""


def billed_how(title: str, billing: str) -> str:
    """What must be added to a place's title to say how it is paid."""
    if billing.lower() in title.lower():
        return ""
    return {"spot": " spot", "subscription": " by subscription", "free": " free"}.get(billing, "")


def is_recommended(place: PlaceTerms) -> bool:
    """A place that the catalog warns of is listed, and never wins."""
    return "not recommended" not in place.notes


def house_of(place: str) -> str:
    """Whose place it is: azure and azure-ml rent out the same machines at the same prices."""
    return place.split("-", maxsplit=1)[0]


class CardRun(Record):
    """The run on one machine, as the fit says it."""

    gpu: str
    gpus: int = 1
    fits: bool
    why_not: str = ""
    hours: Figure
    """Of training alone."""
    steps: float
    tokens: float
    total_parameters: float
    trainable_parameters: float
    full: bool = False
    watts: float
    """Of the cards that work."""
    certainty: str = "computed"
    strategy: str = ""


class OfferCandidate(Record):
    """An offer in one of the ways in which it is billed."""

    place: PlaceTerms
    offer: Offer
    billing: Billing
    run: CardRun

    @property
    def label(self) -> str:
        """As `PlaceRow.label`."""
        cards = f"{self.run.gpus} × {self.run.gpu}" if self.run.gpus > 1 else self.run.gpu
        return f"{self.place.title}{billed_how(self.place.title, self.billing)} ({cards})"

    @property
    def usd_per_hour(self) -> float:
        """What an hour is listed at, with the machine around the card; 0 where none is."""
        listed = self.offer.spot_usd_per_hour if self.billing == "spot" else self.offer.usd_per_hour
        return (listed or 0.0) * (1 + self.host_share)

    @property
    def host_share(self) -> float:
        """A list that names neither instance nor memory prices the card alone."""
        bare = self.place.kind == "cloud" and not self.offer.instance and self.offer.memory_gib is None
        return HOST_SHARE if bare else 0.0


class Terms(Record):
    """What the user states about money, time and risk; the defaults are assumptions and are shown."""

    today: date
    goal: Goal = "cost"
    budget_usd: float | None = None
    deadline_hours: float | None = None
    value_usd: float | None = None
    """Of a successful run."""
    success_share: float = 1.0
    runs_a_month: float = 4.0
    """A subscription is shared among them."""
    waiting_usd_per_hour: float = 0.0
    electricity_usd_kwh: float = 0.30
    host_watts: float = 120.0
    """The machine around own cards."""
    preemptions_per_hour: float | None = None
    """Of spot machines, where the user knows better than the catalog."""
    spot_wait_hours: float = 0.25
    evaluation_rows: int | None = None


class Intervals(Record):
    """When to save and when to evaluate."""

    checkpoints: int
    checkpoint_minutes: Figure
    checkpoint_steps: Figure
    young_minutes: Figure
    evaluations: int
    evaluation_minutes: Figure
    evaluation_steps: Figure


class PlaceRow(Record):
    """One line of the table."""

    place: str
    title: str
    kind: str
    gpu: str
    gpus: int
    instance: str = ""
    billing: Billing
    fits: bool
    why_not: str = ""
    training_hours: Figure
    machine_hours: Figure
    """With start, evaluation, saves and what interruptions take."""
    hours_to_result: Figure
    """On the clock: with waiting for quotas and for new machines."""
    usd_per_hour: Figure
    price_source: str
    price_dated: str
    price_age_days: int
    stale: bool
    cost_usd: Figure
    cost_parts_usd: dict[str, Figure]
    bill_usd: Figure
    """What must be paid before one run is done: whole months of a subscription."""
    preemptions_per_hour: Figure
    rate_source: str
    interruptions: Figure
    lost_hours: Figure
    sessions: Figure
    runs_in_budget: Figure | None = None
    disk_gib: Figure
    return_usd: Figure | None = None
    return_ratio: Figure | None = None
    intervals: Intervals
    limits: tuple[str, ...] = ()
    driven_by: str = "api"
    meets_deadline: bool | None = None
    within_budget: bool | None = None
    recommended: bool = True
    verdict: str = ""
    certainty: str = "computed"
    strategy: str = ""
    notes: str = ""

    @property
    def eligible(self) -> bool:
        return (
            self.recommended
            and self.fits
            and self.meets_deadline is not False
            and self.within_budget is not False
        )

    @property
    def label(self) -> str:
        cards = f"{self.gpus} × {self.gpu}" if self.gpus > 1 else self.gpu
        return f"{self.title}{billed_how(self.title, self.billing)} ({cards})"


class WinnerChange(Record):
    """The smallest change of one thing that makes another place win."""

    what: str
    now: Figure
    then: Figure | None
    """None: nothing within the range that was tried changes the winner."""
    winner: str
    """Who wins then."""
    words: str


class PlaceComparison(Record):
    """The table, the verdict and what would change it."""

    run: dict[str, object]
    terms: Terms
    rows: tuple[PlaceRow, ...]
    best: str | None
    verdict: str
    reason: str
    sensitivity: tuple[WinnerChange, ...] = ()
    disk: DiskNeed
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
