"""Whether a package is what its journal says: spec → prompt → model → answer → verdicts → file.

In: the folder of a generation. Out: every link that was checked, and those that do not hold. Optionally the
sources are run again and must behave as recorded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftwork.components.generate.attempts import ANSWER, PROMPT, VERDICT, source_of
from graftwork.components.generate.journal import FIRST, JOURNAL_FILE, check_chain
from graftwork.components.generate.package import (
    MANIFEST_FILE,
    PACKAGED,
    PackageManifest,
    manifest_key,
    read_manifest,
    text_hash,
)
from graftwork.components.generate.run import ACCEPTED, AcceptedStage
from graftwork.components.spec.cases import Language
from graftwork.components.spec.component import ComponentPlan
from graftwork.files.disk import Journal
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserMistake

GENERATION = "generation"


class ProvenanceReport(Record):
    """Links that were checked, and what is wrong with those that do not hold."""

    package: str
    model: str
    entries: int
    links: int
    problems: tuple[str, ...] = ()
    rerun: int = 0
    """Sources that were run again."""

    @property
    def ok(self) -> bool:
        return not self.problems


class _Links:
    def __init__(self) -> None:
        self.checked = 0
        self.problems: list[str] = []

    def require(self, holds: bool, problem: str) -> bool:
        self.checked += 1
        if not holds:
            self.problems.append(problem)
        return holds


def verify_package(out: Path, *, plan: ComponentPlan | None = None) -> ProvenanceReport:
    """UserMistake where this is no folder of a generation."""
    manifest = read_manifest(out)
    if manifest is None:
        raise UserMistake(
            "there is no generated package here",
            why=f"{MANIFEST_FILE} is missing",
            fix="name the folder that `graft generate --out` wrote",
            where=str(out),
        )
    entries = Journal(out / GENERATION / JOURNAL_FILE).read()
    links = _Links()
    broken = check_chain(entries)
    links.require(not broken, f"the journal: {broken}")
    hashes = {entry.get("hash") for entry in entries} | {FIRST}
    links.require(manifest.journal in hashes, "the journal ends before the package was made")
    if plan is not None:
        links.require(manifest.spec_hash == plan.spec_hash, "the package was made from another specification")
    _check_files(out, manifest, links)
    known = {(entry["kind"], entry["key"]): entry for entry in entries if "key" in entry}
    links.require(
        (PACKAGED, manifest_key(manifest)) in known,
        f"{MANIFEST_FILE} is not one that the journal names: it was changed, or the run ended too early",
    )
    for identifier, part in manifest.components.items():
        if part["how"] != "handwritten":
            _check_component(identifier, part, manifest.language, entries, known, links)
    return ProvenanceReport(
        package=manifest.package,
        model=manifest.model,
        entries=len(entries),
        links=links.checked,
        problems=tuple(links.problems),
    )


def _check_files(out: Path, manifest: PackageManifest, links: _Links) -> None:
    for name, digest in manifest.files.items():
        path = out / name
        present = path.is_file()
        if links.require(present, f"{name} is missing"):
            links.require(text_hash(path.read_text(encoding="utf-8")) == digest, f"{name} was changed")


def _check_component(
    identifier: str,
    part: dict[str, str],
    language: Language,
    entries: list[dict[str, Any]],
    known: dict[tuple[str, str], dict[str, Any]],
    links: _Links,
) -> None:
    last = None
    for stage in _accepted(entries, identifier):
        if stage.submission == part["submission"]:
            last = stage
        if stage.how == "answer":
            _check_answer(stage, language, known, links)
    if not links.require(last is not None, f"{identifier}: no stage was accepted with this source"):
        return
    assert last is not None
    links.require(text_hash(last.source) == part["source"], f"{identifier}: the source is another one")
    verdict = known.get((VERDICT, last.submission))
    if links.require(verdict is not None, f"{identifier}: the verdict is missing"):
        assert verdict is not None
        links.require(bool(verdict["verdict"]["ok"]), f"{identifier}: the verdict is no")
        links.require(
            verdict["source"] == fingerprint(last.source), f"{identifier}: verdict of another source"
        )


def _accepted(entries: list[dict[str, Any]], identifier: str) -> Iterator[AcceptedStage]:
    for entry in entries:
        if entry.get("kind") == ACCEPTED and entry["stage"]["component"] == identifier:
            yield AcceptedStage.model_validate(entry["stage"])


def _check_answer(
    stage: AcceptedStage, language: Language, known: dict[tuple[str, str], dict[str, Any]], links: _Links
) -> None:
    label = f"{stage.component}, stage {stage.stage}"
    answer = known.get((ANSWER, stage.answer))
    if not links.require(answer is not None, f"{label}: the answer is missing"):
        return
    assert answer is not None
    links.require(
        source_of(answer, language) == stage.source, f"{label}: the source is not that of the answer"
    )
    prompt = known.get((PROMPT, answer["prompt"]))
    if links.require(prompt is not None, f"{label}: the prompt is missing"):
        assert prompt is not None
        links.require(fingerprint(prompt["messages"]) == answer["prompt"], f"{label}: the prompt was changed")
    started = [entry for (kind, _), entry in known.items() if kind == "started"]
    models = {entry["identity"] for entry in started}
    links.require(answer["identity"] in models, f"{label}: no run of this model is recorded")
