"""After a training session: does the next one start from this checkpoint or the one before?

In: an open workplace. Out: a NextStart with the adapter to start from. The report of the one before is that
of its own gate, of its release or, where the session began at the base, of the base itself.
"""

from collections.abc import Collection
from pathlib import Path

from graftwork.evaluate.gate import next_start
from graftwork.pipeline.gate_champion import comparable, read_report
from graftwork.pipeline.gate_reports import find_report, keep_report
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_store import open_store
from graftwork.pipeline.steps.evaluate import Evaluated
from graftwork.pipeline.table import run_pipeline
from graftwork.records.errors import UserMistake
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import NextStart

MOST_RUNS = 10_000


def judge_session(work: OpenProject, *, may_do: Collection[str] | None = None) -> NextStart:
    """Bring the model up to date as far as its evaluation, then compare with where the session began."""
    made = run_pipeline(work, upto="evaluate", may_do=may_do)
    report, outcome = made.get("evaluate", Evaluated).report, made.get("train", TrainOutcome)
    keep_report(work, outcome.adapter_hash, report)
    found = next_start(
        _report_before(work, report, outcome),
        report,
        work.settings.gate,
        # Both over the validation rows of this session: at its start and at its end.
        loss_before=outcome.validation_loss_before,
        loss_after=outcome.validation_loss_after,
    )
    if found.start == "this":
        return _from(found, outcome.adapter_hash, outcome.adapter_folder)
    before = outcome.started_from or ""
    return _from(found, before, find_adapter(work, before) if before else "")


def find_adapter(work: OpenProject, adapter_hash: str) -> str:
    """The folder of an adapter that a run or a release holds; empty where neither does."""
    for run in work.runs.list(limit=MOST_RUNS):
        if run.outcome is None or run.outcome.get("adapter_hash") != adapter_hash:
            continue
        # A run that was cleared away leaves its record: the folder is looked for elsewhere then.
        if Path(kept := str(run.outcome["adapter_folder"])).is_dir():
            return kept
    store = open_store(work)
    for release in work.releases.list():
        if release.adapter_hash == adapter_hash and store.has(release.id):
            return str(store.get(release.id))
    folder = (work.project.root / (work.settings.train.start_from or "")).expanduser()
    return str(folder) if work.settings.train.start_from and Path(folder).is_dir() else ""


def _report_before(work: OpenProject, report: Report, outcome: TrainOutcome) -> Report:
    if outcome.started_from is None:
        return report.model_copy(update={"candidate": report.baseline})
    known = [find_report(work, outcome.started_from)]
    for release in work.releases.list():
        if release.adapter_hash == outcome.started_from:
            known.append(read_report(work, release))
    found = [one for one in known if one is not None]
    if found:
        # Of several the one that was asked the same cases in the same way.
        return next((one for one in found if comparable(one, report)), found[0])
    raise UserMistake(
        f"the adapter that this session started from ({outcome.started_from[:12]}) was never evaluated here",
        why="a session is judged by what it changed on the same cases",
        fix="`graft gate` before each session keeps its report; or evaluate that adapter with "
        "`graft eval --subject adapter:FOLDER`",
        where=work.model,
    )


def _from(found: NextStart, adapter_hash: str, folder: str) -> NextStart:
    return found.model_copy(update={"adapter_hash": adapter_hash, "adapter_folder": folder})
