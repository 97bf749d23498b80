"""The steps after the release: watch it in live traffic, promote it or roll it back, deliver it."""

from collections.abc import Sequence
from dataclasses import replace

from graftwork.cycle.settings import CanarySettings, DeliverSettings
from graftwork.cycle.state import CycleState
from graftwork.evaluate.ab import ABResult
from graftwork.pipeline.ab import LiveComparison, choose_live_metric, find_experiment
from graftwork.pipeline.canary import explain_step
from graftwork.pipeline.cycle.coordinator import CycleStepResult
from graftwork.pipeline.deploy import HERE, Question, deploy
from graftwork.pipeline.open_project import OpenProject, current_user, timestamp
from graftwork.pipeline.releases import full_alias, promote_release, roll_back_release
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.release import TryOut
from graftwork.records.errors import GraftError, WorkerFailed
from graftwork.records.release import AliasMove, Release
from graftwork.registry.index import Change, promote
from graftwork.serve.routing import make_experiment

CANDIDATE = "candidate"
"""The alias of a release that waits for an approval."""
LOOK_SECONDS = 60.0
LONGEST_WAITS = 3.0
"""Without enough sessions the canary ends after so many times its minutes."""


def publish_to(work: OpenProject) -> str | None:
    """The alias that a new release gets first; None if it goes live at once."""
    cycle, split = work.settings.cycle, work.settings.serve.split
    if cycle.canary is not None and split is not None:
        return split.challenger
    return CANDIDATE if "promote" in cycle.approve else None


def watch_canary(work: OpenProject, cycle: CycleState, release: Release, *, now: float) -> CycleStepResult:
    """Compare the new release with the champion in live traffic, as far as it has come."""
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
        # No session was assigned yet. What either answered before is no part of the canary.
        experiment = make_experiment(split, champion=champion, challenger=release.id).experiment
    metric = choose_live_metric(work, settings.metric)
    look = LiveComparison(work, pair, metric=metric, experiment=experiment, is_canary=True)
    found = look.look()
    step, state = look.decide(found), cycle.step("canary")
    if step != "wait":
        verdict = "promote" if step == "promote" else "roll_back"
        return CycleStepResult({**_facts(found), "verdict": verdict, "why": explain_step(step, found, look)})
    begun = state.started_at if state is not None and state.started_at is not None else now
    return end_or_wait(found, settings, begun=begun, now=now)


def _facts(found: ABResult) -> dict[str, object]:
    new = found.arms["B"]
    failures = new.failures + new.hung_up
    return {"sessions": new.sessions, "failures": failures, "failed_checks": new.failed_checks}


def end_or_wait(found: ABResult, settings: CanarySettings, *, begun: float, now: float) -> CycleStepResult:
    """Nothing is decided: the gate's verdict counts once the time is over; until then look again."""
    new, facts = found.arms["B"], _facts(found)
    enough = new.sessions >= settings.fewest_sessions
    minutes = (now - begun) / 60
    if minutes >= settings.minutes and enough:
        why = f"{new.sessions} sessions in {minutes:.0f} min, no harm seen"
        return CycleStepResult({**facts, "verdict": "promote", "why": why})
    if minutes >= settings.minutes * LONGEST_WAITS:
        why = f"only {new.sessions} sessions in {minutes:.0f} min; the gate's verdict counts"
        return CycleStepResult({**facts, "verdict": "promote", "why": why})
    left = (
        f"{new.sessions} of {settings.fewest_sessions} sessions, {minutes:.0f} of {settings.minutes:.0f} min"
    )
    return CycleStepResult(facts, again_at=now + min(LOOK_SECONDS, settings.minutes * 60 or 1.0), why=left)


def promote_or_roll_back(work: OpenProject, cycle: CycleState, release: Release) -> CycleStepResult:
    """Make the release live; or take the traffic from it again, as the canary decided."""
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
    approved = next((given for given in cycle.approvals if given.step == "promote"), None)
    reason = f"cycle {cycle.number}" + (f", approved by {approved.who}" if approved else "")
    if champion != release.id and (moved := _moved_away(work, release, alias, reason)) is not None:
        return CycleStepResult(
            {"action": "rolled_back", "release": release.id, "alias": alias, "why": moved.why}
        )
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


def _moved_away(work: OpenProject, release: Release, alias: str, reason: str) -> AliasMove | None:
    """How the alias left the release after an earlier attempt of this cycle had promoted it."""
    log = work.releases.alias_log(alias)
    promoted = [at for at, move in enumerate(log) if move.release_id == release.id and move.why == reason]
    return log[promoted[-1] + 1] if promoted and promoted[-1] + 1 < len(log) else None


def deliver(work: OpenProject, cycle: CycleState, release: Release, made: StepOutputs) -> CycleStepResult:
    """Bring it to every serving machine. If one of them cannot answer with it, all go back."""
    work, asked, targets = replace(work, publish_to=None), _questions(made), work.settings.cycle.deliver
    champion = work.releases.aliases().get(full_alias(work))
    if champion is not None and champion != release.id:
        # An earlier attempt rolled it back, or a person promoted another one.
        _bring(work, champion, targets, asked)
        why = f"{full_alias(work)} is {champion[:12]}"
        return _rolled_back(release, [target.to for target in targets], why)
    reached: list[DeliverSettings] = []
    for target in targets:
        done = deploy(
            work, release.id, to=target.to, graft=target.graft, requests=target.requests, questions=asked
        )
        if not done.ok:
            _go_back(work, release, reached, asked)
            return _rolled_back(release, [target.to], f"{target.to}: {done.why}")
        reached.append(target)
    return CycleStepResult(
        {"action": "delivered", "release": release.id, "to": [target.to for target in reached]}
    )


def _rolled_back(release: Release, to: list[str], why: str) -> CycleStepResult:
    return CycleStepResult({"action": "rolled_back", "release": release.id, "to": to, "why": why})


def _go_back(
    work: OpenProject, release: Release, reached: Sequence[DeliverSettings], asked: list[Question]
) -> None:
    """The alias here, and the machines that had taken the release already, get the one before it."""
    champion = work.releases.aliases().get(full_alias(work))
    if champion == release.id:
        if release.parent is None:
            return
        roll_back_release(work, release.id, reason="a serving machine could not answer with it")
        # A person may have promoted another one in the meantime.
        champion = work.releases.aliases().get(full_alias(work))
    if champion is not None:
        others = [target for target in reached if "://" not in target.to and target.to != HERE]
        _bring(work, champion, others, asked)


def _bring(
    work: OpenProject, champion: str, targets: Sequence[DeliverSettings], asked: list[Question]
) -> None:
    """Deploy the champion to all of these machines; raises if one of them does not serve it."""
    failures: list[str] = []
    for target in targets:
        requests = min(1, target.requests)
        try:
            done = deploy(
                work, champion, to=target.to, graft=target.graft, requests=requests, questions=asked
            )
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


def _questions(made: StepOutputs) -> list[Question]:
    """What the release was tried with here: it must be able to answer that there."""
    if "try" not in made.outputs:
        return []
    return [[{"role": "user", "content": tried.question}] for tried in made.get("try", TryOut).tried]
