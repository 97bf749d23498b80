"""Which release is live: promote by verdict, roll back, and which releases garbage collection keeps.

The log of moves is append-only: a rollback is one more move.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.release import AliasMove, Release, ReleaseEntry
from graftwork.registry.index import ReleaseIndex, alias_history
from graftwork.registry.names import ALIAS, VERSION, require_alias, split_alias

PINNED = "keep"
"""A release with this tag is kept until the tag is removed."""


class Change(NamedTuple):
    """Who moves an alias, when and why."""

    who: str
    when: str
    why: str = ""


class PlannedRollback(NamedTuple):
    """From the live release to the one before it."""

    live: str
    target: str


def find_release(index: ReleaseIndex, name: str) -> Release:
    """Find a release by alias, version (`1.4.0`, `tagger@1.4.0`), id or unique prefix of an id."""
    release_id = index.aliases().get(name) if ALIAS.fullmatch(name) else None
    if release_id is None:
        model, at, version = name.rpartition("@")
        if VERSION.fullmatch(version):
            release_id = index.find_version(version, model=model if at else None)
            if release_id is None:
                raise UserMistake(
                    f"no release has the version {name}, or several models have it",
                    fix="add the model (`tagger@1.4.0`); `graft release list` shows the versions",
                )
    return index.get(release_id or name)


def promote(
    index: ReleaseIndex,
    release: Release,
    *,
    alias: str,
    change: Change,
    force: bool = False,
    require_verdict: bool = True,
    instead_of: str | None = None,
) -> AliasMove | None:
    """Point the alias at the release. None if it already points there; then nothing is logged.

    Of two concurrent promotions one gets Busy. `instead_of` is the release that it was compared with: Busy is
    raised if the alias points at another one by now. A release needs a verdict to deploy; `force` overrules
    it and its reason goes into the log.
    """
    model, name = split_alias(alias)
    if model is not None and model != release.model:
        raise UserMistake(
            f"release {release.id[:12]} is a release of the model {release.model}",
            why=f"the alias {alias} belongs to another model",
            fix=f"promote it as `{release.model}/{name}`",
        )
    cleared = release.decision == "deploy" or not require_verdict
    if not cleared and not force:
        raise AnswerIsNo(
            f"release {release.id[:12]} is not cleared to be {alias}",
            why=f"its verdict is {release.decision.replace('_', ' ')}, not deploy",
            fix=f"see `graft release show {release.id[:12]}`, or overrule it with --force and a --reason",
        )
    if not cleared and not change.why.strip():
        raise UserMistake(
            "a promotion against the verdict needs a reason",
            why="the person on call has to know later why this was done",
            fix='give it: --force --reason "…"',
        )
    current = index.aliases().get(alias)
    if current == release.id:
        return None
    return index.move_alias(
        AliasMove(
            alias=alias,
            release_id=release.id,
            previous=instead_of or current,
            who=change.who,
            when=change.when,
            why=change.why or release.decision,
            forced=not cleared,
            verdict_hash=release.verdict_hash,
        )
    )


def plan_rollback(index: ReleaseIndex, *, alias: str) -> PlannedRollback:
    """Read from the log alone: alias and log change together, so the last entry is the live release."""
    history = alias_history(index.alias_log(require_alias(alias)))
    if len(history) < 2:
        raise UserMistake(
            f"there is nothing to roll {alias} back to",
            why="it points at the first release it ever had" if history else "it never pointed at a release",
            fix=f"promote the release you want: `graft release promote ID --alias {alias}`",
        )
    return PlannedRollback(history[-1], history[-2])


def rollback(
    index: ReleaseIndex, *, alias: str, change: Change, planned: PlannedRollback | None = None
) -> AliasMove:
    """Point the alias at the release before the live one. Each further rollback goes further back.

    `planned` is the rollback that was verified; if the alias was moved since then, Busy is raised.
    """
    live, target = planned or plan_rollback(index, alias=alias)
    return index.move_alias(
        AliasMove(
            alias=alias,
            release_id=target,
            previous=live,
            who=change.who,
            when=change.when,
            why=change.why or f"rollback of {live[:12]}",
            rollback=True,
            verdict_hash=index.get(target).verdict_hash,
        )
    )


def select_retained(
    entries: Iterable[ReleaseEntry],
    *,
    reachable: Collection[str],
    leased: Collection[str],
    keep_last: int,
    young_since: str,
) -> dict[str, str]:
    """Release id to the reason why garbage collection keeps it; what is not in it may be removed.

    `entries` are sorted from newest to oldest. `young_since` is an ISO time.
    """
    kept: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for entry in entries:
        if entry.id in reachable:
            kept[entry.id] = "an alias points at it or can be rolled back to it"
        elif entry.id in leased:
            kept[entry.id] = "a running server uses it"
        elif entry.collected_at is not None:
            # An earlier collection marked it and was stopped.
            continue
        elif PINNED in entry.tags:
            kept[entry.id] = f"it is tagged {PINNED}"
        elif counted[entry.model] < keep_last:
            kept[entry.id] = f"it is one of the {keep_last} newest of {entry.model}"
        elif entry.created_at >= young_since:
            kept[entry.id] = "it is younger than the retention period"
        counted[entry.model] += 1
    return kept
