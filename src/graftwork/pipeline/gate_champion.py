"""The champion beside the candidate: from the report, or from what was measured when it was released.

In: an open workplace, a report, the adapter it judges. Out: the report with the champion among its subjects
where both answered the same cases in the same way. Asks no model.
"""

import hashlib
from typing import NamedTuple

from pydantic import ValidationError

from graftwork.evaluate.gate import Surroundings
from graftwork.evaluate.gate.sessions import asked_otherwise
from graftwork.grading import FIRST_TOKEN, LATENCY, MEMORY, TOKENS_PER_SECOND
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_store import open_store, own_alias
from graftwork.records.errors import Damaged
from graftwork.records.release import Release
from graftwork.records.report import Report

CHAMPION = "champion"
SERVED_ALREADY = "This very adapter is served already"
HELD_AGAINST_BASE = "what is said of the champion was held against the base"
REPORT = "report.json"
OF_THE_MACHINE = (LATENCY, FIRST_TOKEN, TOKENS_PER_SECOND, MEMORY)
UNTIMED = {
    "single_latency_seconds": (),
    "first_token_seconds": (),
    "tokens_per_second": 0.0,
    "peak_memory_gib": 0.0,
}


class Champion(NamedTuple):
    """Whom a candidate is held against. Without a release the base stands in, and `instead` says why."""

    release: Release | None
    instead: str = ""


def look_for_champion(work: OpenProject, *, adapter_hash: str) -> Champion:
    """What is served now; where that is this very adapter, what it took the place of."""
    release_id = work.releases.aliases().get(own_alias(work))
    if release_id is None:
        return Champion(None)
    served = work.releases.get(release_id)
    if served.adapter_hash != adapter_hash:
        return Champion(served)
    if served.parent is None:
        return Champion(None, f"{SERVED_ALREADY}, and nothing was served before it: {HELD_AGAINST_BASE}.")
    # Not by `get`, which takes a part of an id too: a parent is named in full, or is not known here.
    known = next((one for one in work.releases.list() if one.id == served.parent), None)
    if known is None:
        missing = f"the release before it ({served.parent[:12]}) is not known here"
        return Champion(None, f"{SERVED_ALREADY}, and {missing}: {HELD_AGAINST_BASE}.")
    return Champion(known)


def with_champion(work: OpenProject, report: Report, champion: Release | None) -> Report:
    """The champion's own report stands in where it was not asked again on the same cases."""
    if report.champion is not None or champion is None:
        return report
    known = read_report(work, champion)
    if known is None or not comparable(known, report):
        return report
    # Seconds and bytes of another day, perhaps of another machine, say nothing about this one.
    grades = {name: metric for name, metric in known.candidate.metrics.items() if name not in OF_THE_MACHINE}
    generation = known.candidate.generation.model_copy(update=UNTIMED)
    served = known.candidate.model_copy(
        update={"subject": CHAMPION, "metrics": grades, "generation": generation}
    )
    return report.model_copy(update={"others": (*report.others, served), "champion": CHAMPION})


def surroundings_of(champion: Champion) -> Surroundings:
    if champion.release is None:
        return Surroundings(no_champion=True, instead=champion.instead)
    return Surroundings(champion=champion.release.id)


def read_report(work: OpenProject, release: Release) -> Report | None:
    """The report that a release carries, its bytes checked; None where it has none."""
    promised = next((file.sha256 for file in release.files if file.path == REPORT), None)
    path = open_store(work).folder(release.id) / REPORT
    if promised is None or not path.is_file():
        return None
    body = path.read_bytes()
    if hashlib.sha256(body).hexdigest() != promised:
        raise Damaged(
            f"the report of release {release.id[:12]} was changed",
            why="its bytes are not those that the manifest promises",
            fix="`graft release verify` checks the others; roll back to a sound one",
            where=str(path),
        )
    try:
        return Report.from_json(body)
    except ValidationError:
        # Made by another version: it cannot be compared, which the verdict says.
        return None


def comparable(known: Report, report: Report) -> bool:
    """Whether both answered the same cases in the same way."""
    return known.cases_hash == report.cases_hash and not asked_otherwise(known, report)
