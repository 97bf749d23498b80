"""The result on disk: a package of components with their tests, a manifest and a score card.

In: built components and their cards. Out: files, all or none, the manifest last. A file that is there already
and was not written by an earlier generation is never overwritten. Whether a
package is what its journal says is checked link by link: spec → prompt → model → answer → verdicts → file.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from graftwork.components.generate.attempts import (
    ANSWER,
    FIRST,
    JOURNAL_FILE,
    PROMPT,
    VERDICT,
    check_chain,
    source_of,
)
from graftwork.components.generate.run import ACCEPTED, ENDINGS, AcceptedStage, BuiltComponent
from graftwork.components.generate.score import ScoreCard
from graftwork.components.spec.cases import Language
from graftwork.components.spec.component import Component, ComponentPlan
from graftwork.components.verify import elixir
from graftwork.files.disk import Journal, write_atomic
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserMistake

MANIFEST_FILE = "manifest.json"
INTENDED_FILE = "manifest.json.next"
"""The manifest of a package that is being written; gone once the package is complete."""
CARD_FILE, CARD_PAGE = "scorecard.json", "SCORECARD.md"
PACKAGED = "packaged"
"""The kind of the journal's entry about a package, under the key of its manifest."""
FORMAT = 1


class PackageManifest(Record):
    """What a package holds and where each part comes from."""

    format: int = FORMAT
    package: str
    language: Language
    spec_hash: str
    model: str
    model_identity: str
    journal: str
    """The hash of the last entry of the journal that this was made from."""
    components: dict[str, dict[str, str]]
    """By id: function, file, and the hashes of source and verdict."""
    files: dict[str, str]
    """SHA-256 by relative name."""


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(out: Path) -> PackageManifest | None:
    path = out / MANIFEST_FILE
    return PackageManifest.from_json(path.read_bytes()) if path.is_file() else None


def manifest_key(manifest: PackageManifest) -> str:
    return text_hash(manifest.to_json())[:24]


def source_name(plan: ComponentPlan, component: Component) -> str:
    """The file of a component, relative to the package's folder."""
    folder = plan.package if plan.language == "python" else "lib"
    return f"{folder}/{component.module}{ENDINGS[plan.language]}"


def tests_name(plan: ComponentPlan, component: Component) -> str:
    if plan.language == "elixir":
        return f"test/{component.module}_test.exs"
    return f"tests/test_{component.module}.py"


def tests_text(plan: ComponentPlan, component: Component) -> str:
    return (elixir.write_tests if plan.language == "elixir" else write_tests)(plan, component)


def find_handwritten(out: Path, plan: ComponentPlan) -> dict[str, str]:
    """Modules in the package that no generation wrote, or that were changed since: module and text."""
    known = _generated_hashes(out)
    found = {}
    for component in plan.components:
        name = source_name(plan, component)
        path = out / name
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if text_hash(text) not in known.get(name, ()):
                found[component.module] = text
    return found


def require_free(out: Path, plan: ComponentPlan, wanted: Collection[str]) -> None:
    """Raise UserMistake where the package would overwrite a file that no generation wrote."""
    chosen = [each for each in plan.components if each.id in wanted]
    shared = (
        ("mix.exs", "test/test_helper.exs") if plan.language == "elixir" else (f"{plan.package}/__init__.py",)
    )
    files: dict[str, str | None] = dict.fromkeys((CARD_FILE, CARD_PAGE, *shared))
    files |= {tests_name(plan, each): tests_text(plan, each) for each in chosen}
    _require_own(out, files, _generated_hashes(out), handwritten=set())


def _require_own(
    out: Path, files: Mapping[str, str | None], known: dict[str, set[str]], *, handwritten: set[str]
) -> None:
    """Every file is absent, written by a generation, or what is about to be written (None: not known yet)."""
    for name, text in files.items():
        path = out / name
        if name in handwritten or not path.exists():
            continue
        present = text_hash(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ""
        if present in known.get(name, ()) or (text is not None and present == text_hash(text)):
            continue
        raise UserMistake(
            f"{name} is there already, and no generation wrote it",
            why="files that a person wrote are never overwritten; nothing was written",
            fix="move it away, or generate into another folder with --out",
            where=str(path),
        )


def write_package(
    out: Path, files: dict[str, str], manifest: PackageManifest, *, handwritten: set[str]
) -> PackageManifest:
    """Refuses before the first byte is written."""
    known = _generated_hashes(out)
    _require_own(out, {**files}, known, handwritten=handwritten)
    written = {name: text for name, text in files.items() if name not in handwritten}
    hashed = {name: text_hash(text) for name, text in sorted(written.items())}
    manifest = manifest.model_copy(update={"files": hashed})
    # One line for each attempt since the last complete package.
    path = out / INTENDED_FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_atomic(path, before + json.dumps(manifest.model_dump(mode="json")) + "\n")
    for name, text in written.items():
        write_atomic(out / name, text)
    for name, digests in known.items():
        path = out / name
        if name in files or not path.is_file():
            continue
        if text_hash(path.read_text(encoding="utf-8", errors="replace")) in digests:
            path.unlink()
    write_atomic(out / MANIFEST_FILE, manifest.to_json() + "\n")
    (out / INTENDED_FILE).unlink()
    return manifest


def _generated_hashes(out: Path) -> dict[str, set[str]]:
    """Hashes that generations wrote by file name, with those of packages that were never completed."""
    found: dict[str, set[str]] = {}
    complete, path = read_manifest(out), out / INTENDED_FILE
    manifests = [complete] if complete is not None else []
    if path.is_file():
        manifests += map(PackageManifest.from_json, path.read_bytes().splitlines())
    for manifest in manifests:
        for name, digest in manifest.files.items():
            found.setdefault(name, set()).add(digest)
    return found


def package_files(plan: ComponentPlan, built: list[BuiltComponent], cards: list[ScoreCard]) -> dict[str, str]:
    """Sources, a test file for each, and the cards; a mix project around them, or an `__init__` of all."""
    files: dict[str, str] = {}
    ready = [(plan.get(each.id), each.source) for each in built if each.source is not None]
    for component, source in ready:
        files[source_name(plan, component)] = source
        files[tests_name(plan, component)] = tests_text(plan, component)
    if plan.language == "elixir":
        name = elixir.module_name(plan, plan.components[0]).partition(".")[0]
        files["mix.exs"] = (
            f"defmodule {name}.MixProject do\n  use Mix.Project\n\n"
            f'  def project, do: [app: :{plan.package}, version: "0.1.0", elixir: "~> 1.14"]\nend\n'
        )
        files["test/test_helper.exs"] = "ExUnit.start()\n"
    else:
        imports = [f"from {plan.package}.{each.module} import {each.function}" for each, _ in ready]
        listed = "".join(f'    "{name}",\n' for name in sorted(each.function for each, _ in ready))
        files[f"{plan.package}/__init__.py"] = (
            f'"""Generated components; {CARD_FILE} has the evidence for each."""\n\n'
            + "\n".join(sorted(imports))
            + f"\n\n__all__ = [\n{listed}]\n"
        )
    files[CARD_FILE] = json.dumps([card.model_dump(mode="json") for card in cards], indent=2) + "\n"
    files[CARD_PAGE] = write_card_page(plan, cards)
    return files


def write_tests(plan: ComponentPlan, component: Component) -> str:
    """The calls as a pytest file. Values are compared by type and value, as in verification."""
    calls = [
        {"args": call.args, "named": call.named, "gives": call.gives, "raises": call.raises}
        for call in component.cases.calls
    ]
    rows = "".join(f"    {json.dumps(call)!r},\n" for call in calls)
    return (
        f'"""Cases of component {component.id}."""\n\n'
        "import json\n\nimport pytest\n\n"
        f"from {plan.package}.{component.module} import {component.function}\n\n"
        f"CALLS = [\n{rows}]\n\n\n"
        '@pytest.mark.parametrize("call", CALLS)\n'
        f"def test_{component.function}(call):\n"
        "    call = json.loads(call)\n"
        '    if call["raises"]:\n'
        "        with pytest.raises(Exception) as raised:\n"
        f'            {component.function}(*call["args"], **call["named"])\n'
        '        assert type(raised.value).__name__ == call["raises"]\n'
        "        return\n"
        f'    value = {component.function}(*call["args"], **call["named"])\n'
        '    assert json.loads(json.dumps(value)) == call["gives"]\n'
    )


def write_card_page(plan: ComponentPlan, cards: list[ScoreCard]) -> str:
    names = list(dict.fromkeys(name for card in cards for name in card.scores))
    lines = [
        f"# Score card of {plan.package}",
        "",
        "| component | gates | total | " + " | ".join(names) + " |",
    ]
    lines.append("|---|---|---:|" + "---:|" * len(names))
    for card in cards:
        failed = [name for name, held in card.gates.items() if not held]
        state = "not built" if not card.built else "pass" if not failed else f"fails {', '.join(failed)}"
        scores = [card.scores.get(name) for name in names]
        shown = ["–" if score is None else f"{score:.2f}" for score in scores]
        total = "–" if card.total is None else f"{card.total:.1f}"
        lines.append(f"| {card.component} {card.function} | {state} | {total} | " + " | ".join(shown) + " |")
    notes = [f"- {card.component}: {note}" for card in cards for note in card.notes]
    return "\n".join([*lines, "", *notes, ""])


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
    for name, digest in manifest.files.items():
        path = out / name
        if links.require(path.is_file(), f"{name} is missing"):
            links.require(text_hash(path.read_text(encoding="utf-8")) == digest, f"{name} was changed")
    known = {(entry["kind"], entry["key"]): entry for entry in entries if "key" in entry}
    links.require(
        (PACKAGED, manifest_key(manifest)) in known,
        f"{MANIFEST_FILE} is not one that the journal names: it was changed, or the run ended too early",
    )
    for identifier, part in manifest.components.items():
        if part["how"] != "handwritten":
            accepted = [
                AcceptedStage.model_validate(entry["stage"])
                for entry in entries
                if entry.get("kind") == ACCEPTED and entry["stage"]["component"] == identifier
            ]
            _check_component(identifier, part, accepted, manifest.language, known, links)
    return ProvenanceReport(
        package=manifest.package,
        model=manifest.model,
        entries=len(entries),
        links=links.checked,
        problems=tuple(links.problems),
    )


def _check_component(
    identifier: str,
    part: dict[str, str],
    accepted: list[AcceptedStage],
    language: Language,
    known: dict[tuple[str, str], dict[str, Any]],
    links: _Links,
) -> None:
    for stage in accepted:
        if stage.how == "answer":
            _check_answer(stage, language, known, links)
    sources = [stage.source for stage in accepted if stage.submission == part["submission"]]
    if not links.require(bool(sources), f"{identifier}: no stage was accepted with this source"):
        return
    links.require(text_hash(sources[-1]) == part["source"], f"{identifier}: the source is another one")
    verdict = known.get((VERDICT, part["submission"]))
    if links.require(verdict is not None, f"{identifier}: the verdict is missing"):
        assert verdict is not None
        links.require(bool(verdict["verdict"]["ok"]), f"{identifier}: the verdict is no")
        links.require(
            verdict["source"] == fingerprint(sources[-1]), f"{identifier}: verdict of another source"
        )


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
