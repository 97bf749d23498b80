"""The champion beside the candidate: from the report, or from what was measured when it was released.

In: an open workplace, a report, the adapter it judges. Out: the report with the champion among its subjects
where both answered the same cases in the same way. Asks no model.
"""

import hashlib

from pydantic import ValidationError

from graftwork.coordinate.release_store import open_store, own_alias
from graftwork.coordinate.workplace import Workplace
from graftwork.evaluate.gate import Surroundings
from graftwork.evaluate.metrics import FIRST_TOKEN, LATENCY, MEMORY, TOKENS_PER_SECOND
from graftwork.records.errors import Damaged
from graftwork.records.release import Release
from graftwork.records.report import Report

CHAMPION = "champion"
REPORT = "report.json"
OF_THE_MACHINE = (LATENCY, FIRST_TOKEN, TOKENS_PER_SECOND, MEMORY)
DECIDES_ANSWERS = ("max_new_tokens", "fields", "sampling", "repeats", "checks", "judge")
"""Settings of an evaluation that must agree, or grades cannot be compared case by case."""


def find_champion(work: Workplace, *, adapter_hash: str) -> Release | None:
    """What is served now; where that is this very adapter, what it took the place of."""
    release_id = work.releases.aliases().get(own_alias(work))
    if release_id is None:
        return None
    served = work.releases.get(release_id)
    if served.adapter_hash != adapter_hash:
        return served
    return work.releases.get(served.parent) if served.parent is not None else None


def with_champion(work: Workplace, report: Report, champion: Release | None) -> Report:
    """The champion's own report stands in where it was not asked again on the same cases."""
    if report.champion is not None or champion is None:
        return report
    known = read_report(work, champion)
    if known is None or not _comparable(known, report):
        return report
    # Seconds and bytes of another day, perhaps of another machine, say nothing about this one.
    grades = {name: metric for name, metric in known.candidate.metrics.items() if name not in OF_THE_MACHINE}
    served = known.candidate.model_copy(update={"subject": CHAMPION, "metrics": grades})
    return report.model_copy(update={"others": (*report.others, served), "champion": CHAMPION})


def surroundings_of(champion: Release | None) -> Surroundings:
    return Surroundings(no_champion=champion is None, champion=champion.id if champion is not None else "")


def read_report(work: Workplace, release: Release) -> Report | None:
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


def _comparable(known: Report, report: Report) -> bool:
    same = all(known.settings.get(name) == report.settings.get(name) for name in DECIDES_ANSWERS)
    return same and known.cases_hash == report.cases_hash
