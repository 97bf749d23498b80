"""`graft release ab` on live traffic: what the endpoint dealt to two releases, and what became of it.

In: an open workplace, two releases, a metric, perhaps the name of an experiment. Out: who won, if it is
decided, with how each arm did beside it. Only exchanges that one experiment drew by lot are counted; where
there is none, what the endpoint kept of both is, and that is said. Answers are read in the order they were
kept, feedback in the order it was given, each once: a second look goes on where the first one ended.
"""

import time
from collections.abc import Callable
from typing import Literal

from graftwork.grading import LOWER_IS_BETTER, grade
from graftwork.pipeline.ab import grade_context
from graftwork.pipeline.ab_arms import ArmTally, check_shares, check_voices
from graftwork.pipeline.ab_evidence import Exchange, LiveTest, survives_silence
from graftwork.pipeline.ab_result import ABResult, ArmFacts, choose_metric, find_pair, note_trial, tell
from graftwork.pipeline.evaluate_context import open_grading
from graftwork.pipeline.open_project import OpenProject
from graftwork.process.worker import how_it_ended
from graftwork.records.errors import StoppedInOrder, UserMistake
from graftwork.records.interaction import Capture, Message, Origin
from graftwork.records.release import Release
from graftwork.records.report import Case
from graftwork.serve.split import is_between
from graftwork.store.feedback import FeedbackStore

FEEDBACK = "feedback"
"""The metric that users grade by themselves: POST /v1/feedback."""
HOPELESS = 20
"""After so many sessions without a grade there is nothing to wait for."""
ROLES = ("system", "user", "assistant", "tool")
Side = Literal["A", "B"]


def compare_live(
    work: OpenProject, a: str, b: str, *, metric: str | None = None, experiment: str | None = None
) -> ABResult:
    """What is known now. Look as often as you like: it reads from the beginning."""
    pair = find_pair(work, a, b)
    name = _choose_live_metric(work, metric)
    return LiveLook(work, pair, metric=name, experiment=find_experiment(work, pair, experiment)).look()


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
    """Look again and again until it is decided; Ctrl-C ends it with what is known then."""
    pair = find_pair(work, a, b)
    name = _choose_live_metric(work, metric)
    look: LiveLook | None = None
    found: ABResult | None = None
    try:
        while found is None or found.winner is None:
            if found is not None:
                pause(every_seconds)
            running = find_experiment(work, pair, experiment)
            if look is None or running != look.experiment:
                look = LiveLook(work, pair, metric=name, experiment=running)
                work.reporter.info(f"watching {_call(running)}")
            found = look.look()
            _tell_progress(work, found)
            if not found.used and found.ungraded >= HOPELESS:
                return found
    except KeyboardInterrupt:
        # Nothing is lost: the next look begins from what the endpoint kept.
        if found is None or isinstance(how_it_ended(), StoppedInOrder):
            raise
    return found


class LiveLook:
    """One experiment, or the traffic that nobody dealt, looked at as often as one likes."""

    def __init__(
        self, work: OpenProject, pair: tuple[Release, Release], *, metric: str, experiment: str | None
    ) -> None:
        self.experiment = experiment
        self._work, self._pair, self._metric = work, pair, metric
        self._remarks: tuple[str, ...] | None = None
        self._of: dict[str, Side] = {pair[0].id: "A", pair[1].id: "B"}
        self._tallies: dict[Side, ArmTally] = {"A": ArmTally(pair[0].id), "B": ArmTally(pair[1].id)}
        self._confidence = work.settings.evaluate.confidence
        self._by_users = metric == FEEDBACK and metric not in work.settings.evaluate.graded
        self._context = grade_context(work, open_grading(work, ()))
        self._worst = 1.0 if metric in LOWER_IS_BETTER else 0.0
        self._live = LiveTest(
            1 - self._confidence, lower_is_better=metric in LOWER_IS_BETTER, goes_on=self._by_users
        )
        self._heard = FeedbackStore(work.database, project=work.settings.project)
        self._spoken: dict[Side, set[str]] = {"A": set(), "B": set()}
        self._captures_read = self._feedback_read = 0

    def look(self) -> ABResult:
        """Take in what is new, and tell what is known."""
        for place, capture in self._work.captures.read_on(
            after=self._captures_read, releases=tuple(self._of), dealt=self.experiment
        ):
            self._captures_read = place
            side = self._of[capture.release]
            self._tallies[side].see(capture)
            if not self._by_users and not self._live.test.decided:
                self._live.take(Exchange(side, capture.session, self._grade(capture)))
        for heard in self._heard.read_on(
            after=self._feedback_read, releases=tuple(self._of), dealt=self.experiment
        ):
            self._feedback_read = heard.place
            side = self._of[heard.capture.release]
            self._tallies[side].hear(heard.capture.id)
            if self._by_users:
                unit = _unit_of(heard.capture)
                self._spoken[side].add(unit)
                self._live.take(Exchange(side, unit, heard.feedback.score))
        if self._remarks is None and self._live.used:
            # Before anybody sees it. A metric that could grade nothing has shown nothing.
            traffic = self.experiment or "captures"
            self._remarks = note_trial(self._work, *self._pair, metric=self._metric, traffic=traffic)
        return self._tell()

    def _grade(self, capture: Capture) -> float | None:
        if capture.disconnected or capture.finish_reason == "error":
            # Left out, whoever loses more of its bad or slow answers would come out better.
            return self._worst
        return grade(self._metric, as_case(capture), capture.reply, context=self._context)

    def _tell(self) -> ABResult:
        test = self._live.test
        counts = {"a_successes": test.baseline[0], "a_failures": test.baseline[1]}
        counts |= {"b_successes": test.candidate[0], "b_failures": test.candidate[1]}
        arms: dict[str, ArmFacts] = {side: tally.facts() for side, tally in self._tallies.items()}
        # Feedback may be newer than the captures that this look has read.
        silent = sum(facts.sessions for facts in arms.values()) - sum(map(len, self._spoken.values()))
        dealt = (arms["A"].sessions, arms["B"].sessions)
        stands = not self._by_users or survives_silence(test, dealt=dealt)
        return tell(
            self._pair,
            self._metric,
            "captures",
            winner=test.winner if stands else None,
            used=self._live.used,
            ungraded=max(silent, 0) if self._by_users else self._live.ungraded,
            asked=0,
            counts={name: int(count) if count == int(count) else count for name, count in counts.items()},
            evidence=(test.e_value, test.p_value),
            interval=test.interval(self._confidence),
            confidence=self._confidence,
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
            others = _count_experiments(self._work, self._pair) - 1
            if others > 0:
                remarks.append(
                    f"this pair was dealt in {others + 1} experiments, only {self.experiment} counts here: "
                    "whoever repeats one until it is decided is wrong that many times as often"
                )
            remarks += check_shares(self._tallies["A"], self._tallies["B"])
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


def find_experiment(work: OpenProject, pair: tuple[Release, Release], asked: str | None) -> str | None:
    """The one asked for by its id or a part of it, else the latest of this pair; None where there is none."""
    ids = (pair[0].id, pair[1].id)
    known = [one.experiment for one in work.captures.experiments() if is_between(one.experiment, *ids)]
    if asked is None:
        return known[-1] if known else None
    found = [one for one in known if asked in one]
    if len(found) != 1:
        raise UserMistake(
            f"{asked!r} is {'no experiment' if not found else f'{len(found)} experiments'} of these two",
            why=f"kept are: {', '.join(known)}" if known else "no exchange of theirs was dealt by lot",
            fix="give the id of one of these" if known else "graft serve --challenger challenger --share 0.1",
            where="--experiment",
        )
    return found[0]


def as_case(capture: Capture) -> Case:
    """A served exchange as a case without a reference: only what an answer shows by itself is graded."""
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


def _choose_live_metric(work: OpenProject, metric: str | None) -> str:
    return FEEDBACK if metric == FEEDBACK else choose_metric(work, metric, also=(FEEDBACK,))


def _unit_of(capture: Capture) -> str:
    """What is said twice of one answer counts once, like what is said twice in one session."""
    return f"capture {capture.id}" if capture.session is None else f"session {capture.session}"


def _count_experiments(work: OpenProject, pair: tuple[Release, Release]) -> int:
    return sum(is_between(one.experiment, pair[0].id, pair[1].id) for one in work.captures.experiments())


def _call(experiment: str | None) -> str:
    return "traffic that nobody dealt by lot" if experiment is None else f"experiment {experiment}"


def _tell_progress(work: OpenProject, found: ABResult) -> None:
    """No time left: nobody knows how clear the answers to come will be."""
    enough = 1 / (1 - found.confidence)
    state = (
        f"B less A {found.low:+.1%} to {found.high:+.1%}, "
        f"evidence {found.e_value:.3g} of the {enough:.3g} that decide it"
    )
    phase = f"{found.used} sessions (A {found.arms['A'].sessions}, B {found.arms['B'].sessions} dealt)"
    work.reporter.progress(phase, found.used, 0, seconds_left=None, detail={"subject": state})
