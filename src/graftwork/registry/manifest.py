"""Builds the manifest of a release from its parts. Pure: no clock, no disk.

In: what was trained, on what, how it was judged, and the files. Out: a `Release` whose id is the
hash of all of it but the time: the same content has the same id whenever it is made. Parts that do
not belong together are refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graftwork.records.base import fingerprint
from graftwork.records.dataset import Dataset
from graftwork.records.errors import Damaged
from graftwork.records.plan import Plan
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict

FORMAT = 2
SINCE_FORMAT_2 = frozenset({"format", "model", "tokenizer_fingerprint", "licence"})
"""The fields that a manifest of format 1 does not have."""


@dataclass(frozen=True)
class Lineage:
    """Where an adapter comes from and what was found out about it."""

    dataset: Dataset
    plan: Plan
    outcome: TrainOutcome
    report: Report
    verdict: Verdict


def make_release(
    lineage: Lineage,
    *,
    project: str,
    base: str,
    base_fingerprint: str,
    template_fingerprint: str,
    parent: str | None,
    created_at: str,
    files: Iterable[ReleaseFile],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    licence: str | None = None,
) -> Release:
    """Put the manifest together and name it by its content."""
    _require_consistent(lineage, base_fingerprint=base_fingerprint, template_fingerprint=template_fingerprint)
    nameless = Release(
        id="",
        project=project,
        base=base,
        base_fingerprint=base_fingerprint,
        template_fingerprint=template_fingerprint,
        adapter_hash=lineage.outcome.adapter_hash,
        dataset_hash=lineage.dataset.content_hash,
        plan_hash=lineage.plan.fingerprint(),
        report_hash=lineage.report.fingerprint(),
        verdict_hash=lineage.verdict.fingerprint(),
        decision=lineage.verdict.decision,
        run_id=lineage.outcome.run_id,
        parent=parent,
        created_at=created_at,
        files=tuple(sorted(files, key=lambda file: file.path)),
        settings=dict(settings),
        versions=dict(versions),
        format=FORMAT,
        model=lineage.dataset.model,
        tokenizer_fingerprint=lineage.dataset.tokenizer_fingerprint,
        licence=licence,
    )
    return nameless.model_copy(update={"id": content_id(nameless)})


def content_id(release: Release) -> str:
    """The id that a release with this content has: neither the id itself nor the time counts.

    A manifest of format 1 was named before there were the later fields, so at their defaults they do not
    count. With any other value they do: no such manifest was ever written, and its id does not fit.
    """
    return fingerprint(release.model_dump(mode="json", exclude={"id", "created_at", *_absent(release)}))


def write_manifest(release: Release) -> str:
    """The text of `manifest.json`, the same bytes for the same release: signatures cover them."""
    return release.model_dump_json(indent=2, exclude=_absent(release))


def _absent(release: Release) -> set[str]:
    """The fields that this manifest does not have in its file."""
    if release.format != 1:
        return set()
    fields = type(release).model_fields
    return {name for name in SINCE_FORMAT_2 if getattr(release, name) == fields[name].default}


def _require_consistent(lineage: Lineage, *, base_fingerprint: str, template_fingerprint: str) -> None:
    """A release claims that these data, this base and this report belong to this adapter."""
    dataset, plan, outcome = lineage.dataset, lineage.plan, lineage.outcome
    claims = (
        ("the verdict judges this report", lineage.verdict.report_hash, lineage.report.fingerprint()),
        ("the plan is for this dataset", plan.dataset_hash, dataset.content_hash),
        ("the plan is for this base", plan.base_fingerprint, base_fingerprint),
        ("the dataset was made for this base", dataset.base_fingerprint, base_fingerprint),
        ("the dataset was rendered with this template", dataset.template_fingerprint, template_fingerprint),
        ("the base weights stayed as they were", outcome.base_hash_after, outcome.base_hash_before),
    )
    for claim, one, other in claims:
        if one != other:
            raise Damaged(
                f"the parts of this release do not belong together: it is not so that {claim}",
                why=f"{one[:12]}… is not {other[:12]}…",
                fix="run the project again (`graft run`): the steps that are out of date are repeated",
            )
