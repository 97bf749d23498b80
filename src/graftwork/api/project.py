"""A project as an object: each step of the pipeline is a method that returns its record.

Each call opens the project's database and closes it again. What needs no project is here too: audits of
log files, and the base models on this machine. Knows neither the terminal nor exit codes.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.project import PreparedData, audit_context_here, counter_here, template_here
from graftwork.data.settings import DataSettings, RepairSettings
from graftwork.model import base as base_models
from graftwork.process import worker
from graftwork.project.folder import ProjectFolder
from graftwork.project.folder import open_project as open_folder
from graftwork.project.load import PROJECT_FILE
from graftwork.project.open_project import OpenProject, report_downloads, use_project
from graftwork.project.open_project import current_user as current_user  # noqa: PLC0414
from graftwork.project.open_project import timestamp as timestamp  # noqa: PLC0414
from graftwork.project.reporter import NullReporter, Reporter, progress_listener
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import Record
from graftwork.records.dataset import Audit
from graftwork.records.errors import Busy, NegativeResult, UserError
from graftwork.records.plan import Plan, RunPlan
from graftwork.records.release import Release, ReleaseEntry, ReleaseQuery
from graftwork.records.report import NextStart, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.text.wording import explain_error

if TYPE_CHECKING:
    from graftwork.cycle.session import CycleStatus
    from graftwork.cycle.state import CycleState
    from graftwork.data.audit.findings import CountTokens
    from graftwork.data.review import CalibratedJudge
    from graftwork.engines.settings import EngineSettings
    from graftwork.evaluate.commands import GatedAll
    from graftwork.evaluate.project import Evaluated
    from graftwork.pipeline.preflight import Preflight
    from graftwork.pipeline.status import ProjectStatus
    from graftwork.pipeline.step import StepOutputs
    from graftwork.pipeline.try_bases import BaseComparison
    from graftwork.project.init import Started
    from graftwork.records.dataset import (
        Corrections,
        JudgeLabel,
        RepairOutcome,
        RepairPlan,
        ReviewItem,
    )
    from graftwork.records.interaction import Savings
    from graftwork.records.live import (
        CanaryReport,
        EscalationForecast,
        EscalationLive,
        PromptDrift,
        ShadowSummary,
        TrainedRouter,
    )
    from graftwork.records.week import WeekSchedule
    from graftwork.serve.budgets import KeyBudget
    from graftwork.serve.keys import ApiKey
    from graftwork.serve.own_endpoint import ReloadResult
    from graftwork.serve.settings import ServeSettings
    from graftwork.train.all_models import TrainedAll
    from graftwork.train.federated import Federation
    from graftwork.train.sweep import SweepRequest, SweepResult
    from graftwork.week.project import WeekRequest


R = TypeVar("R", bound=Record)
T = TypeVar("T")
PAGE_SIZE = 50


class Page(Record, Generic[T]):
    """A page of a list: the first is 1."""

    items: tuple[T, ...]
    total: int
    """Items of all pages."""
    page: int
    pages: int


def number_page(page: int, total: int) -> tuple[int, int]:
    """The page that is shown, and how many there are."""
    pages = max(-(-total // PAGE_SIZE), 1)
    return min(max(page, 1), pages), pages


def cut_page(items: Sequence[T], page: int) -> Page[T]:
    page, pages = number_page(page, len(items))
    shown = tuple(items[(page - 1) * PAGE_SIZE : page * PAGE_SIZE])
    return Page[T](items=shown, total=len(items), page=page, pages=pages)


@dataclass(frozen=True)
class Project:
    """A project that is open for work. Steps that are up to date are not run again.

    `model` is one of the models in graft.yaml, the main one by default. Every method raises `GraftError`
    for an expected failure.
    """

    folder: ProjectFolder
    model: str | None = None
    reporter: Reporter = field(default_factory=NullReporter)

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def settings(self) -> ProjectSettings:
        """The settings of graft.yaml, of all models."""
        return self.folder.settings

    def with_model(self, model: str | None) -> "Project":
        """The same project, working on another of its models."""
        return replace(self, model=model)

    def audit(self, files: Sequence[str] = (), *, row_format: str | None = None) -> Audit:
        """Find rows that would spoil training: in the project's logs, or in other files by its settings.

        `row_format` forces the format of other files; that of the project's logs is in graft.yaml.
        """

        if files:
            return _audit_with_settings(self.folder, files, reporter=self.reporter, row_format=row_format)
        return _audit_project(self.folder, reporter=self.reporter)

    def plan_repair(self, settings: RepairSettings | None = None, *, out: Path | None = None) -> "RepairPlan":
        """List the rows that a teacher would answer again, with tokens and cost. Asks nothing."""
        from graftwork.data.repair.project import RepairJob, default_out, plan_project_repair

        with self.open() as work:
            job = RepairJob(settings or self.settings.data.repair, out or default_out(work))
            return plan_project_repair(work, job)

    def repair(self, settings: RepairSettings | None = None, *, out: Path | None = None) -> "RepairOutcome":
        """Let a teacher answer rows that would be dropped; write the accepted ones to a log of their own."""
        from graftwork.data.repair.project import RepairJob, default_out, repair_project

        with self.open() as work:
            job = RepairJob(settings or self.settings.data.repair, out or default_out(work))
            return repair_project(work, job)

    def corrections(self) -> "Corrections":
        """List corrected answers of captures, and those that contradict each other."""
        from graftwork.data.review import list_corrections

        with self.open() as work:
            return list_corrections(work)

    def judge_labels(self) -> "tuple[JudgeLabel, ...]":
        """List what people think of answers: feedback, corrections and reviews."""
        from graftwork.data.review import list_judge_labels

        with self.open() as work:
            return tuple(list_judge_labels(work))

    def review_items(self) -> "tuple[ReviewItem, ...]":
        """List the rows that people should look at, the most helpful first."""
        from graftwork.data.review import list_items

        with self.open() as work:
            return tuple(list_items(work))

    def prepare(self) -> PreparedData:
        """Filter, redact, deduplicate, split and render the logs into a dataset for each model."""
        return self._run_to("prepare", PreparedData)

    def plan(self) -> Plan:
        """Estimate memory, tokens, steps and minutes of the training run."""
        return self._run_to("plan", Plan)

    def plan_run(self) -> RunPlan:
        """Estimate how long each step of a whole run takes. Runs nothing."""
        from graftwork.pipeline.table import plan_whole_run

        with self.open() as work:
            return plan_whole_run(work)

    def plan_week(self, asked: "WeekRequest | None" = None) -> "WeekSchedule":
        """Plan a week of training over the quotas, windows and prices of all places. Starts nothing."""
        from graftwork.week.project import WeekRequest, plan_project_week

        return plan_project_week(self.folder, asked or WeekRequest())

    def dry_run(self) -> "Preflight":
        """Audit, prepare and plan, then check all that can be checked before training."""
        from graftwork.pipeline.table import dry_run

        with self.open() as work:
            return dry_run(work)

    def train(self) -> TrainOutcome:
        """Train the adapter, or resume it from its last checkpoint."""
        return self._run_to("train", TrainOutcome)

    def train_on_machines(
        self, nodes: int, *, rank: int | None = None, main_address: str | None = None
    ) -> TrainOutcome | None:
        """Train on several machines: as number `rank` of them, or on those that the engine gives. None on
        every machine but the first."""
        from graftwork.train.distributed.multi_node import answer_calls, train_on_cluster, with_machines

        settings = with_machines(self.settings, nodes=nodes, main_address=main_address)
        project = replace(self, folder=replace(self.folder, settings=settings))
        if rank:
            chosen = settings.of_model(self.model or settings.main_model).train
            answer_calls(project.folder, chosen, rank=rank, reporter=self.reporter)
            return None
        if rank is None:
            train_on_cluster(project.folder, nodes=nodes, model=self.model, reporter=self.reporter)
        return project.train()

    def train_all(self) -> "TrainedAll":
        """Train every model of the project; models on the same base share one loaded copy."""
        from graftwork.train.all_models import train_all

        with self.open() as work:
            return train_all(work)

    def sweep(self, request: "SweepRequest", *, write: bool = False) -> "SweepResult":
        """Search learning rate, rank and batch within a budget; `write` sets the best in graft.yaml."""
        from graftwork.train.sweep import run_sweep, write_best

        with self.open() as work:
            result = run_sweep(work, request)
            return write_best(work, result) if write else result

    def train_federated(self, *, again: bool = False) -> "Federation":
        """Train in rounds at the places of `federated:`, whose data stays there."""
        from graftwork.train.federated import run_federation

        with self.open() as work:
            return run_federation(work, again=again)

    def train_router(self, *, target: float = 0.95) -> "TrainedRouter":
        """Train the classifier that chooses the model for a prompt; `target` is its accuracy where sure."""
        from graftwork.train.router import train_router

        with self.open() as work:
            return train_router(work, target=target)

    def evaluate(
        self,
        subjects: Sequence[str] = (),
        *,
        cases: Path | None = None,
        limit: int | None = None,
        shards: int = 1,
        again: bool = False,
    ) -> "Evaluated":
        """Measure base and adapter on the held-out cases; or other `subjects`, or other `cases`.

        The gate decides on the evaluation without subjects, cases and limit.
        """
        from graftwork.evaluate.commands import EvaluationRequest, evaluate_asked

        asked = EvaluationRequest(
            subjects=tuple(subjects), cases=cases, limit=limit, shards=shards, again=again
        )
        with self.open() as work:
            return evaluate_asked(work, asked)

    def savings(self) -> "Savings | None":
        """What the model saves a month at the logged volume; None if the log has no calls of it."""
        from graftwork.evaluate.project import savings_of
        from graftwork.pipeline.table import run_pipeline

        with self.open() as work:
            audit = run_pipeline(work, upto="audit").get("audit", Audit)
            prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
            return savings_of(work, audit, prepared.dataset)

    def predict_escalation(
        self,
        *,
        large: str = "log",
        small: str = "adapter",
        checks: Sequence[str] = (),
        limit: int | None = None,
        max_rate: float | None = None,
        prefix_tokens: int | None = None,
    ) -> "EscalationForecast":
        """Predict what happens if the small model answers first and the large one if a check fails.
        `max_rate` also chooses a threshold of log-probabilities on the validation cases. `prefix_tokens`
        predicts streams that are judged after this many tokens.
        """
        from graftwork.evaluate.measure_escalation import predict_escalation

        with self.open() as work:
            return predict_escalation(
                work,
                large=large,
                small=small,
                checks=checks,
                limit=limit,
                max_rate=max_rate,
                prefix_tokens=prefix_tokens,
            )

    def live_escalation(self) -> "EscalationLive":
        """Live figures of escalation against the last forecast."""
        from graftwork.evaluate.measure_escalation import measure_live

        with self.open() as work:
            return measure_live(work)

    def calibrate(self, *, limit: int | None = None) -> "CalibratedJudge":
        """Compare the judge of graft.yaml with people's labels. The gate requires this before it uses a
        judge.
        """
        from graftwork.data.review import calibrate_judge

        with self.open() as work:
            return calibrate_judge(work, limit=limit)

    def gate(self, *, update: bool = False) -> Verdict:
        """Decide by the rules in graft.yaml. Raises `Stale` if an input is out of date, unless `update`."""
        from graftwork.pipeline.table import run_pipeline

        with self.open() as work:
            allowed = _allowed(work, "gate", update=update)
            return run_pipeline(work, upto="gate", may_do=allowed).get("gate", Verdict)

    def gate_engine(
        self, engine: "EngineSettings | None" = None, *, release: str | None = None, update: bool = False
    ) -> Verdict:
        """Decide whether an engine may serve the last adapter, or a release. The engine answers the cases."""
        from graftwork.evaluate.commands import gate_engine

        with self.open() as work:
            allowed = _allowed(work, "train" if release is None else "prepare", update=update)
            chosen = engine or self.settings.serve.engine
            return gate_engine(work, chosen, release=release, may_do=allowed)

    def gate_family(self, *, release: str | None = None) -> Verdict:
        """Decide about the family as a whole through the real endpoint, with this release in it if given."""
        from graftwork.evaluate.gate.family import gate_family

        with self.open() as work:
            return gate_family(work, release=release)

    def gate_all(self, *, update: bool = False) -> "GatedAll":
        """Decide for every model, corrected for how many are judged at once."""
        from graftwork.evaluate.commands import gate_all

        with self.open() as work:
            allowed = None
            for name in work.project.settings.all_models:
                allowed = _allowed(replace(work, asked_model=name), "gate", update=update)
            return gate_all(work, may_do=allowed)

    def gate_session(self, *, update: bool = False) -> NextStart:
        """Choose the checkpoint from which the next training session starts: this one or the one before."""
        from graftwork.evaluate.commands import judge_session

        with self.open() as work:
            return judge_session(work, may_do=_allowed(work, "evaluate", update=update))

    def release(self) -> Release:
        """Run what is out of date, publish the adapter and promote it. Raises `NegativeResult` if the gate
        does not say deploy."""
        made = self.run_to("release")
        if "release" in made.outputs:
            return made.get("release", Release)
        verdict = made.get("gate", Verdict)
        raise NegativeResult(
            "nothing was released",
            why=f"the gate said {verdict.decision.replace('_', ' ')}: {verdict.reason}",
            fix="`graft gate` shows each rule and what would help",
        )

    def release_prompt(self) -> Release:
        """Publish the prompted base, without an adapter, and promote it. Raises `NegativeResult` if the
        gate does not say deploy to it."""
        from graftwork.registry.prompt_release import release_prompt

        with self.open() as work:
            return release_prompt(work)

    def releases(self, query: ReleaseQuery | None = None) -> tuple[ReleaseEntry, ...]:
        """List the releases, newest first."""
        with self.open() as work:
            return tuple(work.releases.entries(query or ReleaseQuery()))

    def promote_canary(self, name: str, *, share: float, **options: Any) -> "CanaryReport":
        """Let a release answer a share of live sessions until it is promoted or rolled back.

        `options` are the fields of `CanaryRequest`: alias, metric, reason, force, max_sessions, max_seconds,
        every_seconds.
        """
        from graftwork.evaluate.live.canary import CanaryRequest, run_canary

        with self.open() as work:
            return run_canary(work, name, CanaryRequest(share=share, **options))

    def run(self) -> "StepOutputs":
        """Run every step that is out of date, from audit to report. `outputs` has the results by name."""
        return self.run_to(None)

    def run_quick(self) -> "StepOutputs":
        """Train and evaluate on a part of the rows, in minutes. The report says so; nothing is released."""
        from graftwork.pipeline.quick import run_quick

        with self.open() as work:
            return run_quick(work)

    def compare_bases(self, bases: Sequence[str]) -> "BaseComparison":
        """Give two or three bases the same quick trial, and compare them. graft.yaml stays as it is."""
        from graftwork.pipeline.try_bases import compare_bases

        with self.open() as work:
            return compare_bases(work, bases)

    def run_to(self, step: str | None) -> "StepOutputs":
        """Run one step and the steps that it needs, if they are out of date; all steps for None."""
        from graftwork.pipeline.table import run_pipeline

        with self.open() as work:
            return run_pipeline(work, upto=step)

    def status(self) -> "ProjectStatus":
        """Report steps, runs and their health, the endpoint and the live releases. Starts nothing."""
        from graftwork.pipeline.status import project_status

        with self.open() as work:
            return project_status(work)

    def run_cycle(self) -> "CycleState":
        """Run one training cycle, or finish the open one; GracefulStop if it waits for a person."""
        from graftwork.cycle.session import run_once

        with self.open() as work:
            return run_once(work)

    def cycle_status(self) -> "CycleStatus":
        """Report the open cycle, what comes next and the last cycles. Starts nothing."""
        from graftwork.cycle.session import read_status

        with self.open() as work:
            return read_status(work)

    def shadow(self) -> "ShadowSummary | None":
        """Compare the challenger of `serve.shadow` with what users got; None if no shadow is set up."""
        from graftwork.evaluate.live.shadow import summarize_shadow

        with self.open() as work:
            return summarize_shadow(work)

    def drift(self) -> "PromptDrift":
        """Measure how far live captures have moved from the training data, and whether to train again."""
        from graftwork.evaluate.live.drift import measure_drift

        with self.open() as work:
            return measure_drift(work)

    def serve(
        self,
        settings: "ServeSettings | None" = None,
        *,
        on_ready: Callable[[str], None] = lambda _url: None,
        revise: "Callable[[ServeSettings], ServeSettings] | None" = None,
    ) -> None:
        """Serve the releases at an OpenAI-compatible endpoint until a signal arrives.

        `revise` makes the settings of a reload from those in graft.yaml.
        """
        from graftwork.serve.project import serve_here

        if settings is None and revise is None:
            revise = lambda found: found  # noqa: E731
        with self.open() as work:
            serve_here(work, settings or self.settings.serve, on_ready=on_ready, revise=revise)

    def reload_endpoint(self) -> "ReloadResult":
        """Let the running endpoint take over settings and aliases. Says what needs a restart."""
        from graftwork.serve.own_endpoint import reload_endpoint

        return reload_endpoint(self.folder.serving)

    def create_key(
        self,
        name: str,
        *,
        scopes: Iterable[str] = ("models", "feedback"),
        models: Iterable[str] = (),
        budget: "KeyBudget | None" = None,
        expires: str | None = None,
    ) -> "tuple[ApiKey, str]":
        """Create an API key of the endpoint. Also returns its secret, which is stored nowhere."""
        from graftwork.serve.project import create_key

        with self.open() as work:
            return create_key(work, name, scopes=scopes, models=models, budget=budget, expires=expires)

    def keys(self) -> tuple["ApiKey", ...]:
        """The API keys of the endpoint, the oldest first, revoked ones too."""
        with self.open() as work:
            return work.api_keys.list()

    def revoke_key(self, name: str) -> "ApiKey":
        """Revoke the API key with this name or id; running endpoints refuse it a second later."""
        from graftwork.serve.project import revoke_key

        with self.open() as work:
            return revoke_key(work, name)

    @contextmanager
    def serving(self, settings: "ServeSettings | None" = None, *, port: int = 0) -> Iterator[str]:
        """Serve in a thread while the block runs; yields the URL. No challenger gets any traffic."""
        from graftwork.serve.project import serve_in_background

        chosen = (settings or self.settings.serve).model_copy(update={"port": port})
        with self.open() as work, serve_in_background(work, chosen, folder=work.project.serving) as url:
            yield url

    @contextmanager
    def open(self) -> Iterator[OpenProject]:
        """The project's stores, for what has no method here. Closed at the end of the block."""
        with use_project(self.folder, self.reporter, model=self.model) as work:
            yield work

    def _run_to(self, step: str, kind: type[R]) -> R:
        return self.run_to(step).get(step, kind)

    def _repr_html_(self) -> str:
        from graftwork.views.html import render_fields

        models = ", ".join(self.settings.all_models)
        fields = {"folder": str(self.root), "base": self.settings.base, "models": models}
        return render_fields(f"Project {self.settings.project}", fields)


def open_project(
    path: str | Path | None = None, *, model: str | None = None, reporter: Reporter | None = None
) -> Project:
    """Open the project in `path`, or the one that the working directory is in.

    `reporter` receives progress: subclass `NullReporter` and override what you need.
    """
    folder = open_folder(Path(path) if path is not None else None)
    return Project(folder, model=model, reporter=reporter or NullReporter())


def init_project(folder: str | Path, logs: Sequence[str] = (), *, base: str | None = None) -> Project:
    """Write a graft.yaml that fits the logs, and open the project. An existing file is never overwritten.

    Without `base`, one of the catalog is chosen by task, machine and license.
    """
    from graftwork.project.init import start_project

    start_project(Path(folder), logs, base=base)
    return open_project(folder)


def propose_project(folder: str | Path, logs: Sequence[str], *, base: str | None = None) -> "Started":
    """What `init_project` would write for these logs, with the bases that were weighed. Writes nothing."""
    from graftwork.project.init import start_project

    return start_project(Path(folder), logs, base=base, write=False)


def has_project(folder: Path) -> bool:
    return (folder / PROJECT_FILE).is_file()


def audit_files(
    files: Sequence[str], *, row_format: str | None = None, reporter: Reporter | None = None
) -> Audit:
    """Audit files, folders or globs with the default settings; no project is needed.

    Tokens are counted by the tokenizer of the embedded base if it is available.
    """
    settings = _force_format(DataSettings(logs=tuple(files)), row_format)
    count = counter_here(template_here(base_models.EMBEDDED, settings), settings)
    return _audit_in_scratch_folder(AuditContext(settings=settings), reporter or NullReporter(), count=count)


def pull_model(
    name: str,
    *,
    project: str | Path = ".",
    update: bool = False,
    weights: bool = True,
    reporter: Reporter | None = None,
) -> base_models.PulledModel:
    """Fetch a model at the commit that the project uses, or with `update` at the newest of its revision."""
    return base_models.pull_model(
        name,
        project_folder=Path(project),
        store=report_downloads(reporter or NullReporter()),
        update=update,
        weights=weights,
    )


def list_models(*, project: str | Path = ".") -> base_models.LocalModels:
    """List the base models on this machine, with their commits and sizes; those of a project are marked."""
    root = Path(project)
    bases: tuple[str, ...] = ()
    if (root / PROJECT_FILE).is_file():
        settings = open_folder(root).settings
        bases = tuple(settings.of_model(model).base for model in settings.all_models)
    return base_models.list_models(project_folder=root, bases=bases)


def remove_model(name: str) -> base_models.RemovedModels:
    """Remove a model from this machine: one commit if it is named, else all of them."""
    return base_models.remove_model(name)


def changed_at(path: "Path | os.DirEntry[str]") -> float:
    """When a file or a folder was last changed, in seconds since 1970; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _render(record: Record) -> str:
    from graftwork.views.html import render_record

    return render_record(record)


Record.notebook_renderer = _render


def _allowed(work: OpenProject, upto: str, *, update: bool) -> Collection[str] | None:
    """The steps that the gate may run: all of them with `update`, otherwise only the decision itself."""
    from graftwork.pipeline.status import require_fresh

    if update:
        return None
    model = f" --model {work.model}" if work.asked_model is not None else ""
    session = " --session" if upto == "evaluate" else ""
    require_fresh(work, upto=upto, update=f"graft gate{model}{session} --update")
    return ("gate",)


def _audit_with_settings(
    folder: ProjectFolder, files: Sequence[str], *, reporter: Reporter, row_format: str | None = None
) -> Audit:
    """Audit other files than the project's logs, with the project's data settings."""
    template = template_here(folder.settings.base, folder.settings.data, root=folder.root)
    context = audit_context_here(folder, template=template)
    settings = _force_format(context.settings.model_copy(update={"logs": tuple(files)}), row_format)
    count = counter_here(template, settings)
    return _audit_in_scratch_folder(replace(context, settings=settings), reporter, count=count)


def _force_format(settings: DataSettings, row_format: str | None) -> DataSettings:
    if row_format is None:
        return settings
    try:
        return DataSettings.model_validate({**settings.model_dump(), "format": row_format, "mapping": None})
    except ValidationError as error:
        message = explain_error(error.errors()[-1])
        raise UserError(
            f"there is no format {row_format!r}", why=message, fix="use one of these", where="--format"
        ) from None


def _audit_project(folder: ProjectFolder, *, reporter: Reporter) -> Audit:
    """Audit the project's logs."""
    from graftwork.data.prepare import audit_logs

    data = folder.settings.data
    template = template_here(folder.settings.base, data, root=folder.root)
    with ExitStack() as stack:
        try:
            stack.enter_context(worker.hold_lock(folder.state / "pipeline"))
            cache = folder.sifted
        except Busy:
            # A run holds the project, and its cache of row features.
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-audit-")))
        return audit_logs(
            audit_context_here(folder, template=template),
            folder=cache,
            root=folder.root,
            on_progress=progress_listener(reporter),
            count_tokens=counter_here(template, data),
        )


def _audit_in_scratch_folder(
    context: AuditContext, reporter: Reporter, *, count: "CountTokens | None"
) -> Audit:
    from graftwork.data.prepare import audit_logs

    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(
            context, folder=Path(folder), on_progress=progress_listener(reporter), count_tokens=count
        )
