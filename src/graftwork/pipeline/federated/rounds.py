"""`graft train federated`: rounds of training at places whose data stays there; only adapters travel.

In: an open project with `federated:`. Out: of each round who trained, who was left out and why, and the
merged adapter with its verdict. Every part is found again after a crash: trained runs by their outcome,
running jobs in the ledger, finished rounds by their file.
"""

from pathlib import Path

from graftwork.files.disk import make_folder, write_atomic
from graftwork.fleet.settings import FederatedSettings
from graftwork.model.adapter_shape import WEIGHTS_FILE
from graftwork.pipeline.federated.candidate import judge_round, merge_round, trained_tokens
from graftwork.pipeline.federated.sites import FleetSites, SiteRun, Sites
from graftwork.pipeline.federated.training import RoundTraining
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import hold_lock
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import AnswerIsNo, GraftError, UserMistake
from graftwork.records.report import Decision
from graftwork.train.settings import TrainSettings

FOLDER = "federated"


class PlaceResult(Record):
    """A place in a round."""

    name: str
    place: str
    run_id: str
    data: str
    """The hash of its dataset."""
    rows: int
    steps: int
    trained_tokens: int
    weight: float
    loss_before: float | None
    loss: float | None
    """Of its own adapter on its own validation rows; before: of the base."""
    seconds: float


class RoundResult(Record):
    """One finished round; written last."""

    number: int
    places: tuple[PlaceResult, ...]
    left_out: dict[str, str] = {}
    """Places that did not finish, with the reason."""
    run_id: str
    adapter: str
    adapter_hash: str
    decision: Decision | None = None
    reason: str = ""


class Federation(Record):
    """What all rounds came to."""

    model: str
    folder: str
    rounds: tuple[RoundResult, ...]
    of_rounds: int
    adapter: str
    release: str
    """The command that releases the last round's adapter; empty if its gate did not say deploy."""


class PlannedPlace(Record):
    """A place of a federation before it starts."""

    name: str
    place: str
    data: str
    rows: int = 0
    steps: int = 0
    """In one round."""
    minutes: float = 0.0
    """In one round."""
    why_not: str = ""


class FederationPlan(Record):
    """`--dry-run`: the schedule, and what travels."""

    model: str
    rounds: int
    done: int
    quorum: int
    proximal: float
    places: tuple[PlannedPlace, ...]
    adapter_mb: float
    """Of one adapter; it goes to each place and back in every round."""
    minutes: float
    """Of all rounds that are left, places at the same time."""
    travels: tuple[str, ...]
    stays: tuple[str, ...]


def plan_federation(work: OpenProject, *, sites: Sites | None = None) -> FederationPlan:
    """Ask every place for its data and plan the first round. Nothing is started."""
    return _Federated(work, sites or FleetSites(work)).plan()


def run_federation(work: OpenProject, *, again: bool = False, sites: Sites | None = None) -> Federation:
    """Do the rounds that are not done yet. `again` begins a new federation with round 1."""
    made = run_pipeline(work, upto="prepare")
    return _Federated(work, sites or FleetSites(work), again=again).run(made)


class _Federated:
    def __init__(self, work: OpenProject, sites: Sites, *, again: bool = False) -> None:
        self._work, self._sites = work, sites
        self._settings = require_possible(work)
        identity = [
            work.model,
            work.base.revision,
            work.settings.train.what_is_learned(),
            self._settings.model_dump(mode="json", include={"places", "proximal"}),
        ]
        name = fingerprint(identity)[:12]
        root = work.project.state / FOLDER
        turns = sorted(int(path.name.rpartition("-")[2]) for path in root.glob(f"{name}-*"))
        turn = (turns[-1] if turns else 1) + (again and bool(turns))
        self.folder = root / f"{name}-{turn}"

    def run(self, made: StepOutputs) -> Federation:
        make_folder(self.folder)
        with hold_lock(self.folder):
            rounds = []
            start: Path | None = None
            for number in range(1, self._settings.rounds + 1):
                done = self._read(number) or self._round(number, start, made)
                rounds.append(done)
                start = Path(done.adapter)
        return self._result(rounds)

    def plan(self) -> FederationPlan:
        places, megabytes = [], 0.0
        for site in self._settings.places:
            planned = PlannedPlace(name=site.label, place=site.place, data=site.data)
            try:
                data = self._sites.describe(site)
                run = self._sites.plan(site, data, start=None, number=1)
            except GraftError as error:
                places.append(planned.model_copy(update={"why_not": error.what}))
                continue
            megabytes = run.plan.trainable_parameters.value * 4 / 1e6
            figures = {
                "rows": data.dataset.splits["train"].rows,
                "steps": round(run.plan.steps.value),
                "minutes": round(run.plan.minutes.value, 2),
            }
            places.append(planned.model_copy(update=figures))
        done = sum(self._read(number) is not None for number in range(1, self._settings.rounds + 1))
        return FederationPlan(
            model=self._work.model,
            rounds=self._settings.rounds,
            done=done,
            quorum=self._settings.needed,
            proximal=self._settings.proximal,
            places=tuple(places),
            adapter_mb=round(megabytes, 3),
            minutes=round(
                max((place.minutes for place in places), default=0) * (self._settings.rounds - done), 2
            ),
            travels=(
                "to a place: the program, the settings of the run, the round's start adapter; the base, "
                "where the place does not have it",
                "from a place: counts, lengths and hashes of its dataset; the trained adapter, losses and "
                "times of its steps, its log; checkpoints of a run that failed",
            ),
            stays=("rows, logs, names of log files and settings of the place's dataset",),
        )

    def _round(self, number: int, start: Path | None, made: StepOutputs) -> RoundResult:
        self._work.reporter.started("train", f"round {number} of {self._settings.rounds}")
        trained = RoundTraining(self._sites, self._settings, self._work.reporter).run(number, start)
        runs = [trained.runs[site.label] for site in self._settings.places if site.label in trained.runs]
        if len(runs) < self._settings.needed:
            why = "; ".join(f"{name}: {reason}" for name, reason in trained.left_out.items())
            raise AnswerIsNo(
                f"round {number} has {len(runs)} of the {self._settings.needed} places that it needs",
                why=why,
                fix="run the same command again when they can train: what is trained is kept; or lower "
                "federated.quorum",
            )
        outcome = merge_round(self._work, runs)
        done = RoundResult(
            number=number,
            places=_places(runs),
            left_out=trained.left_out,
            run_id=outcome.run_id,
            adapter=outcome.adapter_folder,
            adapter_hash=outcome.adapter_hash,
        )
        if self._settings.evaluate:
            verdict = judge_round(self._work, made, outcome)
            done = done.model_copy(update={"decision": verdict.decision, "reason": verdict.reason})
        write_atomic(self._file(number), done.to_json())
        return done

    def _file(self, number: int) -> Path:
        return self.folder / f"round-{number}.json"

    def _read(self, number: int) -> RoundResult | None:
        """A round that is finished, and whose adapter is still there."""
        path = self._file(number)
        if not path.exists():
            return None
        done = RoundResult.from_json(path.read_bytes())
        return done if (Path(done.adapter) / WEIGHTS_FILE).exists() else None

    def _result(self, rounds: list[RoundResult]) -> Federation:
        last = rounds[-1]
        return Federation(
            model=self._work.model,
            folder=str(self.folder),
            rounds=tuple(rounds),
            of_rounds=self._settings.rounds,
            adapter=last.adapter,
            release=f"graft release import {last.adapter}" if last.decision == "deploy" else "",
        )


def _places(runs: list[SiteRun]) -> tuple[PlaceResult, ...]:
    tokens = [trained_tokens(run) for run in runs]
    outcomes = [run.outcome() for run in runs]
    return tuple(
        PlaceResult(
            name=run.site.label,
            place=run.site.place,
            run_id=run.run_id,
            data=run.data.dataset.content_hash,
            rows=outcome.rows,
            steps=outcome.steps,
            trained_tokens=count,
            weight=round(count / sum(tokens), 6),
            loss_before=outcome.validation_loss_before,
            loss=outcome.validation_loss_after,
            seconds=round(outcome.seconds, 3),
        )
        for run, outcome, count in zip(runs, outcomes, tokens, strict=True)
    )


def require_possible(work: OpenProject) -> FederatedSettings:
    """The settings, where the project's runs can be federated."""
    settings = work.project.settings.federated
    if settings is None:
        raise UserMistake(
            "graft.yaml names no places that train together",
            fix="add `federated: {rounds: 3, places: [{name: north, place: local, data: FOLDER}, …]}`",
            where="federated",
        )
    why = why_impossible(work.settings.train)
    if why:
        raise UserMistake("these runs cannot be averaged", why=why, fix="change `train`", where="train")
    return settings


def why_impossible(train: TrainSettings) -> str:
    """Why runs with these settings have no average that training can go on from; empty if they have."""
    if train.objective != "sft":
        return f"`objective: {train.objective}` writes rows and answers into the run's folder, which travels"
    if train.method not in ("lora", "qlora"):
        return f"`method: {train.method}` does not train plain LoRA factors"
    if train.modules or train.experts:
        return "`train.modules` and `train.experts` give layers of different shapes"
    if train.examine.every is not None and train.examine.metric != "loss":
        return f"`examine.metric: {train.examine.metric}` writes answers into the run's folder, which travels"
    if train.start_from == "main":
        return "`start_from: main` is this project's run; name the folder of an adapter instead"
    return ""
