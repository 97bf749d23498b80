"""Parts of the project of `web_project.py` that other commands make: cycles, components, escalation, a week.

In: an open project. Out: the records and files that `graft up`, `graft generate`, `graft eval escalation` and
`graft plan week` would leave, without training, sandbox or search.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from graftwork.components.attempts import ComponentModel, RecordedAnswers
from graftwork.components.inside import read_facts
from graftwork.components.plan import load_plan
from graftwork.components.session import GenerateJob, generate
from graftwork.components.settings import GenerateOptions
from graftwork.components.verifier import (
    Evidence,
    MutationScore,
    SourceFacts,
    SourceVerdict,
    Submission,
    case_ids,
)
from graftwork.cycle.settings import CYCLE_STEPS
from graftwork.cycle.state import Approval, CoordinatorState, CycleState, CycleStepState, LogEntry
from graftwork.evaluate.escalation import write_forecast
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import STEPS
from graftwork.process import clock
from graftwork.process.heartbeat import HEARTBEAT_FILE
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.fleet import Beat, Vitals
from graftwork.records.live import (
    EscalationCurve,
    EscalationForecast,
    EscalationOption,
    EscalationPoint,
    MeasuredShare,
)
from graftwork.records.week import ShownSession, WeekSchedule, WhatIf

CONVERTER = Path(__file__).parents[3] / "examples" / "converter"
DAY = 86400.0
SETTINGS = """\
cycle: {schedule: "0 2 * * *", when: {new_rows: 500}, approve: [promote]}
fleet:
  places:
    kaggle: {speed: 1.0, quotas: [{hours: 30, per: week}], session_hours: 12, by_hand: "no"}
    own: {speed: 1.6, windows: ["22:00-07:00"], by_hand: "no"}
    rented: {place: local, speed: 4.0, usd_per_hour: 0.5, by_hand: "no"}
plan: {week: {spend_usd: 10}}
"""


def mark_fresh(work: OpenProject) -> None:
    """The steps that have a result were done on the inputs as they are."""
    made, identities = StepOutputs({}), dict[str, str]()
    for step in STEPS:
        entry = work.ledger.get(name_entry(work, step.name))
        if entry is None:
            return
        inputs, output = step.inputs_of(work, made, identities), step.makes.model_validate(entry.output)
        work.ledger.put(
            name_entry(work, step.name),
            fingerprint=inputs.fingerprint,
            output=entry.output,
            finished_at=entry.finished_at,
            seconds=entry.seconds,
        )
        made.outputs[step.name], identities[step.name] = output, step.identity(output)


def add_cycles(work: OpenProject, *, now: float) -> None:
    """Three cycles that ended, and one whose promotion waits for a person."""
    outcomes = (
        ("promoted", "the gate said deploy", "by the schedule"),
        ("not_promoted", "the gate said iterate: token F1 has not improved", "by the schedule"),
        ("failed", "train failed after 5 attempts: the worker was killed by the kernel", "612 new rows"),
    )
    for number, (outcome, reason, cause) in enumerate(outcomes, 1):
        began = now - (4 - number) * DAY
        ended = _cycle(number, cause, began).model_copy(
            update={"outcome": outcome, "reason": reason, "finished_at": began + 2900}
        )
        work.cycles.change(lambda state, ended=ended: state.model_copy(update={"cycle": ended}))
    opened = _cycle(4, "by the schedule", now - 3600, upto="promote")
    approved = Approval(step="train", who="ada", at=now - 3000, why="the card is free")
    log = (
        LogEntry(at=now - 2 * DAY, who="ada", action="pause", why="the card is needed"),
        LogEntry(at=now - 1.9 * DAY, who="ada", action="resume"),
        LogEntry(at=now - 3000, who="ada", action="approve", what="train", why="the card is free"),
    )
    opened = opened.model_copy(update={"approvals": (approved,)})
    work.cycles.change(lambda _state: CoordinatorState(cycle=opened, log=log, rows_counted=1200))


def _cycle(number: int, cause: str, began: float, upto: str = "") -> CycleState:
    steps, at, done = [], began, True
    summaries = {
        "collect": {"captures": 214},
        "train": {"run": "000005009aab"},
        "gate": {"decision": "deploy"},
    }
    for name in CYCLE_STEPS:
        done = done and name != upto
        took = 2400.0 if name == "train" else 20.0
        steps.append(
            CycleStepState(
                name=name,
                status="done" if done else "waiting",
                started_at=at if done else None,
                finished_at=at + took if done else None,
                summary=summaries.get(name, {}) if done else {},
            )
        )
        at += took
    return CycleState(
        number=number, model="main", cause=cause, version="0", started_at=began, steps=tuple(steps)
    )


class PretendVerifier:
    """Verdicts without a sandbox: a source that parses and is long enough holds its cases."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict

    def verify(self, submissions: Sequence[Submission]) -> list[SourceVerdict]:
        return [self._verdict(each) for each in submissions]

    def _verdict(self, given: Submission) -> SourceVerdict:
        facts = SourceFacts.model_validate(read_facts(given.source, given.component.function))
        ids = case_ids(given.component, given.stage)
        failing = "" if facts.defines and not facts.syntax else "is not Python: SyntaxError, line 1"
        if not failing and self._strict and len(given.source) % 3:
            failing = '["a  b"] should give "a b", gives "a  b"'
        cases = dict.fromkeys(ids, "")
        if failing:
            cases = {each: failing if number % 2 == 0 else "" for number, each in enumerate(ids)}
        return SourceVerdict(
            ok=not failing, reason=failing, cases=cases, facts=facts, values=given.component.id
        )

    def measure(self, submissions: Sequence[Submission]) -> list[Evidence | None]:
        lines = [given.source.count("\n") for given in submissions]
        return [Evidence(events=12 * count, peak_bytes=900, ran=count, executable=count) for count in lines]

    def mutate(self, submissions: Sequence[Submission]) -> list[MutationScore]:
        return [MutationScore(mutants=10, killed=10 - number % 3) for number, _ in enumerate(submissions)]


def add_generations(folder: Path) -> None:
    """The components of examples/converter, before and after training."""
    plan = load_plan(CONVERTER / "converter.tiki")
    for name, strict in (("components/before", True), ("components/after", False)):
        recorded = RecordedAnswers(CONVERTER / "answers.jsonl")
        label = "champion" if strict else "run:000005009aab"
        model = ComponentModel(label, recorded.digest, recorded.ask)
        settings = GenerateOptions(samples=2, rounds=1, hacks=False)
        generate(GenerateJob(plan, model, folder / name, settings, verifier=PretendVerifier(strict=strict)))


def add_forecast(work: OpenProject) -> None:
    cases = 180
    points = tuple(_point(-0.05 * step, step / 12, cases) for step in range(13))
    chosen = points[4]
    options = (
        EscalationOption(
            checks=(), escalated=_share(0.0, cases), quality=_share(0.71, cases), cost_per_1000=0.4
        ),
        EscalationOption(
            checks=("json_valid",),
            escalated=_share(0.12, cases),
            quality=_share(0.78, cases),
            cost_per_1000=1.9,
        ),
    )
    large = EscalationOption(
        checks=(), escalated=_share(1.0, cases), quality=_share(0.92, cases), cost_per_1000=12.0
    )
    forecast = EscalationForecast(
        small="adapter",
        large="log",
        metric="token_f1",
        cases=cases,
        chosen=options[1],
        options=options,
        large_alone=large,
        gain_over_small=0.07,
        gain_low=0.02,
        gain_high=0.12,
        loss_to_large=0.14,
        loss_low=0.09,
        loss_high=0.19,
        curve=EscalationCurve(
            points=points,
            chosen=chosen,
            validation_cases=90,
            validation_escalated=0.33,
            validation_quality=0.86,
            max_rate=0.35,
            auc=0.78,
        ),
        made_at=datetime(2026, 11, 2, tzinfo=UTC).isoformat(),
        model="champion",
    )
    write_forecast(work.project.state, forecast)


def _share(value: float, n: int) -> MeasuredShare:
    half = 1.96 * math.sqrt(max(value * (1 - value), 0.001) / n)
    return MeasuredShare(value=value, low=max(value - half, 0.0), high=min(value + half, 1.0), n=n)


def _point(threshold: float, escalated: float, cases: int) -> EscalationPoint:
    quality = 0.71 + 0.21 * (1 - (1 - escalated) ** 2.4)
    return EscalationPoint(
        threshold=threshold,
        escalated=_share(escalated, cases),
        quality=_share(quality, cases),
        cost_per_1000=0.4 + 11.6 * escalated,
    )


def write_week(folder: Path, *, start: datetime) -> None:
    """A week that `graft plan week --out week.json` could have written."""
    shown = (
        ("own", 22, 9),
        ("own", 46, 9),
        ("own", 70, 9),
        ("kaggle", 30, 12),
        ("kaggle", 78, 12),
        ("rented", 10, 6),
    )
    sessions = tuple(
        ShownSession(
            place=place,
            model="main",
            start=60 * hour,
            end=60 * (hour + hours),
            train=60 * hours - 20,
            starts_at=start + timedelta(hours=hour),
            ends_at=start + timedelta(hours=hour + hours),
            hours=float(hours),
            cost_usd=3.0 if place == "rented" else 0.0,
            by_hand=place == "kaggle",
        )
        for place, hour, hours in shown
    )
    week = WeekSchedule(
        start=start,
        end=start + timedelta(days=7),
        now=start,
        timezone="UTC",
        scenario="sequential",
        sessions=sessions,
        models=(),
        places=(),
        value=61.4,
        bound=62.1,
        gap=0.012,
        optimal=False,
        cost_usd=3.0,
        cap_usd=10.0,
        scenarios=(),
        what_if=(
            WhatIf(change="$10 more to spend", value=64.0, gain=2.6),
            WhatIf(change="kaggle: one more hour of quota and session", value=61.7, gain=0.3),
        ),
    )
    (folder / "week.json").write_text(week.to_json())


@contextmanager
def working_run(work: OpenProject, *, done: int = 44, steps: int = 72) -> Iterator[str]:
    """The newest run as if it were trained now: with a heartbeat, a lock, and the first `done` steps."""
    run = work.runs.list(limit=1)[0]
    folder, now = Path(run.folder), time.time()
    journal = folder / "steps.jsonl"
    journal.write_text("".join(f"{line}\n" for line in journal.read_text().splitlines()[:done]))
    work.runs.update(run.id, state="running", when=datetime.now(UTC).isoformat(timespec="seconds"))
    beat = Beat(
        pid=os.getpid(),
        phase="train",
        done=done,
        total=steps,
        at=now,
        started=now - 4.6 * done,
        seconds_left=4.6 * (steps - done),
        detail={"seconds": 4.6},
        vitals=Vitals(at=now, memory_gib=2.31, cpu_cores=1.9),
        steady=clock.steady(),
        started_steady=clock.steady() - 4.6 * done,
        boot=clock.boot_id(),
    )
    (folder / HEARTBEAT_FILE).write_text(beat.model_dump_json())
    entry = work.ledger.get(name_entry(work, "train"))
    assert entry is not None
    work.ledger.put(
        name_entry(work, "train"),
        fingerprint="of an earlier plan",
        output=entry.output,
        finished_at=entry.finished_at,
        seconds=entry.seconds,
    )
    with hold_lock(folder), hold_lock(work.project.state / "pipeline"):
        yield run.id
