"""The steps of a cycle on a real project: those of `graft run`, with what comes before and after.

Input: an open project and the name of a step. Output: a summary of what it did; its whole output is an entry
of the ledger under the cycle's number, from where the steps after it read it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from graftwork.cycle.coordinator import CycleStepResult
from graftwork.cycle.decide import CycleFacts
from graftwork.cycle.settings import (
    CANARY,
    COLLECT,
    DELIVER,
    PROMOTE,
    CanarySettings,
    DeliverSettings,
    NotifySettings,
)
from graftwork.cycle.state import CoordinatorState, CycleState, Notice
from graftwork.data.capture_export import CaptureExport
from graftwork.data.ingest.files import find_sources
from graftwork.data.project import PreparedData
from graftwork.evaluate.live.ab import ABResult
from graftwork.evaluate.live.canary import CanaryComparison, explain_step
from graftwork.evaluate.live.comparison import choose_live_metric, find_experiment
from graftwork.evaluate.live.drift import measure_drift
from graftwork.evaluate.project import Evaluated
from graftwork.files.disk import Journal, write_atomic
from graftwork.fleet.control import what_failed
from graftwork.fleet.jobs import (
    FleetRequest,
    find_finished,
    find_jobs,
    planned_as,
    stop,
    summarize_costs,
    train_there,
)
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.pipeline.steps.release import TryOut, WrittenReport
from graftwork.pipeline.table import STEPS, get_step, run_step
from graftwork.process.alert import ALERTS_FILE, check_webhook, post, run_command, split_command
from graftwork.project.open_project import OpenProject, current_user, timestamp
from graftwork.records.base import Record
from graftwork.records.dataset import Audit
from graftwork.records.errors import GraftError, UserError, WorkerFailed
from graftwork.records.fleet import FleetJob
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.deploy import HERE, Question, deploy
from graftwork.registry.index import Change, promote
from graftwork.registry.project import full_alias, promote_release, roll_back_release
from graftwork.serve.routing import make_experiment
from graftwork.store.cycles import name_cycle
from graftwork.text.redact import publish_text

ENDED_WELL = ("promoted", "rolled_back", "not_promoted", "nothing_new")
BY_HAND = "by hand"
KEPT_CYCLES = 10
"""Cycles whose outputs are stored in full; they contain every answer of the evaluation."""
ALERTS_SHOWN = ("stalled", "failed", "out_of_memory")
SPEND_SHARES = (0.5, 0.8, 1.0)
"""Shares of `fleet.caps.month_usd`; a notice is sent at each."""


class ProjectRunner:
    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self._lines: dict[Path, tuple[tuple[int, int], int]] = {}

    def measure_facts(self) -> CycleFacts:
        when = self._work.settings.cycle.when
        drift = None
        if when.drift is not None and (drifts := measure_drift(self._work)).all is not None:
            drift = drifts.all.low
        return CycleFacts(rows=self._count_rows() if when.new_rows is not None else None, drift=drift)

    def do(self, step: str, cycle: CycleState) -> CycleStepResult:
        work = self._of_model(cycle)
        if step == COLLECT:
            for table_step in STEPS:
                # What the steps of an old cycle made; its summary stays.
                work.ledger.forget(name_cycle(cycle.number - KEPT_CYCLES, table_step.name))
            return self._collect(work)
        outputs = self._load(work, cycle)
        if step == CANARY:
            return watch_canary(work, cycle, outputs.get("release", Release), now=time.time())
        if step == PROMOTE:
            return promote_or_roll_back(work, cycle, outputs.get("release", Release))
        if step == DELIVER:
            return deliver(work, cycle, outputs.get("release", Release), outputs)
        if step == "train" and work.settings.cycle.place != "local":
            outputs = train_at_place(work, outputs)
            # The steps after this one continue from what was trained.
            work.cycles.keep_output(cycle, step, "plan", outputs.get("plan", Plan))
        output = run_step(work, step, outputs)
        work.cycles.keep_output(cycle, step, step, output)
        summary = summarize(output)
        if step == "plan":
            # Whether the last cycle of this model trained the same thing, and finished.
            ended = (
                earlier
                for earlier in work.cycles.history()
                if earlier.model == cycle.model and earlier.outcome in ENDED_WELL
            )
            last = None if cycle.cause.startswith(BY_HAND) else next(ended, None)
            summary["same_as_last"] = last is not None and last.summary("plan").get("run") == summary["run"]
        return CycleStepResult(summary)

    def find_missing(self, cycle: CycleState, here: str) -> str:
        work = self._of_model(cycle)
        for step in STEPS:
            state = cycle.step(step.name)
            if state is None or state.status != "done":
                continue
            entry = work.ledger.get(name_cycle(cycle.number, step.name))
            if entry is None:
                return step.name
            if state.place != here and not step.still_there(work, step.makes.model_validate(entry.output)):
                return step.name
        return ""

    def abandon(self, cycle: CycleState) -> None:
        stop_jobs(self._work, cycle)

    def watch(self, state: CoordinatorState) -> tuple[dict[str, Any], tuple[Notice, ...]]:
        cycle = state.cycle
        if cycle is None:
            return {}, ()
        spent, notices = self._watch_spend(state, cycle)
        run = str(cycle.summary("plan").get("run", ""))
        if not run:
            return spent, tuple(notices)
        lines = Journal(self._work.project.runs / run / ALERTS_FILE).read()
        reported = state.alerts.get(run, 0)
        for number, line in enumerate(lines[reported:], reported):
            if isinstance(line, dict) and line.get("kind") in ALERTS_SHOWN:
                kind = "stalled" if line["kind"] == "stalled" else "failed"
                notices.append(
                    Notice(
                        id=f"{cycle.number}-{run}-{number}",
                        kind=kind,
                        cycle=cycle.number,
                        at=float(line.get("at", 0.0)),
                        what=f"run {run}: {line.get('what', '')}",
                        why=str(line.get("why", "")),
                        fix=str(line.get("fix", "")),
                    )
                )
        return {**spent, "alerts": {run: len(lines)}}, tuple(notices)

    def send(self, notice: Notice) -> str:
        settings = self._work.settings
        addressed = notice.model_copy(update={"project": settings.project})
        self._work.reporter.info(f"{notice.what}: {notice.why}" if notice.why else notice.what)
        return send_notice(addressed, settings.cycle.notify)

    def _of_model(self, cycle: CycleState) -> OpenProject:
        work = replace(self._work, asked_model=cycle.model)
        return replace(work, publish_to=publish_to(work))

    def _load(self, work: OpenProject, cycle: CycleState) -> StepOutputs:
        """Return the outputs of the steps of this cycle."""
        outputs = StepOutputs({})
        for step in STEPS:
            state = cycle.step(step.name)
            entry = work.ledger.get(name_cycle(cycle.number, step.name))
            if state is not None and state.status == "done" and entry is not None:
                outputs.outputs[step.name] = get_step(step.name).makes.model_validate(entry.output)
        return outputs

    def _collect(self, work: OpenProject) -> CycleStepResult:
        """Export the captures that may become data, to the log file that the settings name."""
        settings = work.settings
        summary: dict[str, Any] = {}
        if settings.cycle.collect is not None:
            export = CaptureExport(work, settings.data.captures, feedback=settings.data.captures.feedback)
            text = "".join(capture.to_line() + "\n" for capture in export)
            path = work.project.root / settings.cycle.collect
            if text and (not path.exists() or path.read_text() != text):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, text, private=True)
            summary = {"captures": export.written, "left_out": sum(export.left_out.values())}
        if settings.cycle.when.new_rows is not None:
            summary["rows"] = self._count_rows()
        return CycleStepResult(summary)

    def _count_rows(self) -> int:
        """Captures that may become data, and lines of the log files that are not exported from them."""
        work = self._work
        collect = work.settings.cycle.collect
        total = 0
        if collect is not None:
            export = CaptureExport(
                work, work.settings.data.captures, feedback=work.settings.data.captures.feedback
            )
            total = sum(1 for _ in export)
        root = work.project.root
        try:
            files = find_sources(work.settings.data.logs, root=root)
        except GraftError:
            return total
        return total + sum(self._count_lines(root / name) for name in files if name != collect)

    def _count_lines(self, path: Path) -> int:
        """Lines of a file; counted again when the file has changed."""
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
            if (cached := self._lines.get(path)) is not None and cached[0] == stamp:
                return cached[1]
            with path.open("rb") as handle:
                lines = sum(piece.count(b"\n") for piece in iter(lambda: handle.read(2**20), b""))
        except OSError:
            return 0
        self._lines[path] = stamp, lines
        return lines

    def _watch_spend(self, state: CoordinatorState, cycle: CycleState) -> tuple[dict[str, Any], list[Notice]]:
        """A notice for each share of the month's cap that is spent or reserved for the first time."""
        settings = self._work.settings
        if settings.cycle.place == "local":
            return {}, []
        costs = summarize_costs(self._work)
        cap, spent = settings.fleet.caps.month_usd, costs.month_usd
        before = state.spend_share if state.spend_month == costs.month else 0.0
        passed = [share for share in SPEND_SHARES if cap and spent >= share * cap]
        share = max(passed, default=0.0)
        if share <= before:
            return {}, []
        notice = Notice(
            id=f"spend-{costs.month}-{share}",
            kind="spend",
            cycle=cycle.number,
            at=time.time(),
            what=f"${spent:.2f} of ${cap:.2f} of this month are spent or reserved",
            fix="graft fleet ledger",
        )
        return {"spend_month": costs.month, "spend_share": share}, [notice]


def send_notice(notice: Notice, settings: NotifySettings) -> str:
    """Send a notice; returns why it failed, or nothing. A channel that accepted it may get it again if
    another one failed.
    """
    body = notice.model_dump_json(exclude={"tries", "not_before"}).encode()
    failures = []
    try:
        if settings.command and (failure := run_command(split_command(settings.command), body)):
            failures.append(f"the command {publish_text(failure)}")
        if settings.webhook and (failure := post(check_webhook(settings.webhook), body)):
            failures.append(f"the webhook at {urlsplit(settings.webhook).hostname} {failure}")
    except UserError as mistake:
        failures.append(mistake.what)
    return "; ".join(failures)


def summarize(output: Record) -> dict[str, Any]:
    """Summarize what the coordinator remembers of a step in a few figures."""
    summary: dict[str, Any] = {}
    match output:
        case Audit():
            summary = {"rows": output.rows, "usable": output.usable}
        case PreparedData():
            rows = {name: split.rows for name, split in output.dataset.splits.items()}
            summary = {"dataset": output.dataset.content_hash[:12], "rows": rows}
        case Plan():
            summary = {"run": run_id_of(output), "minutes": round(output.minutes.value, 1)}
        case TrainOutcome():
            summary = {"run": output.run_id, "steps": output.steps, "restarts": output.restarts}
        case Evaluated():
            summary = {"answers": output.report.candidate.generation.answers}
        case Verdict():
            summary = {"decision": output.decision, "reason": output.reason}
        case Release():
            summary = {"id": output.id}
        case WrittenReport():
            summary = {"path": output.path}
    return summary


def choose_place(work: OpenProject) -> FleetRequest:
    """Choose where the next run trains. The schedule of a week replaces this choice."""
    return FleetRequest(work.settings.cycle.place, gpu=work.settings.cycle.gpu)


def train_at_place(work: OpenProject, outputs: StepOutputs) -> StepOutputs:
    """Fetch the result of the run into its folder here; raises what kept the job from finishing.

    Returns `outputs` with the plan that was trained: for the device of the place, whose run has a different
    id.
    """
    return _with_plan(work, outputs, train_there(work, outputs, choose_place(work)))


def find_trained(work: OpenProject, outputs: StepOutputs) -> StepOutputs | None:
    """`outputs` with the plan that was trained, here or at a place; None: its run is not complete."""
    finished = find_finished(work, outputs.get("plan", Plan))
    return None if finished is None else _with_plan(work, outputs, finished)


def _with_plan(work: OpenProject, outputs: StepOutputs, run_id: str) -> StepOutputs:
    if run_id == run_id_of(outputs.get("plan", Plan)) or (plan := planned_as(work, run_id)) is None:
        return outputs
    return StepOutputs({**outputs.outputs, "plan": plan})


def stop_jobs(work: OpenProject, cycle: CycleState) -> None:
    """Stop the open jobs of a canceled cycle. The fleet's reconciliation retries what fails here."""
    plan = _planned_in(work, cycle)
    jobs = find_jobs(work, plan) if plan is not None else []
    for job in jobs:
        # Asked before each: stopping one takes a while, and the next cycle may begin in between.
        if job.is_open and not _is_followed(work, cycle, job):
            try:
                stop(work, job, at_once=True)
            except Exception as error:  # whatever a place may raise: the other jobs are stopped all the same
                work.reporter.info(f"job {job.id} at {job.place} is not stopped yet: {what_failed(error)}")
            else:
                work.reporter.info(f"job {job.id} at {job.place} is stopped: the cycle was canceled")


def _is_followed(work: OpenProject, canceled: CycleState, job: FleetJob) -> bool:
    """Whether the cycle that is open now follows this job: the same data and settings are the same run."""
    newest = work.cycles.read().open_cycle
    if newest is None or newest.number == canceled.number:
        return False
    step, plan = newest.step("train"), _planned_in(work, newest)
    if step is None or step.status == "waiting" or plan is None:
        return False
    return any(followed.id == job.id for followed in find_jobs(work, plan))


def _planned_in(work: OpenProject, cycle: CycleState) -> Plan | None:
    entry = work.ledger.get(name_cycle(cycle.number, "plan"))
    return Plan.model_validate(entry.output) if entry is not None else None


CANDIDATE = "candidate"
"""The alias of a release that waits for an approval."""
LOOK_SECONDS = 60.0
LONGEST_WAITS = 3.0
"""Without enough sessions the canary ends after its minutes times this factor."""


def publish_to(work: OpenProject) -> str | None:
    """The alias that a new release gets first; None if it goes live at once."""
    cycle, split = work.settings.cycle, work.settings.serve.split
    if cycle.canary is not None and split is not None:
        return split.challenger
    return CANDIDATE if "promote" in cycle.approve else None


def watch_canary(work: OpenProject, cycle: CycleState, release: Release, *, now: float) -> CycleStepResult:
    """Compare the new release with the champion in live traffic so far."""
    settings, split = work.settings.cycle.canary, work.settings.serve.split
    assert settings is not None
    assert split is not None
    champion = work.releases.aliases().get(full_alias(work))
    if full_alias(work, split.challenger) != split.challenger:
        return CycleStepResult({"verdict": "promote", "why": "live traffic is split for the main model only"})
    if champion is None or champion == release.id:
        return CycleStepResult({"verdict": "promote", "why": "there is no other release to compare with"})
    pair = work.releases.get(champion), release
    experiment = find_experiment(work, pair, None)
    if experiment is None:
        # No session was assigned yet. What either answered before is not part of the canary.
        experiment = make_experiment(split, champion=champion, challenger=release.id).experiment
    metric = choose_live_metric(work, settings.metric)
    look = CanaryComparison(work, pair, metric=metric, experiment=experiment)
    comparison = look.look()
    step, state = look.decide(comparison), cycle.step("canary")
    if step != "wait":
        verdict = "promote" if step == "promote" else "roll_back"
        return CycleStepResult(
            {**_facts(comparison), "verdict": verdict, "why": explain_step(step, comparison, look)}
        )
    started_at = state.started_at if state is not None and state.started_at is not None else now
    return end_or_wait(comparison, settings, started_at=started_at, now=now)


def _facts(comparison: ABResult) -> dict[str, object]:
    new = comparison.arms["B"]
    failures = new.failures + new.hung_up
    return {"sessions": new.sessions, "failures": failures, "failed_checks": new.failed_checks}


def end_or_wait(
    comparison: ABResult, settings: CanarySettings, *, started_at: float, now: float
) -> CycleStepResult:
    """No decision yet: the gate's verdict counts once the time is over; until then check again."""
    new, facts = comparison.arms["B"], _facts(comparison)
    enough = new.sessions >= settings.fewest_sessions
    minutes = (now - started_at) / 60
    if minutes >= settings.minutes and enough:
        why = f"{new.sessions} sessions in {minutes:.0f} min, no harm seen"
        return CycleStepResult({**facts, "verdict": "promote", "why": why})
    if minutes >= settings.minutes * LONGEST_WAITS:
        why = f"only {new.sessions} sessions in {minutes:.0f} min; the gate's verdict counts"
        return CycleStepResult({**facts, "verdict": "promote", "why": why})
    wait_reason = (
        f"{new.sessions} of {settings.fewest_sessions} sessions, {minutes:.0f} of {settings.minutes:.0f} min"
    )
    return CycleStepResult(
        facts, again_at=now + min(LOOK_SECONDS, settings.minutes * 60 or 1.0), why=wait_reason
    )


def promote_or_roll_back(work: OpenProject, cycle: CycleState, release: Release) -> CycleStepResult:
    """Make the release live, or withdraw it from traffic, as the canary decided."""
    verdict = cycle.summary("canary")
    alias, first = full_alias(work), publish_to(work)
    champion = work.releases.aliases().get(alias)
    if verdict.get("verdict") == "roll_back":
        if first is not None and champion is not None:
            # Both aliases point at one release: the experiment is over.
            change = Change(current_user(), timestamp(), f"canary: {verdict.get('why', '')}")
            live = work.releases.get(champion)
            promote(work.releases, live, alias=full_alias(work, first), change=change, require_verdict=False)
        return CycleStepResult(
            {"action": "rolled_back", "release": release.id, "alias": alias, "why": verdict.get("why", "")}
        )
    approved = next((approval for approval in cycle.approvals if approval.step == "promote"), None)
    reason = f"cycle {cycle.number}" + (f", approved by {approved.who}" if approved else "")
    moves = work.releases.alias_log(alias)
    promoted = [
        index for index, move in enumerate(moves) if move.release_id == release.id and move.why == reason
    ]
    if champion != release.id and promoted and promoted[-1] + 1 < len(moves):
        # An earlier attempt of this cycle had promoted it, and the alias left it since.
        why = moves[promoted[-1] + 1].why
        return CycleStepResult({"action": "rolled_back", "release": release.id, "alias": alias, "why": why})
    promote_release(work, release.id, reason=reason)
    return CycleStepResult(
        {
            "action": "promoted",
            "release": release.id,
            "alias": alias,
            "previous": champion if champion != release.id else release.parent,
            "why": verdict.get("why", ""),
        }
    )


def deliver(work: OpenProject, cycle: CycleState, release: Release, outputs: StepOutputs) -> CycleStepResult:
    """Deliver the release to every serving machine. If one of them cannot serve it, all roll back."""
    work, targets = replace(work, publish_to=None), work.settings.cycle.deliver
    # What the release was tried with here: it must be able to answer that there.
    tried = outputs.get("try", TryOut).tried if "try" in outputs.outputs else ()
    questions: list[Question] = [[{"role": "user", "content": attempt.question}] for attempt in tried]
    champion = work.releases.aliases().get(full_alias(work))
    if champion is not None and champion != release.id:
        # An earlier attempt rolled it back, or a person promoted another one.
        _bring(work, champion, targets, questions)
        why = f"{full_alias(work)} is {champion[:12]}"
        return _rolled_back(release, [target.to for target in targets], why)
    reached: list[DeliverSettings] = []
    for target in targets:
        done = deploy(work, release.id, to=target.to, graft=target.graft, questions=questions)
        if not done.ok:
            # The alias here, and the machines that had taken the release, get the one before it.
            champion = work.releases.aliases().get(full_alias(work))
            if champion == release.id and release.parent is not None:
                reason = "a serving machine could not answer with it"
                roll_back_release(work, release.id, reason=reason)
                # A person may have promoted another one in the meantime.
                champion = work.releases.aliases().get(full_alias(work))
            elif champion == release.id:
                champion = None
            if champion is not None:
                local_targets = [
                    contact for contact in reached if "://" not in contact.to and contact.to != HERE
                ]
                _bring(work, champion, local_targets, questions)
            return _rolled_back(release, [target.to], f"{target.to}: {done.why}")
        reached.append(target)
    return CycleStepResult(
        {"action": "delivered", "release": release.id, "to": [target.to for target in reached]}
    )


def _rolled_back(release: Release, to: list[str], why: str) -> CycleStepResult:
    return CycleStepResult({"action": "rolled_back", "release": release.id, "to": to, "why": why})


def _bring(
    work: OpenProject, champion: str, targets: Sequence[DeliverSettings], questions: list[Question]
) -> None:
    """Deploy the champion to all of these machines; raises if one of them does not serve it."""
    failures: list[str] = []
    for target in targets:
        try:
            done = deploy(work, champion, to=target.to, graft=target.graft, requests=1, questions=questions)
        except GraftError as error:
            failures.append(f"{target.to}: {error.what}")
        else:
            if not done.ok:
                failures.append(f"{target.to}: {done.why}")
    if failures:
        raise WorkerFailed(
            f"not every serving machine went back to release {champion[:12]}",
            why="; ".join(failures),
            fix=f"graft release deploy {champion[:12]} --ssh TARGET, for each of them",
        )
