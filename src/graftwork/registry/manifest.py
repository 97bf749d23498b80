"""The manifest of a release, built from its parts. No clock: the time is one of the parts.

The id is the hash of everything but the time, so the same content always has the same id. Parts that do not
belong together are refused.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graftwork.files.disk import file_digest
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Dataset
from graftwork.records.errors import Damaged
from graftwork.records.plan import Plan
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Report, Verdict
from graftwork.records.run import TrainOutcome


@dataclass(frozen=True)
class Lineage:
    """What an adapter was made from, and how it was judged."""

    dataset: Dataset
    plan: Plan
    outcome: TrainOutcome
    report: Report
    verdict: Verdict
    measured_adapter: str
    """The hash of the adapter that the report is about."""


@dataclass(frozen=True)
class ReleaseContext:
    """The project, base model, settings and time that a release is made with."""

    project: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    parent: str | None
    created_at: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    licence: str | None = None
    model: str = "main"
    tokenizer_fingerprint: str = ""
    tool_template: str | None = None
    """The chat template with the form of calls that was trained, where the base's own has none."""


def make_release(lineage: Lineage, context: ReleaseContext, *, files: Iterable[ReleaseFile]) -> Release:
    """The manifest of a trained adapter. Raises if the parts do not belong together."""
    dataset, plan, outcome = lineage.dataset, lineage.plan, lineage.outcome
    base, template = context.base_fingerprint, context.template_fingerprint
    claims = (
        ("the verdict is about this report", lineage.verdict.report_hash, lineage.report.fingerprint()),
        ("the report is about this adapter", lineage.measured_adapter, outcome.adapter_hash),
        ("the plan is for this dataset", plan.dataset_hash, dataset.content_hash),
        ("the plan is for this base", plan.base_fingerprint, base),
        ("the dataset was made for this base", dataset.base_fingerprint, base),
        ("the dataset was rendered with this template", dataset.template_fingerprint, template),
        ("the base weights are unchanged", outcome.base_hash_after, outcome.base_hash_before),
    )
    for claim, actual, expected in claims:
        if actual != expected:
            raise Damaged(
                f"the parts of this release do not belong together: it is not true that {claim}",
                why=f"{actual[:12]}… is not {expected[:12]}…",
                fix="run the project again (`graft run`): it repeats the steps that are out of date",
            )
    hashes = {"adapter": outcome.adapter_hash, "dataset": dataset.content_hash}
    hashes |= {"plan": plan.fingerprint(), "report": lineage.report.fingerprint()}
    context = replace(context, model=dataset.model, tokenizer_fingerprint=dataset.tokenizer_fingerprint)
    return name_release(context, files=files, verdict=lineage.verdict, run_id=outcome.run_id, hashes=hashes)


def name_release(
    context: ReleaseContext,
    *,
    files: Iterable[ReleaseFile],
    verdict: Verdict,
    run_id: str,
    hashes: Mapping[str, str],
) -> Release:
    """Build the manifest and name it by its content. `hashes`: of the adapter, dataset, plan and report."""
    unnamed = Release(
        id="",
        project=context.project,
        base=context.base,
        base_fingerprint=context.base_fingerprint,
        template_fingerprint=context.template_fingerprint,
        adapter_hash=hashes["adapter"],
        dataset_hash=hashes.get("dataset", ""),
        plan_hash=hashes.get("plan", ""),
        report_hash=hashes.get("report", ""),
        verdict_hash=verdict.fingerprint(),
        decision=verdict.decision,
        run_id=run_id,
        parent=context.parent,
        created_at=context.created_at,
        files=tuple(sorted(files, key=lambda file: file.path)),
        settings=dict(context.settings),
        versions=dict(context.versions),
        model=context.model,
        tokenizer_fingerprint=context.tokenizer_fingerprint,
        licence=context.licence,
    )
    return unnamed.model_copy(update={"id": content_id(unnamed)})


def describe_text(name: str, text: str) -> ReleaseFile:
    data = text.encode()
    return ReleaseFile(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def describe_file(path: Path) -> ReleaseFile:
    return ReleaseFile(path=path.name, sha256=file_digest(path), size=path.stat().st_size)


def content_id(release: Release) -> str:
    """The id of a release with this content. The id itself and the time do not count."""
    return fingerprint(release.model_dump(mode="json", exclude={"id", "created_at"}))


def write_manifest(release: Release) -> str:
    """The text of `manifest.json`. The same release gives the same bytes, because signatures cover them."""
    return release.model_dump_json(indent=2)
