"""Two releases compared on cases that both are asked, or on live traffic.

Input: an open project, two releases, a metric. Output: an ABResult. The metric is noted before the first
result is read, so that the number of metrics tried on a pair is known. Live answers are read in the order
they were kept, each once.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.cases import hash_cases, read_case_file
from graftwork.evaluate.live.ab import (
    ABEvidence,
    ABResult,
    ArmFacts,
    ArmTally,
    LiveAnswer,
    LiveTest,
    Scores,
    check_voices,
    find_mismatch,
    make_result,
    run_replay,
    survives_silence,
    units_of,
)
from graftwork.evaluate.project import Grading, ask_subject, log_look
from graftwork.evaluate.project_subjects import resolve_subject
from graftwork.evaluate.report import average
from graftwork.evaluate.subjects import Asking, Subject, parse_subject, settle_engine
from graftwork.files.disk import write_atomic
from graftwork.grading.checks import grade
from graftwork.grading.metrics import LOWER_IS_BETTER
from graftwork.pipeline.steps.evaluate import put_cases
from graftwork.process.worker import interruption_error
from graftwork.project.open_project import OpenProject
from graftwork.records.base import fingerprint
from graftwork.records.errors import GracefulStop, UserError
from graftwork.records.interaction import Capture, Message, Origin, is_from_users
from graftwork.records.release import Release
from graftwork.records.report import Case
from graftwork.registry.index import find_release
from graftwork.registry.project import open_store
from graftwork.serve.routing import is_experiment_between
from graftwork.store.captures import FeedbackStore

TRIED_FOLDER = "ab"


def choose_metric(work: OpenProject, metric: str | None, *, also: tuple[str, ...] = ()) -> str:
    """The one asked for, the gate's primary one, or the first that is graded."""
    graded = work.settings.evaluate.graded
    primary = work.settings.gate.primary_rule
    usual = primary.metric if primary is not None and primary.metric in graded else graded[0]
    name = metric or usual
    if name not in graded:
        raise UserError(
            f"{name} is not graded in this project",
            why=f"graded metrics: {', '.join((*graded, *also))}",
            fix="use one of these, or add it under evaluate.metrics or evaluate.checks",
            where="--metric",
        )
    return name


def find_pair(work: OpenProject, a: str, b: str) -> tuple[Release, Release]:
    first, second = find_release(work.releases, a), find_release(work.releases, b)
    if first.id == second.id:
        raise UserError(
            f"both are release {first.id[:12]}", why="there is nothing to compare", fix="specify two releases"
        )
    return first, second


def note_pair(work: OpenProject, pair: tuple[str, str], *, metric: str, traffic: str) -> tuple[str, ...]:
    """Record, before looking, the metric by which this pair is tested."""
    name = fingerprint([sorted(pair), traffic])[:16]
    path = work.project.state / TRIED_FOLDER / f"{name}.json"
    tried: list[str] = json.loads(path.read_bytes())["metrics"] if path.is_file() else []
    if metric not in tried:
        tried.append(metric)
        write_atomic(path, json.dumps({"releases": list(pair), "metrics": tried}))
    if len(tried) == 1:
        return ()
    return (
        f"this pair was tried by {len(tried)} metrics ({', '.join(tried)}): by chance alone, one of "
        "them is decided wrongly that many times as often; the first one counts",
    )


def compare_replayed(
    work: OpenProject, a: str, b: str, *, cases_file: Path, metric: str | None = None
) -> ABResult:
    """Ask both releases the cases of a file, in an order drawn by hash, until it is decided."""
    first, second = find_pair(work, a, b)
    name = choose_metric(work, metric)
    cases = read_case_file(cases_file, named=work.settings.evaluate.checks)
    grading = Grading(work, cases)
    remarks = note_pair(work, (first.id, second.id), metric=name, traffic=hash_cases(cases))
    log_look(work, cases, subject=second.adapter_hash)

    def grade_block(block: Sequence[Case]) -> tuple[Scores, Scores]:
        pair = _subjects(work, (first, second), block)
        of_a, of_b = (_ask(work, subject, block, metric=name, grading=grading) for subject in pair)
        return of_a, of_b

    confidence = work.settings.evaluate.confidence
    replayed = run_replay(
        units_of(cases), grade_block, alpha=1 - confidence, lower_is_better=name in LOWER_IS_BETTER
    )
    test = replayed.test
    return make_result(
        (first.id, second.id),
        name,
        "cases",
        evidence=ABEvidence(
            winner=test.winner,
            used=replayed.used,
            ungraded=replayed.ungraded,
            asked=replayed.asked,
            counts={"wins": test.wins, "losses": test.losses, "ties": test.ties},
            e_value=test.e_value,
            p_value=test.p_value,
            interval=test.interval(confidence),
            confidence=confidence,
        ),
        remarks=remarks,
    )


def _subjects(work: OpenProject, pair: tuple[Release, Release], cases: Sequence[Case]) -> tuple[Subject, ...]:
    """Both releases, verified byte by byte, to be asked with the same engine. Speed is not compared."""
    asking = Asking(put_cases(work, tuple(cases)), timed=False)
    subjects = []
    for release in pair:
        open_store(work).verify(release.id)
        named_subject = parse_subject(f"release:{release.id}")
        subjects.append(resolve_subject(work, named_subject, asking=asking, outcome=None))
    return tuple(map(settle_engine, subjects))


def _ask(
    work: OpenProject, subject: Subject, cases: Sequence[Case], *, metric: str, grading: Grading
) -> dict[str, float | None]:
    """Return the release's answers, graded. Cached answers are not requested again."""
    ask_subject(work, subject, cases)
    answers = read_answers(subject.folder)
    grading.prepare(cases, answers)
    context = grading.context()
    by_id = {case.id: case for case in cases}
    grades: dict[str, list[float | None]] = {case.id: [] for case in cases}
    for answer in answers:
        if answer.case_id in by_id:
            mark = grade(metric, by_id[answer.case_id], answer.text, context=context)
            grades[answer.case_id].append(mark)
    return {case: average(values) if values else None for case, values in grades.items()}


FEEDBACK = "feedback"
"""The metric that users grade by themselves: POST /v1/feedback."""
HOPELESS = 20
"""After this many sessions without a grade, waiting is pointless."""
ROLES = ("system", "user", "assistant", "tool")
Side = Literal["A", "B"]


def compare_live(
    work: OpenProject, a: str, b: str, *, metric: str | None = None, experiment: str | None = None
) -> ABResult:
    """The current result. It can be read at any time without losing validity."""
    pair = find_pair(work, a, b)
    name = choose_live_metric(work, metric)
    return LiveComparison(work, pair, metric=name, experiment=find_experiment(work, pair, experiment)).look()


def watch_live(
    work: OpenProject,
    a: str,
    b: str,
    *,
    metric: str | None = None,
    experiment: str | None = None,
    every_seconds: float,
    pause: Callable[[float], None] = time.sleep,
) -> ABResult:
    """Check repeatedly until it is decided; Ctrl-C ends it with the current result."""
    pair = find_pair(work, a, b)
    name = choose_live_metric(work, metric)
    look: LiveComparison | None = None
    latest: ABResult | None = None
    try:
        while latest is None or (latest.winner is None and latest.mismatch is None):
            if latest is not None:
                pause(every_seconds)
            running = find_experiment(work, pair, experiment)
            if look is None or running != look.experiment:
                look = LiveComparison(work, pair, metric=name, experiment=running)
                traffic = "traffic that was not assigned at random"
                work.reporter.info(f"watching {traffic if running is None else f'experiment {running}'}")
            latest = look.look()
            enough = 1 / (1 - latest.confidence)
            state = (
                f"B less A {latest.low:+.1%} to {latest.high:+.1%}, "
                f"evidence {latest.e_value:.3g} of the {enough:.3g} that decide it"
            )
            assigned = ", ".join(f"{arm} {latest.arms[arm].sessions}" for arm in ("A", "B"))
            phase = f"{latest.used} sessions ({assigned} assigned)"
            # No remaining time: it depends on future answers.
            work.reporter.progress(phase, latest.used, 0, seconds_left=None, detail={"subject": state})
            if not latest.used and latest.ungraded >= HOPELESS:
                return latest
    except KeyboardInterrupt:
        # Nothing is lost: the next check starts from what the endpoint stored.
        if latest is None or isinstance(interruption_error(), GracefulStop):
            raise
    return latest


class LiveComparison:
    """One experiment, or traffic that was not assigned at random; may be evaluated any number of times."""

    def __init__(
        self,
        work: OpenProject,
        pair: tuple[Release, Release],
        *,
        metric: str,
        experiment: str | None,
    ) -> None:
        self.experiment = experiment
        self._work, self._pair, self._metric = work, pair, metric
        self._remarks: tuple[str, ...] | None = None
        self._of: dict[str, Side] = {pair[0].id: "A", pair[1].id: "B"}
        self._tallies: dict[Side, ArmTally] = {"A": ArmTally(pair[0].id), "B": ArmTally(pair[1].id)}
        self._by_users = metric == FEEDBACK and metric not in work.settings.evaluate.graded
        self._grade = partial(grade, metric, context=Grading(work, ()).context())
        self._worst = 1.0 if metric in LOWER_IS_BETTER else 0.0
        confidence, lower = work.settings.evaluate.confidence, metric in LOWER_IS_BETTER
        self._use_test(LiveTest(1 - confidence, lower_is_better=lower, goes_on=self._by_users))
        self._heard = FeedbackStore(work.database, project=work.settings.project)
        self._spoken: dict[Side, set[str]] = {"A": set(), "B": set()}
        self._captures_read = self._feedback_read = 0

    def _use_test(self, test: LiveTest) -> None:
        self._live, self._confidence = test, 1 - test.alpha

    def look(self) -> ABResult:
        """Read what is new, and return the current result."""
        for position, capture in self._work.captures.read_on(
            after=self._captures_read, releases=tuple(self._of), experiment=self.experiment
        ):
            self._captures_read = position
            if capture.shadow_of is not None or not is_from_users(capture.session):
                continue
            side = self._of[capture.asked_release]
            self._see(capture, side)
            if not self._by_users and not self._live.test.decided:
                mark = grade_own(capture, self._grade, worst=self._worst)
                self._live.take(LiveAnswer(side, capture.session, mark))
        for position, feedback, capture in self._heard.read_on(
            after=self._feedback_read, releases=tuple(self._of), experiment=self.experiment
        ):
            self._feedback_read = position
            if not is_from_users(capture.session):
                continue
            side = self._of[capture.asked_release]
            self._tallies[side].hear(capture.id)
            if self._by_users:
                # Repeated feedback on one answer counts once, as does repeated feedback in one session.
                session = capture.session
                unit = f"capture {capture.id}" if session is None else f"session {session}"
                self._spoken[side].add(unit)
                # Users who got a large model's answer say nothing of the one that failed a check.
                score = feedback.score if capture.escalated_from is None else 0.0
                self._live.take(LiveAnswer(side, unit, score))
        if self._remarks is None and self._live.used:
            # Before anybody sees it. A metric that could grade nothing has shown nothing.
            traffic = self.experiment or "captures"
            pair = self._pair[0].id, self._pair[1].id
            self._remarks = note_pair(self._work, pair, metric=self._metric, traffic=traffic)
        return self._tell()

    def _see(self, capture: Capture, side: Side) -> None:
        self._tallies[side].see(capture)

    def _tell(self) -> ABResult:
        test = self._live.test
        counts = {"a_successes": test.baseline[0], "a_failures": test.baseline[1]}
        counts |= {"b_successes": test.candidate[0], "b_failures": test.candidate[1]}
        arms: dict[str, ArmFacts] = {side: tally.facts() for side, tally in self._tallies.items()}
        # Feedback may be newer than the captures read so far.
        silent = sum(facts.sessions for facts in arms.values()) - sum(map(len, self._spoken.values()))
        assigned = (arms["A"].sessions, arms["B"].sessions)
        mismatch = None
        if self.experiment is not None:
            mismatch = find_mismatch(self._tallies["A"], self._tallies["B"])
        stands = not self._by_users or survives_silence(test, assigned=assigned)
        return make_result(
            (self._pair[0].id, self._pair[1].id),
            self._metric,
            "captures",
            evidence=ABEvidence(
                winner=test.winner if stands and mismatch is None else None,
                used=self._live.used,
                ungraded=max(silent, 0) if self._by_users else self._live.ungraded,
                asked=0,
                counts={name: int(count) if count == int(count) else count for name, count in counts.items()},
                e_value=test.e_value,
                p_value=test.p_value,
                interval=test.interval(self._confidence),
                confidence=self._confidence,
                mismatch=mismatch,
            ),
            remarks=(*(self._remarks or ()), *self._find_remarks()),
            experiment=self.experiment,
            arms=arms,
        )

    def _find_remarks(self) -> list[str]:
        remarks = []
        if self.experiment is None:
            remarks.append(
                "which release answered was not drawn by lot: if it hangs together with who asked, when or "
                "what, so does this comparison; set `serve.split`, or `graft serve --challenger challenger`"
            )
        else:
            a, b = (release.id for release in self._pair)
            experiments = self._work.captures.experiments()
            other_experiments = sum(is_experiment_between(name, a, b) for name in experiments) - 1
            if other_experiments > 0:
                remarks.append(
                    f"this pair was assigned in {other_experiments + 1} experiments, only {self.experiment} "
                    "counts: repeating one until it is decided is wrong that many times as often"
                )
        test = self._live.test
        if self._by_users:
            spoken = (len(self._spoken["A"]), len(self._spoken["B"]))
            remarks += check_voices(self._tallies["A"], self._tallies["B"], spoken=spoken)
        if not self._by_users and not self._live.used and self._live.ungraded:
            remarks.append(
                f"none of {self._live.ungraded} sessions can be graded by {self._metric}, for live traffic "
                "has no reference: try `--metric feedback`, or what an answer shows by itself, as json_valid"
            )
        elif not sum(test.baseline) or not sum(test.candidate):
            remarks.append("one of the two has not answered anything that can be graded yet")
        return remarks


def find_experiment(work: OpenProject, pair: tuple[Release, Release], name_part: str | None) -> str | None:
    """The one asked for by its id or a part of it, else the latest of this pair; None if there is none."""
    ids = (pair[0].id, pair[1].id)
    experiments = [name for name in work.captures.experiments() if is_experiment_between(name, *ids)]
    if name_part is None:
        return experiments[-1] if experiments else None
    matches = [name for name in experiments if name_part in name]
    if len(matches) != 1:
        raise UserError(
            f"{name_part!r} is {f'{len(matches)} experiments' if matches else 'no experiment'} of these two",
            why=f"available: {', '.join(experiments)}"
            if experiments
            else "none of their exchanges was assigned at random",
            fix="give the id of one of these"
            if experiments
            else "graft serve --challenger challenger --share 0.1",
            where="--experiment",
        )
    return matches[0]


def as_case(capture: Capture) -> Case:
    """Return a served exchange as a case without a reference: only what an answer shows on its own is
    graded.
    """
    turns = capture.request.get("messages")
    messages = tuple(
        Message(role=turn["role"], content=turn["content"])
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
    )
    return Case(
        id=capture.id,
        origin=Origin(file="captures", line=1),
        messages=messages,
        reference="",
        session=capture.session,
    )


def grade_own(
    capture: Capture, grade_case: Callable[[Case, str], float | None], *, worst: float = 0.0
) -> float | None:
    """Grade the answer of the release that was asked, even if another model answered in its place."""
    reply = capture.own_reply
    if reply is None or capture.disconnected or capture.finish_reason == "error":
        # Left out, a release that loses more of its bad or slow answers would come out better.
        return worst
    return grade_case(as_case(capture), reply)


def choose_live_metric(work: OpenProject, metric: str | None) -> str:
    return FEEDBACK if metric == FEEDBACK else choose_metric(work, metric, also=(FEEDBACK,))
