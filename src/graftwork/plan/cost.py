"""The run on each machine, by asking the fit; what it costs at one offer, and when it is done.

Input: a question and a GPU, an offer as it is billed, the terms. Output: a GpuRun: whether it fits, hours,
steps, the strategy; dollars by what they are for, hours of machine and clock; and the records of a comparison
of places. One number at a time: callers compute ranges by asking three times. Hours that the user measured on
one GPU replace our own level: other GPUs keep their ratio to it. Where `graft train` has no strategy that
fits, transformers and PEFT are tried. Does not rank.
"""

import math
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import Literal, NamedTuple

from graftwork.costmodel.rates import rates_of
from graftwork.costmodel.run import start_seconds
from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
from graftwork.plan.catalog.prices import HOURS_PER_MONTH
from graftwork.plan.fit.answer import level_of, steps_of, ways_of, weigh
from graftwork.plan.fit.candidates import (
    TIME_SPREAD,
    fits,
    gpu_excess,
    host_excess,
    reserved_figure,
    strategy_of,
    trained,
)
from graftwork.plan.fit.question import gpu_room, host_room
from graftwork.plan.fit.search import search
from graftwork.records.base import GIB, Figure, Record
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu, Machine, Offer, PlaceTerms
from graftwork.records.plan import FitQuestion, Strategy

# torch with its CUDA libraries, transformers and the rest, as installed on Linux, with pip's cache.
PACKAGES_GIB = (7.0, 9.0, 14.0)
# A token of text is about four characters, and is kept as text and as numbers.
BYTES_PER_TOKEN = 4 + 8
LOGS_GIB = 0.1
KEPT_CHECKPOINTS = 3
STATE_BYTES = 8
"""Adam's two states in float32."""
WEIGHT_BYTES = 2
ADAPTER_BYTES = 4


class DiskNeed(Record):
    """Disk space that must be free before the run."""

    parts_gib: dict[str, Figure]
    total_gib: Figure
    checkpoint_gib: float
    result_gib: float
    """What is kept in the end: the adapter, or the model."""


def need_disk(*, total_parameters: float, trainable: float, full: bool, tokens: float) -> DiskNeed:
    result = trainable * (WEIGHT_BYTES if full else ADAPTER_BYTES) / GIB
    checkpoint = result + trainable * STATE_BYTES / GIB
    low, value, high = PACKAGES_GIB
    weights = total_parameters * WEIGHT_BYTES / GIB
    parts = {
        "packages": Figure(value=value, low=low, high=high, unit="GiB"),
        # A hub that also stores another format or precision doubles them.
        "base weights": Figure(value=weights, low=weights, high=2 * weights, unit="GiB"),
        "data": Figure.about(tokens * BYTES_PER_TOKEN / GIB, down=0.5, up=3.0, unit="GiB"),
        # One more than are kept: the new one is whole before the oldest goes.
        "checkpoints": Figure.exact((KEPT_CHECKPOINTS + 1) * checkpoint, unit="GiB"),
        "result": Figure.exact(result, unit="GiB"),
        "logs": Figure.about(LOGS_GIB, down=0.2, up=3.0, unit="GiB"),
    }
    return DiskNeed(
        parts_gib=parts,
        total_gib=Figure.total(parts.values(), "GiB"),
        checkpoint_gib=checkpoint,
        result_gib=result,
    )


Billing = Literal["on-demand", "spot", "subscription", "free", "electricity"]
Goal = Literal["cost", "time"]
HOST_SHARE = 0.26
"""Price of the host as a share of a GPU's price: what Google's own machines around an A100 or an L4 add to it
(25 and 26 %).
"""


def billed_how(title: str, billing: str) -> str:
    """Suffix of a place's title that says how it is billed."""
    if billing.lower() in title.lower():
        return ""
    return {"spot": " spot", "subscription": " by subscription", "free": " free"}.get(billing, "")


def is_recommended(provider: PlaceTerms) -> bool:
    """A place that the catalog warns of is listed, and never wins."""
    return "not recommended" not in provider.notes


def house_of(name: str) -> str:
    """The provider of a place: azure and azure-ml rent out the same machines at the same prices."""
    return name.split("-", maxsplit=1)[0]


class GpuRun(Record):
    """The run on one machine, as the fit computes it."""

    gpu: str
    gpus: int = 1
    fits: bool
    why_not: str = ""
    hours: Figure
    """Hours of training only."""
    steps: float
    tokens: float
    total_parameters: float
    trainable_parameters: float
    full: bool = False
    watts: float
    """Power of the GPUs in use."""
    certainty: str = "computed"
    strategy: str = ""


class OfferCandidate(Record):
    """An offer in one of the ways in which it is billed."""

    place: PlaceTerms
    offer: Offer
    billing: Billing
    run: GpuRun

    @property
    def label(self) -> str:
        """As `PlaceRow.label`."""
        gpus = f"{self.run.gpus} × {self.run.gpu}" if self.run.gpus > 1 else self.run.gpu
        return f"{self.place.title}{billed_how(self.place.title, self.billing)} ({gpus})"

    @property
    def usd_per_hour(self) -> float:
        """Listed hourly price, with the machine around the GPU; 0 if none."""
        listed = self.offer.spot_usd_per_hour if self.billing == "spot" else self.offer.usd_per_hour
        return (listed or 0.0) * (1 + self.host_share)

    @property
    def host_share(self) -> float:
        """A list with neither instance nor memory prices only the GPU."""
        bare = self.place.kind == "cloud" and not self.offer.instance and self.offer.memory_gib is None
        return HOST_SHARE if bare else 0.0


class Terms(Record):
    """The user's terms about money, time and risk; the defaults are assumptions and are shown."""

    today: date
    goal: Goal = "cost"
    budget_usd: float | None = None
    deadline_hours: float | None = None
    value_usd: float | None = None
    """Value of a successful run."""
    success_share: float = 1.0
    runs_per_month: float = 4.0
    """Runs that share a subscription."""
    waiting_usd_per_hour: float = 0.0
    electricity_usd_kwh: float = 0.30
    host_watts: float = 120.0
    """Power of the machine around own GPUs."""
    preemptions_per_hour: float | None = None
    """Preemptions of spot machines, if the user knows better than the catalog."""
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
    """With start, evaluation, checkpoints and time lost to interruptions."""
    hours_to_result: Figure
    """Wall-clock hours: with waiting for quotas and for new machines."""
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
        gpus = f"{self.gpus} × {self.gpu}" if self.gpus > 1 else self.gpu
        return f"{self.title}{billed_how(self.title, self.billing)} ({gpus})"


class WinnerChange(Record):
    """The smallest change of one thing that makes another place win."""

    what: str
    now: Figure
    then: Figure | None
    """None: nothing within the tried range changes the winner."""
    winner: str
    """The new winner."""
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


HOURS_PER_WEEK = 168.0
HOURS_PER_DAY = 24.0


class Stay(NamedTuple):
    """A run cut into sessions."""

    sessions: int
    machine: float
    """Hours, with setting up at the start of each session."""
    clock: float
    possible: bool = True


def cut(
    provider: PlaceTerms,
    *,
    work: float,
    setup: float,
    save: float = 0.0,
    hours_per_month: float | None = None,
) -> Stay:
    """Split `work` hours into sessions of the place, each of which begins with `setup` and ends with
    `save`.
    """
    longest = min(
        (
            limit
            for limit in (provider.session_hours, provider.free_hours_per_day, provider.free_hours_per_week)
            if limit
        ),
        default=math.inf,
    )
    useful = longest - setup - save
    if useful <= 0:
        return Stay(sessions=0, machine=math.inf, clock=math.inf, possible=False)
    sessions = max(1, math.ceil(work / useful - 1e-9)) if math.isfinite(useful) else 1
    # The last save of the run is part of its work.
    machine = work + sessions * setup + (sessions - 1) * save
    clock = machine
    for quota, period in (
        (provider.free_hours_per_day, HOURS_PER_DAY),
        (provider.free_hours_per_week, HOURS_PER_WEEK),
        (hours_per_month, HOURS_PER_MONTH),
    ):
        if quota:
            # Each is used from its first hour on: full periods, then what is left of the work in the next.
            full = math.ceil(machine / quota - 1e-9) - 1
            clock = max(clock, full * period + machine - full * quota)
    return Stay(sessions=sessions, machine=machine, clock=clock)


NEVER = 1e-12
"""Rate of interruptions of a whole run below which only rounding errors would be seen."""


class Hazard(Record):
    """How often a machine is taken away, and what that costs. Hours, and interruptions an hour."""

    rate: float
    save: float
    """Writing one checkpoint while training waits."""
    restart: float
    """From the new machine to the first step: paid for, and may be interrupted too."""
    wait: float = 0.0
    """Until there is another machine: not paid for."""


class Expected(NamedTuple):
    """Mean hours of a run under interruptions."""

    machine: float
    """Paid hours: start, work, saves, lost work and restarts."""
    clock: float
    interruptions: float
    lost: float
    """Share of the machine's hours lost to repeated work and restarts."""


def best_interval(hazard: Hazard) -> float:
    """Optimal hours of work between two saves; infinite without interruptions."""
    if hazard.rate <= 0:
        return math.inf
    if hazard.save <= 0:
        return 0.0
    # With x = rate × interval: f(x) = ln(1 - x) + x + rate × save falls and bends down, so that Newton's way
    # from a point right of the crossing (Young's, or one that is nearer for dear saves) never passes it.
    dear = hazard.rate * hazard.save
    x = min(math.sqrt(2 * dear), 1 - math.exp(-1 - dear))
    for _ in range(40):
        step = (math.log1p(-x) + x + dear) * (1 - x) / x
        x += step
        if abs(step) <= 1e-12 * x:
            break
    return x / hazard.rate


def young_interval(hazard: Hazard) -> float:
    """The first-order rule, for comparison: √(2 × save / rate)."""
    return math.sqrt(2 * hazard.save / hazard.rate) if hazard.rate > 0 else math.inf


def choose_saves(hazard: Hazard, *, work: float) -> int:
    """Whole number of evenly spaced saves, the last at the end, with the least expected hours."""
    interval = best_interval(hazard)
    if interval <= 0:
        raise ValueError("a save that costs nothing has no best interval: specify what it costs")
    fewest = max(1, math.floor(work / interval))
    return min((fewest, fewest + 1), key=lambda count: expect(hazard, work=work, saves=count).machine)


def expect(hazard: Hazard, *, work: float, saves: int) -> Expected:
    """Mean hours for `work` hours in `saves` even stretches, each followed by a save."""
    if saves < 1 or work < 0:
        raise ValueError(f"{saves} saves over {work} hours: at least one save, and no negative work")
    rate = hazard.rate
    bare = hazard.restart + work + saves * hazard.save
    if rate * bare <= NEVER:
        return Expected(machine=bare, clock=bare, interruptions=0.0, lost=0.0)
    start = _grown(rate, hazard.restart)
    stretch = math.exp(_held(rate * hazard.restart)) * _grown(rate, work / saves + hazard.save)
    # Below the bare hours only by rounding.
    machine = max(start + saves * stretch, bare)
    interruptions = rate * machine
    return Expected(
        machine=machine,
        clock=machine + interruptions * hazard.wait,
        interruptions=interruptions,
        lost=machine - bare,
    )


def _grown(rate: float, hours: float) -> float:
    """(exp(rate × hours) - 1) / rate: mean time to get `hours` in one piece."""
    return math.expm1(_held(rate * hours)) / rate


def _held(exponent: float) -> float:
    """Clamp the result: hundreds of mean lifetimes never end."""
    return min(exponent, 300.0)


MOST_EVALUATIONS = 20
"""More points do not add detail to the curve."""
EVALUATION_SHARE = 0.05
"""Largest share of the training time that evaluations may take."""
FORWARD_SHARE = 0.4
"""Time of a row that is only read, as a share of a training row's time: one pass of about two and a half."""
MOST_ROWS_READ = 200


def choose_rhythm(
    *, hours: float, steps: float, rows: float, hazard: Hazard, evaluation_rows: int | None
) -> tuple[int, int, float]:
    """Saves, evaluations and the hours of one evaluation; `rows` are those of all epochs."""
    read = evaluation_rows if evaluation_rows is not None else min(MOST_ROWS_READ, max(1.0, rows / 10))
    evaluation_hours = FORWARD_SHARE * hours * read / max(rows, 1.0)
    affordable = (
        int(EVALUATION_SHARE * hours / evaluation_hours) if evaluation_hours > 0 else MOST_EVALUATIONS
    )
    evaluations = max(1, min(MOST_EVALUATIONS, affordable, int(steps)))
    work = hours + evaluations * evaluation_hours
    saves = max(1, min(choose_saves(hazard, work=work), int(steps) or 1))
    return saves, evaluations, evaluation_hours


def describe_intervals(bill: "Bill", *, run: GpuRun) -> Intervals:
    """Its saves and evaluations in minutes and steps of this run."""

    def every(count: int) -> tuple[Figure, Figure]:
        minutes = Figure(
            value=60 * run.hours.value / count,
            low=60 * run.hours.low / count,
            high=60 * run.hours.high / count,
            unit="min",
        )
        return minutes, Figure.exact(max(1, round(run.steps / count)), "steps")

    save_minutes, save_steps = every(bill.saves)
    evaluation_minutes, evaluation_steps = every(bill.evaluations)
    return Intervals(
        checkpoints=bill.saves,
        checkpoint_minutes=save_minutes,
        checkpoint_steps=save_steps,
        young_minutes=Figure.exact(60 * young_interval(bill.hazard), "min"),
        evaluations=bill.evaluations,
        evaluation_minutes=evaluation_minutes,
        evaluation_steps=evaluation_steps,
    )


WRITE_BYTES_PER_SECOND = 200e6
"""Network disks of clouds; a local NVMe is ten times faster."""
SAVE_SECONDS = 2.0
ASSUMED_SPOT_RATE = 0.05
"""Interruptions per hour if not published: once in twenty hours. Between a fifth and four times it."""
ASSUMED_SPREAD = (0.2, 4.0)
LOADING_MINUTES = 2.0
"""Until the weights are on the GPU, wherever it is."""
CRASH_RATE = 1 / 500
"""Crashes per hour of a machine without preemption: crashes, power failures, human errors. An assumption."""


class Tweak(NamedTuple):
    """Factors by which a question of the kind "what if" differs from what is known."""

    price: float = 1.0
    hours: float = 1.0
    rate: float = 1.0


PLAIN = Tweak()


class Bill(NamedTuple):
    """Dollars and hours of one run."""

    cost: float
    paid_first: float
    parts: dict[str, float]
    machine: float
    clock: float
    sessions: int
    interruptions: float
    lost: float
    possible: bool
    saves: int
    evaluations: int
    hazard: Hazard


def hazard_of(candidate: OfferCandidate, *, terms: Terms, disk: DiskNeed, rate_factor: float = 1.0) -> Hazard:
    """How this machine is taken away."""
    spot = candidate.billing == "spot"
    return Hazard(
        rate=spot_rate(candidate, terms) * rate_factor if spot else CRASH_RATE,
        save=(SAVE_SECONDS + disk.checkpoint_gib * GIB / WRITE_BYTES_PER_SECOND) / 3600,
        restart=max(candidate.place.setup_minutes, LOADING_MINUTES) / 60,
        wait=terms.spot_wait_hours if spot else 0.0,
    )


def spot_rate(candidate: OfferCandidate, terms: Terms) -> float:
    """The user's figure, else the catalog's, else our assumption."""
    for stated in (terms.preemptions_per_hour, candidate.place.preemptions_per_hour):
        if stated is not None:
            return stated
    return ASSUMED_SPOT_RATE


def compute_bill(
    candidate: OfferCandidate,
    *,
    terms: Terms,
    disk: DiskNeed,
    rows: float,
    hours: float | None = None,
    tweak: Tweak = PLAIN,
) -> Bill:
    """Bill one run of `hours` hours of training (the fit's own by default)."""
    training = (candidate.run.hours.value if hours is None else hours) * tweak.hours
    hazard = hazard_of(candidate, terms=terms, disk=disk, rate_factor=tweak.rate)
    saves, evaluations, evaluation_hours = choose_rhythm(
        hours=training,
        steps=candidate.run.steps,
        rows=rows,
        hazard=hazard,
        evaluation_rows=terms.evaluation_rows,
    )
    evaluating = evaluations * evaluation_hours
    expected = expect(hazard, work=training + evaluating, saves=saves)
    stay = cut(
        candidate.place,
        work=expected.machine - hazard.restart,
        setup=hazard.restart,
        save=hazard.save,
        hours_per_month=candidate.offer.hours_per_month if candidate.billing == "subscription" else None,
    )
    clock = stay.clock + expected.clock - expected.machine
    saving = saves * hazard.save
    spent = {
        "training": training,
        "evaluation": evaluating,
        "saves": saving,
        "interruptions": expected.lost,
        "setup": stay.machine - training - evaluating - saving - expected.lost,
    }
    paid, first = _machine_dollars(candidate, terms=terms, machine=stay.machine, price_factor=tweak.price)
    an_hour = paid / stay.machine if stay.possible and stay.machine else 0.0
    parts = {name: an_hour * took for name, took in spent.items()} if stay.possible else {}
    months = clock / HOURS_PER_MONTH if math.isfinite(clock) else 0.0
    parts["storage"] = disk.total_gib.value * candidate.place.storage_usd_gib_month * months
    parts["transfer"] = disk.result_gib * candidate.place.egress_usd_gib
    extras = parts["storage"] + parts["transfer"]
    return Bill(
        cost=paid + extras,
        paid_first=first + extras,
        parts=parts,
        machine=stay.machine,
        clock=clock,
        sessions=stay.sessions,
        interruptions=expected.interruptions,
        lost=expected.lost,
        possible=stay.possible,
        saves=saves,
        evaluations=evaluations,
        hazard=hazard,
    )


def _machine_dollars(
    candidate: OfferCandidate, *, terms: Terms, machine: float, price_factor: float
) -> tuple[float, float]:
    """Dollars of the machine attributed to a run, and dollars paid before it is done."""
    if candidate.billing == "free" or not math.isfinite(machine):
        return 0.0, 0.0
    offer = candidate.offer
    if candidate.billing == "electricity":
        kilowatts = (candidate.run.watts + terms.host_watts) / 1000
        dollars = kilowatts * machine * terms.electricity_usd_kwh * price_factor
        return dollars, dollars
    if candidate.billing == "subscription":
        a_month = (offer.usd_per_month or 0.0) * price_factor
        monthly_hours = offer.hours_per_month or HOURS_PER_MONTH
        months = math.ceil(terms.runs_per_month * machine / monthly_hours - 1e-9)
        return a_month * months / terms.runs_per_month, a_month * math.ceil(machine / monthly_hours - 1e-9)
    unit = candidate.place.smallest_billed_minutes / 60
    # What is begun is paid: a place that bills by the hour bills two for 61 minutes.
    billed = math.ceil(machine / unit - 1e-9) * unit if unit else machine
    dollars = candidate.usd_per_hour * price_factor * billed
    return dollars, dollars


def fit_in_brief(question: FitQuestion) -> GpuRun:
    """The best strategy of the engine in question, as `fit` finds it; of transformers, if our own has
    none.
    """
    ways = ways_of(question)
    runs = [_run_of(way.model_dump_json()) for way in ways]
    if len(ways) == 1 and question.engine == "graft" and not runs[0].fits:
        # Of several ways one is with transformers already.
        runs.append(_run_of(question.model_copy(update={"engine": "hf"}).model_dump_json()))
    best = min(runs, key=lambda run: (not run.fits, run.hours.value))
    # All GPUs are paid for, whether or not they are used.
    return best.model_copy(update={"gpus": question.machine.gpus})


@lru_cache(maxsize=1024)
def _run_of(text: str) -> GpuRun:
    question = FitQuestion.model_validate_json(text)
    gpu = question.machine.gpu
    if gpu is None:
        raise UserError("a machine without a GPU is not compared", fix="specify a GPU", where="--gpu")
    rates = rates_of(gpu)
    level = level_of(question, rates)
    fitting, failing = search(question, rates=rates, level=level)
    candidate, _ = weigh(fitting, failing, question, level=level, rates=rates)
    steps = steps_of(question)
    spread = TIME_SPREAD[level]
    seconds = candidate.seconds_per_step * steps
    start = start_seconds("cuda", parameters=total_parameters(question.shape))
    hours = Figure(
        value=(seconds + start) / 3600,
        low=(seconds / spread + start) / 3600,
        high=(seconds * spread + start) / 3600,
        unit="h",
    )
    reason = ""
    if gpu_excess(candidate, question, level) > 0:
        room = gpu_room(question, gpus=candidate.way.shared.gpus).value
        reason = f"takes up to {reserved_figure(candidate, question, level).high:.1f} of {room:.1f} GiB"
    elif host_excess(candidate, question) > 0:
        reason = f"takes {candidate.host.value:.0f} of {host_room(question):.0f} GiB of host memory"
    strategy = strategy_of(candidate, question)
    return GpuRun(
        gpu=gpu.name,
        gpus=question.machine.gpus,
        fits=fits(candidate, question, level),
        why_not=reason,
        hours=hours,
        steps=float(steps),
        tokens=sum(question.lengths) / max(len(question.lengths), 1) * question.rows,
        total_parameters=total_parameters(question.shape),
        trainable_parameters=trained(question),
        full=question.method == "full",
        # A way that takes one GPU of several leaves the others idle.
        watts=gpu.watts * (question.machine.gpus if strategy.sharding != "none" else 1),
        strategy=in_words(strategy),
    )


SCALED_RANGE = (0.8, 1.25)
"""Range of hours on a GPU other than the measured one: the ratio of two estimates."""


class MeasuredRun(NamedTuple):
    """Hours that the user's run took on a GPU."""

    gpu: str
    gpus: int
    hours: float


def in_words(strategy: Strategy) -> str:
    parts = [strategy.weights, f"{strategy.micro_rows} rows a pass"]
    if strategy.engine == "hf":
        parts.append("by transformers and PEFT")
    if strategy.checkpointed_layers:
        parts.append(f"{strategy.checkpointed_layers} layers checkpointed")
    if strategy.offload != "none":
        parts.append(f"{strategy.offload} offloaded")
    if strategy.sharding != "none":
        parts.append(strategy.sharding)
    return ", ".join(parts)


class RunEstimator:
    """Runs the fit of this training once for each machine, and caches it."""

    def __init__(
        self, question: FitQuestion, *, find: Callable[[str], Gpu], measured: MeasuredRun | None = None
    ) -> None:
        self._question, self._find, self._measured = question, find, measured
        self._runs: dict[tuple[str, int, float | None], GpuRun] = {}
        self._factor = 1.0
        if measured is not None:
            computed = self._fit(measured.gpu, measured.gpus, None).hours.value
            self._factor = measured.hours / computed if computed else 1.0

    def __call__(self, gpu: str, gpus: int, ram_gib: float | None) -> GpuRun:
        # One name for a GPU, and memory that no adapter needs left out: the fit is asked less often. Where
        # all parameters are trained, their states may wait on the host.
        if ram_gib is not None and ram_gib >= USUAL_RAM_GIB * gpus and self._question.method != "full":
            ram_gib = None
        key = (self._find(gpu).name, gpus, ram_gib)
        if key not in self._runs:
            run, measured = self._fit(*key), self._measured
            same = measured is not None and (self._find(measured.gpu).name, measured.gpus) == key[:2]
            if same or self._factor != 1.0:
                down, up = (1.0, 1.0) if same else SCALED_RANGE
                scaled = run.hours.value * self._factor
                certainty = "measured" if same else "scaled from your measurement"
                hours = Figure.about(scaled, down=down, up=up, unit="h")
                run = run.model_copy(update={"hours": hours, "certainty": certainty})
            self._runs[key] = run
        return self._runs[key]

    def _fit(self, gpu: str, gpus: int, ram_gib: float | None) -> GpuRun:
        # A machine whose memory no price list states has the usual one for each GPU.
        machine = Machine(gpu=self._find(gpu), gpus=gpus, ram_gib=ram_gib or USUAL_RAM_GIB * gpus)
        return fit_in_brief(self._question.model_copy(update={"machine": machine}))


def describe_run(question: FitQuestion) -> dict[str, object]:
    """What is compared, for later readers of the table."""
    return {
        "model": question.model,
        "method": question.method,
        "algorithm": question.algorithm,
        "rows": question.rows,
        "epochs": question.epochs,
        "tokens_per_row": round(sum(question.lengths) / max(len(question.lengths), 1)),
        "batch_size": question.batch_size,
        "rank": question.rank,
    }
