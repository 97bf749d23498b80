"""From a trained and judged adapter to a release: checked, named by its content, written, indexed.

In: the adapter's folder and the records behind it. Out: the release, on disk and in the index.
Repeated with the same content it changes nothing. Does not decide whether the release goes live.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.records.dataset import Dataset
from graftwork.records.plan import Plan
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict
from graftwork.registry.adapter import inspect_adapter
from graftwork.registry.card import write_card
from graftwork.registry.ports import ReleaseIndex
from graftwork.registry.release import Lineage, make_release
from graftwork.registry.store import ReleaseStore


def publish(
    *,
    folder: Path | ReleaseStore,
    index: ReleaseIndex,
    project: str,
    base: str,
    base_fingerprint: str,
    template_fingerprint: str,
    adapter_folder: Path,
    dataset: Dataset,
    plan: Plan,
    outcome: TrainOutcome,
    report: Report,
    verdict: Verdict,
    parent: str | None,
    created_at: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    licence: str | None = None,
    version: str | None = None,
) -> Release:
    """Make the release in the store and enter it in the index; the store comes first.

    `version` is given to it in the index; without one it gets the next by rule.
    """
    store = folder if isinstance(folder, ReleaseStore) else ReleaseStore.open(folder)
    lineage = Lineage(dataset=dataset, plan=plan, outcome=outcome, report=report, verdict=verdict)
    adapter_files = inspect_adapter(adapter_folder, expected_hash=outcome.adapter_hash)
    card = write_card(lineage, project=project, base=base, parent=parent, licence=licence, versions=versions)
    texts = _texts(lineage, card=card)
    release = make_release(
        lineage,
        project=project,
        base=base,
        base_fingerprint=base_fingerprint,
        template_fingerprint=template_fingerprint,
        parent=parent,
        created_at=created_at,
        files=(*adapter_files, *(_describe(name, text) for name, text in texts.items())),
        settings=settings,
        versions=versions,
        licence=licence,
    )
    sources: dict[str, Path | bytes] = {file.path: adapter_folder / file.path for file in adapter_files}
    sources |= {name: text.encode() for name, text in texts.items()}
    # Between the store and the index nobody may take the new folder for one that nobody wants.
    with store.adding():
        written = store.put(release, sources=sources)
        index.add(written, version=version)
    return written


def _texts(lineage: Lineage, *, card: str) -> dict[str, str]:
    return {
        "README.md": card,
        "dataset.json": lineage.dataset.to_json(),
        "outcome.json": lineage.outcome.to_json(),
        "plan.json": lineage.plan.to_json(),
        "report.json": lineage.report.to_json(),
        "verdict.json": lineage.verdict.to_json(),
    }


def _describe(name: str, text: str) -> ReleaseFile:
    data = text.encode()
    return ReleaseFile(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
