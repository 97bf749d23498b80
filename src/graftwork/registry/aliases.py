"""Which release is live: aliases moved forward by a verdict, and back when it was wrong.

In: an index, a release, an alias, and who wants it when and why. Out: the move that was made. The
log of moves is never rewritten: a rollback is one more move.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.release import AliasMove, Release, ReleaseEntry
from graftwork.registry.index import ReleaseIndex, alias_history
from graftwork.registry.names import ALIAS, VERSION, require_alias, split_alias


def find_release(index: ReleaseIndex, name: str) -> Release:
    """What a name means: an alias, a version (`1.4.0`, `tagger@1.4.0`), an id or the beginning of one."""
    pointed_at = index.aliases().get(name) if ALIAS.fullmatch(name) else None
    if pointed_at is None:
        model, at, version = name.rpartition("@")
        if VERSION.fullmatch(version):
            pointed_at = index.find_version(version, model=model if at else None)
            if pointed_at is None:
                raise _no_such_version(name)
    return index.get(pointed_at or name)


def promote(
    index: ReleaseIndex,
    release: Release,
    *,
    alias: str,
    who: str,
    when: str,
    why: str = "",
    force: bool = False,
    require_verdict: bool = True,
) -> AliasMove | None:
    """Point the alias at the release. None: it pointed there already, and nothing was logged.

    Of two who promote at once one gets Busy and can look again. Only a verdict to deploy lets a
    release pass; `force` overrules it and leaves its reason in the log.
    """
    model, _ = split_alias(alias)
    if model is not None and model != release.model:
        raise _of_another_model(release, alias)
    cleared = release.decision == "deploy" or not require_verdict
    if not cleared and not force:
        raise _not_cleared(release, alias)
    if not cleared and not why.strip():
        raise UserMistake(
            "a promotion against the verdict needs a reason",
            why="whoever is on call later has to know why this was done",
            fix='say it: --force --reason "…"',
        )
    current = index.aliases().get(alias)
    if current == release.id:
        return None
    return index.move_alias(
        alias,
        release.id,
        expected_previous=current,
        who=who,
        when=when,
        why=why or release.decision,
        forced=not cleared,
        verdict_hash=release.verdict_hash,
    )


class PlannedRollback(NamedTuple):
    """A rollback as it was seen: from the release that is live to the one before it."""

    live: str
    target: str


def rollback_target(index: ReleaseIndex, *, alias: str) -> str:
    """The release that a rollback would make live."""
    return plan_rollback(index, alias=alias).target


def plan_rollback(index: ReleaseIndex, *, alias: str) -> PlannedRollback:
    """From the log alone, in one look: alias and log change together, so its end is what is live."""
    history = alias_history(index.alias_log(require_alias(alias)))
    if len(history) < 2:
        raise UserMistake(
            f"there is nothing to roll {alias} back to",
            why="it points at the first release it ever had" if history else "it never pointed at a release",
            fix=f"promote the release you want: `graft release promote ID --alias {alias}`",
        )
    return PlannedRollback(history[-1], history[-2])


def rollback(
    index: ReleaseIndex, *, alias: str, who: str, when: str, why: str = "", way: PlannedRollback | None = None
) -> AliasMove:
    """Point the alias at the release before the present one. Each further rollback goes further back.

    `way` is the one that was looked at and verified: where the alias was moved since then, it is Busy.
    """
    live, target = way or plan_rollback(index, alias=alias)
    return index.move_alias(
        alias,
        target,
        expected_previous=live,
        who=who,
        when=when,
        why=why or f"rollback of {live[:12]}",
        rollback=True,
        verdict_hash=index.get(target).verdict_hash,
    )


def _of_another_model(release: Release, alias: str) -> UserMistake:
    return UserMistake(
        f"release {release.id[:12]} is of the model {release.model}",
        why=f"the alias {alias} belongs to another model",
        fix=f"promote it as `{release.model}/{split_alias(alias).name}`",
    )


def _no_such_version(name: str) -> UserMistake:
    return UserMistake(
        f"no release has the version {name}, or several models have it",
        fix="name the model, too (`tagger@1.4.0`); `graft release list` shows the versions",
    )


def _not_cleared(release: Release, alias: str) -> AnswerIsNo:
    return AnswerIsNo(
        f"release {release.id[:12]} is not cleared to be {alias}",
        why=f"the verdict on it is {release.decision.replace('_', ' ')}, not deploy",
        fix=f"read why (`graft release show {release.id[:12]}`), or overrule it with --force and a --reason",
    )


PINNED = "keep"
"""A release with this tag stays until the tag is taken off."""


def select_retained(
    entries: Iterable[ReleaseEntry],
    *,
    needed: Collection[str],
    leased: Collection[str],
    keep_last: int,
    young_since: str,
) -> dict[str, str]:
    """Id to reason, for `entries` from the newest to the oldest. `young_since` is a time in ISO form."""
    kept: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for entry in entries:
        if entry.id in needed:
            kept[entry.id] = "an alias points at it, or can be rolled back to it"
        elif entry.id in leased:
            kept[entry.id] = "a running server holds it"
        elif entry.collected_at is not None:
            # Somebody began to take it away and was stopped.
            continue
        elif PINNED in entry.tags:
            kept[entry.id] = f"it is tagged {PINNED}"
        elif counted[entry.model] < keep_last:
            kept[entry.id] = f"it is among the {keep_last} newest of {entry.model}"
        elif entry.created_at >= young_since:
            kept[entry.id] = "it is young"
        counted[entry.model] += 1
    return kept
