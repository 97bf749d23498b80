"""Names and versions of releases, and the manifest of one, built from its parts.

Names are safe in paths and URLs. An alias of the main model is a plain name (`champion`); that of another
model has the name of its model as a prefix (`tagger/champion`). Each model has its own versions: a new base
or template is a major step, because any answer can change; new data is a minor one; new settings on the same
data are a patch. The id of a release is the hash of everything in its manifest but the time, so the same
content always has the same id. Parts that do not belong together are refused.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graftwork.files.disk import file_digest
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Dataset
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.plan import Plan
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Report, Verdict
from graftwork.records.run import TrainOutcome

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RULE = "1 to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first"
ALIAS = re.compile(rf"(?:{NAME.pattern}/)?{NAME.pattern}")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def require_name(value: str, *, kind: str) -> str:
    """Return the name or raise. A valid name cannot leave the folder it is used in."""
    if not NAME.fullmatch(value):
        raise UserError(
            f"{value!r} cannot be a {kind}",
            why=f"a {kind} is {RULE}",
            fix=f"choose another {kind}",
        )
    return value


def require_alias(value: str) -> str:
    """Return the alias or raise."""
    if not ALIAS.fullmatch(value):
        raise UserError(
            f"{value!r} cannot be an alias",
            why=f"an alias is {RULE}; an alias of a specialist starts with the name of its model and a slash",
            fix="write it like `champion` or `tagger/champion`",
        )
    return value


def alias_of_model(alias: str, *, model: str, main: str) -> str:
    """The full name of an alias. Aliases of the main model have no prefix."""
    return alias if model == main or "/" in alias else f"{model}/{alias}"


def split_alias(alias: str) -> tuple[str | None, str]:
    """The model, None for the main one, and the name of the alias."""
    model, slash, name = require_alias(alias).rpartition("/")
    return model if slash else None, name


FIRST = "1.0.0"
VERSION = re.compile(r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})")


def require_version(text: str) -> str:
    if not VERSION.fullmatch(text):
        raise UserError(
            f"{text!r} is not a version",
            why="a version is three numbers with dots between them",
            fix="write it like 1.4.0",
        )
    return text


def sort_key(version: str) -> tuple[int, int, int]:
    major, minor, patch = (int(part) for part in version.split("."))
    return major, minor, patch


def next_version(newest: str | None, *, before: Release | None, now: Release) -> str:
    """The version after `newest`, which `before` has."""
    if newest is None or before is None:
        return FIRST
    major, minor, patch = sort_key(newest)
    same_base = (before.base_fingerprint, before.template_fingerprint) == (
        now.base_fingerprint,
        now.template_fingerprint,
    )
    if not same_base:
        return f"{major + 1}.0.0"
    if before.dataset_hash != now.dataset_hash:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"


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
            raise Corrupted(
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
