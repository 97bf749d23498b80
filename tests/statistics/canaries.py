"""Simulated canaries: live traffic of two releases in a project's store, decided by the product's own rule.

`nightly` is the canary of a training cycle, looked at every minute; `served` is that of `graft release
promote --canary`. Everything behind the endpoint is real: captures, feedback, comparison and decision.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from registry_samples import PROJECT, alias_move, parts, publish_parts, write_adapter

from graftwork.cycle.runner import watch_canary
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.evaluate.live.canary import CanaryRequest, find_canary, run_canary
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.interaction import Capture, Feedback
from graftwork.registry.project import open_store
from graftwork.serve.routing import make_experiment
from graftwork.store.captures import FeedbackStore

WHEN = "2026-01-01T00:00:00Z"
SHARE = 0.5
SESSIONS = 300
SESSIONS_PER_LOOK = 20
LOOKS = SESSIONS // SESSIONS_PER_LOOK
SETTINGS = {
    "project": PROJECT,
    "data": {"logs": ["logs.jsonl"]},
    "evaluate": {"metrics": ["json_valid"]},
    "serve": {"split": {"share": SHARE}},
}


class Arm(NamedTuple):
    """Shares of its requests. `liked` is the share of good feedback on its own answers."""

    unanswered: float = 0.0
    escalated: float = 0.0
    """The answer fails a check, and a large model answers in its place."""
    liked: float = 0.75


LIKED_LARGE = 0.95


class Endpoint:
    """What an endpoint with `serve.escalate` keeps, and what users say."""

    def __init__(self, work, seed, arms, releases, *, users_speak):
        self.work, self.arms, self.releases, self.users_speak = work, arms, releases, users_speak
        self.chance, self.count = random.Random(seed), 0
        self.feedback = FeedbackStore(work.database, project=work.settings.project)

    def serve(self, split):
        champion, challenger = self.releases
        experiment = make_experiment(split, champion=champion, challenger=challenger).experiment
        captures = [self._answer(experiment) for _ in range(SESSIONS_PER_LOOK)]
        self.work.captures.add([capture for capture, _ in captures])
        for capture, score in captures:
            if self.users_speak and capture.finish_reason == "stop":
                self.feedback.add(Feedback(capture=capture.id, at=WHEN, score=score))

    def _answer(self, experiment):
        self.count += 1
        is_new = self.chance.random() < SHARE
        arm, release = self.arms[is_new], self.releases[is_new]
        drawn = self.chance.random()
        facts = {"release": release, "reply": "{}", "finish_reason": "stop"}
        liked = arm.liked
        if drawn < arm.unanswered:
            facts |= {"reply": "", "finish_reason": "error"}
        elif drawn < arm.unanswered + arm.escalated:
            facts |= {"release": "large", "escalated_from": release, "rejected": "no JSON"}
            facts |= {"failed_check": "json_valid"}
            liked = LIKED_LARGE
        capture = Capture(
            id=f"c{self.count}",
            at=WHEN,
            session=f"s{self.count}",
            model="champion",
            request={"messages": [{"role": "user", "content": "give me JSON"}]},
            prompt_tokens=1,
            reply_tokens=1,
            first_token_ms=None,
            total_ms=1.0,
            dealt=experiment,
            arm="challenger" if is_new else "champion",
            share=SHARE,
            **facts,
        )
        return capture, float(self.chance.random() < liked)


def run_nightly(work, endpoint, metric):
    running = CycleStepState(name="canary", status="running", started_at=0.0)
    cycle = CycleState(number=1, model="main", cause="x", version="", started_at=0.0, steps=(running,))
    now, release = 0.0, work.releases.get(endpoint.releases[1])
    while True:
        looked = watch_canary(work, cycle, release, now=now)
        if looked.again_at is None:
            return {"promote": "promoted", "roll_back": "rolled_back"}[looked.summary["verdict"]]
        endpoint.serve(work.settings.serve.split)
        now = looked.again_at


def run_served(work, endpoint, metric):
    asked = CanaryRequest(share=SHARE, metric=metric, max_seconds=LOOKS * 60)
    now = [0.0]

    def pause(_seconds):
        endpoint.serve(find_canary(work, clock=lambda: now[0]))
        now[0] += 60

    return run_canary(work, endpoint.releases[1], asked, pause=pause, clock=lambda: now[0]).decision


RULES = {"nightly": run_nightly, "served": run_served}


def simulate(rule, seed, *, champion, challenger, metric="json_valid"):
    """What becomes of the challenger: promoted, rolled_back or undecided."""
    with tempfile.TemporaryDirectory(prefix="graft-canary-") as folder:
        root = Path(folder)
        cycle = {"canary": {"minutes": LOOKS, "metric": metric}}
        (root / "graft.yaml").write_text(yaml.safe_dump({**SETTINGS, "cycle": cycle}))
        with use_project(open_project(root), NullReporter()) as work:
            releases = [
                publish_parts(
                    folder=open_store(work),
                    index=work.releases,
                    **parts(write_adapter(root / name, weights=name.encode())),
                ).id
                for name in ("old", "new")
            ]
            work.releases.move_alias(alias_move("champion", releases[0]))
            endpoint = Endpoint(
                work, seed, (champion, challenger), releases, users_speak=metric == "feedback"
            )
            return RULES[rule](work, endpoint, metric)


class Setting(NamedTuple):
    """`wrong` is the decision that is to be rare."""

    champion: Arm
    challenger: Arm
    wrong: str
    metric: str = "json_valid"

    def wrong_in(self, rule, seeds):
        """For each seed, whether the canary was decided wrongly."""
        arms = {"champion": self.champion, "challenger": self.challenger}
        return [simulate(rule, seed, **arms, metric=self.metric) == self.wrong for seed in seeds]


FAILS_CHECKS = Setting(Arm(), Arm(escalated=0.4), "promoted")
LIKED_WHERE_NOT_ESCALATED = Setting(Arm(), Arm(escalated=0.4, liked=0.95), "promoted", "feedback")
LEFT_TO_A_FALLBACK = Setting(Arm(), Arm(unanswered=0.4), "promoted")
EQUAL = Setting(Arm(unanswered=0.01), Arm(unanswered=0.01), "rolled_back")
