"""This project's run on the machine of an offer, and which offer to take.

In: an open project with its dataset, offers of places. Out: plans for the cards of these places, and the
cheapest place that finishes within a budget and a deadline, with the reason. Starts nothing.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graftwork.model.probe import describe_device
from graftwork.model.shape import read_shape
from graftwork.pipeline.fleet_clouds import IN_CATALOG
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.run_identity import plan_identity
from graftwork.pipeline.step import StepOutputs, name_entry
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.plan import WorkAhead, measure_work, plan_for
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import list_places as list_terms
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.hardware import Offer, PlaceTerms
from graftwork.records.plan import DeviceFacts, Plan

SPARE = 1.1
"""A run that is expected to take its whole time limit would end without a result."""


@dataclass
class PlacePlanner:
    """Plans of one run for several machines; each kind of card is planned once."""

    work: OpenProject
    made: StepOutputs
    ahead: WorkAhead | None = None
    """None: counted in the rows, when it is needed."""
    _known: dict[str, Plan | AnswerIsNo] = field(default_factory=dict)

    @property
    def here(self) -> Plan:
        return self.made.get("plan", Plan)

    def plan(self, offer: Offer) -> Plan:
        """The plan for the card of the offer; for a machine without one, and for this one, that of here.

        Raises AnswerIsNo if the run does not fit there.
        """
        device = None if offer.place == "local" else self._device(offer)
        if device is None:
            return self.here
        if device.name not in self._known:
            self._known[device.name] = self._make(device)
        found = self._known[device.name]
        if isinstance(found, AnswerIsNo):
            raise found
        return found

    def _make(self, device: DeviceFacts) -> Plan | AnswerIsNo:
        if self.ahead is None:
            shape = read_shape(Path(self.work.base.folder))
            self.ahead = measure_work(self.work, self.made.get("prepare", PreparedData), shape)
        try:
            return plan_for(self.work, self.made, device, ahead=self.ahead)
        except AnswerIsNo as no:
            return no

    def _device(self, offer: Offer) -> DeviceFacts | None:
        here = self.here.device
        if not offer.gpu:
            return None if here.kind == "cpu" else describe_device(threads=self.work.settings.train.threads)
        with suppress(UserMistake):
            gpu = find_gpu(offer.gpu)
            return DeviceFacts(
                kind="cuda",
                name=gpu.name,
                memory_gib=gpu.memory_gib,
                threads=int(offer.vcpus or here.threads),
                capability=gpu.capability,
            )
        # A card that the catalog does not know.
        return None

    def knows(self, offer: Offer) -> bool:
        """Whether the plan is for the offered machine and not, for want of facts, for this one."""
        return offer.place == "local" or not offer.gpu or self._device(offer) is not None


SETUP_MINUTES = 5.0


def terms_of(place: str) -> PlaceTerms | None:
    """What the catalog knows of a place."""
    kind = place.partition(":")[0]
    return next((terms for terms in list_terms() if terms.name == IN_CATALOG.get(kind, kind)), None)


def setup_minutes(place: str) -> float:
    """From the order to the first step, as the catalog has it; none for this machine."""
    terms = terms_of(place)
    return SETUP_MINUTES if terms is None else terms.setup_minutes


def storage_price(place: str) -> float | None:
    """A GiB of a volume that outlives the machine, a month; None where there is none, or none is known."""
    terms = terms_of(place)
    return terms.storage_usd_gib_month or None if terms is not None else None


def adopt_plan(work: OpenProject, plan: Plan) -> None:
    """Take the plan of a run that was trained at a place as that of this project's plan step.

    Without it the next command would train again here, where the plan is another one.
    """
    for model in work.settings.all_models:
        name = name_entry(work, "plan", model=model)
        entry = work.ledger.get(name)
        if entry is None:
            continue
        stored = Plan.model_validate(entry.output)
        if plan_identity(stored) == plan_identity(plan) or not is_same_run(stored, plan):
            continue
        adopted = replace(entry, output=plan.model_dump(mode="json"), finished_at=timestamp())
        # Another process may have planned again meanwhile: its plan is the newer one.
        work.ledger.put_if(adopted, lambda known, name=name, entry=entry: known.get(name) == entry)  # type: ignore[misc]


def is_same_run(one: Plan, other: Plan) -> bool:
    """Whether two plans train the same thing and differ in nothing but what the device decides."""

    return _asked(one) == _asked(other)


def identify_training(plan: Plan) -> str:
    """The same for all plans that train the same thing."""
    return fingerprint(list(_asked(plan)))[:16]


def _asked(plan: Plan) -> tuple[str, str, dict[str, Any]]:
    learned = {key: value for key, value in plan.train.items() if key != "weights"}
    return plan.base_fingerprint, plan.dataset_hash, learned


class PlaceOption(Record):
    """A place for the run, as `--place auto` weighs it."""

    place: str
    gpu: str = ""
    hours: float
    """Expected at most, with the set-up of the machine."""
    planned_usd: float = 0.0
    largest_usd: float = 0.0
    limit_hours: float
    """When the job ends at the latest."""
    against: str = ""
    """Why it is not taken; empty: it could be."""


class ChosenPlace(Record):
    """What `--place auto` found: the place, why, and why not the others."""

    option: PlaceOption
    why: str
    others: tuple[PlaceOption, ...] = ()
    notes: tuple[str, ...] = ()


def choose_place(
    options: Iterable[PlaceOption],
    *,
    budget: float | None,
    deadline: float | None,
    notes: tuple[str, ...] = (),
) -> ChosenPlace:
    """The cheapest option that finishes in time and within the budget; of two, the faster one.

    `deadline` in seconds. Raises AnswerIsNo with all reasons if there is none.
    """
    weighed = [
        option.model_copy(update={"against": _against(option, budget=budget, deadline=deadline)})
        for option in options
    ]
    good = sorted(
        (option for option in weighed if not option.against), key=lambda o: (o.planned_usd, o.hours, o.place)
    )
    rest = [option for option in weighed if option.against]
    if not good:
        reasons = [f"{_named(option)}: {option.against}" for option in rest] + list(notes)
        raise AnswerIsNo(
            "no place finishes this run within the limits",
            why="; ".join(reasons) or "no place is configured",
            fix="allow a larger --budget or a later --deadline, or add a place under `fleet` in graft.yaml",
            where="--place auto",
        )
    best = good[0]
    return ChosenPlace(option=best, why=_why(best, good), others=(*good[1:], *rest), notes=notes)


def _against(option: PlaceOption, *, budget: float | None, deadline: float | None) -> str:
    if deadline is not None and option.hours * 3600 > deadline:
        return f"takes {option.hours:.1f} h, later than the deadline"
    if budget is not None and option.largest_usd > budget + 1e-9:
        return f"may cost ${option.largest_usd:.2f}, more than the budget"
    if option.hours * SPARE > option.limit_hours:
        return f"takes {option.hours:.1f} h, and a job there ends after {option.limit_hours:.1f} h"
    return ""


def _why(best: PlaceOption, good: list[PlaceOption]) -> str:
    cost = f"${best.planned_usd:.2f} expected" if best.planned_usd else "free"
    why = f"{cost}, {best.hours:.1f} h at most"
    if len(good) > 1:
        second = good[1]
        price = f"${second.planned_usd:.2f}" if second.planned_usd else "free"
        return f"{why}; the next best, {_named(second)}, is {price} and takes {second.hours:.1f} h"
    return f"{why}; no other place finishes within the limits"


def _named(option: PlaceOption) -> str:
    return f"{option.place}, {option.gpu}" if option.gpu else option.place
