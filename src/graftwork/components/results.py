"""The results of a generation: score cards, a package of components with their tests, and training data.

Every figure of a score card is computed from evidence; a judge's mark is shown next to the figures and
decides nothing alone (docs/components.md defines each). A package is written whole or not at all, its
manifest last, and a file that an earlier generation did not write is never overwritten. A package is checked
against its journal link by link: spec → prompt → model → answer → verdicts → file. Attempts become
interactions with stage, reward and verdicts; components that are held out become evaluation cases and nothing
else.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graftwork.components import elixir, inside
from graftwork.components.attempts import (
    ANSWER,
    ATTEMPT,
    FIRST,
    JOURNAL_FILE,
    PROMPT,
    VERDICT,
    GenerationJournal,
    check_chain,
    prompt_hash,
    source_of,
    write_prompt,
)
from graftwork.components.cases import Language, Stage, case_covers, covered_by
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.settings import ScoreThresholds
from graftwork.components.stages import ACCEPTED, ENDINGS, AcceptedStage, BuiltComponent
from graftwork.components.verifier import Evidence, MutationScore, SourceFacts, SourceVerdict
from graftwork.files.disk import Journal, write_atomic
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserError

MOST_COMPLEXITY, MOST_LINES = 10, 40
WEIGHTS = {
    "atomicity": 0.15,
    "compliance": 0.15,
    "integration": 0.15,
    "quality": 0.15,
    "performance": 0.10,
    "chain": 0.10,
    "coverage": 0.10,
    "consistency": 0.10,
}
QUALITY_RULES: dict[Language, int] = {"python": inside.QUALITY_RULES, "elixir": elixir.QUALITY_RULES}
WEAK_TESTS = 0.8


class ScoreCard(Record):
    """The figures of one component; None for a figure without evidence."""

    component: str
    function: str
    built: bool
    scores: dict[str, float | None] = {}
    total: float | None = None
    """The weighted mean of the known figures, times 100."""
    gates: dict[str, bool] = {}
    notes: tuple[str, ...] = ()
    judge: float | None = None
    pass_at_1: dict[str, float] = {}
    """By stage: the share of its samples that passed every case."""

    @property
    def ok(self) -> bool:
        return self.built and all(self.gates.values())


def score_component(
    component: Component,
    built: BuiltComponent,
    users: Sequence[BuiltComponent],
    mutation: MutationScore | None,
    thresholds: ScoreThresholds,
    *,
    language: Language = "python",
) -> ScoreCard:
    if not built.stages or built.failed:
        where = f"stage {built.failed_stage}: " if built.failed_stage else ""
        return ScoreCard(
            component=component.id, function=component.function, built=False, notes=(where + built.failed,)
        )
    last = built.stages[-1]
    facts, verdict, evidence = last.verdict.facts, last.verdict, last.evidence
    sampled = [stage for stage in built.stages if stage.samples > 1 and stage.stage != 3]
    scores: dict[str, float | None] = {
        "atomicity": atomicity(facts),
        "adherence": _mean([passed for stage in built.stages for passed in stage.checks.values()]),
        "compliance": compliance(component, verdict),
        "supervision": _mean([stage.held_back for stage in built.stages if stage.held_back is not None]),
        "integration": integration(component, built),
        "chain": _mean([user.stages[-1].verdict.share for user in users if user.stages and not user.failed]),
        "performance": performance(component, evidence),
        "quality": 1 - min(1.0, len(facts.quality) / QUALITY_RULES[language]),
        "coverage": evidence.coverage if evidence is not None else None,
        "mutation": mutation.score if mutation is not None else None,
        "consistency": sampled[-1].alike / sampled[-1].samples if sampled else None,
    }
    weights = {name: weight for name, weight in WEIGHTS.items() if scores.get(name) is not None}
    weighted = sum(weight * (scores[name] or 0.0) for name, weight in weights.items())
    return ScoreCard(
        component=component.id,
        function=component.function,
        built=True,
        scores={name: None if value is None else round(value, 4) for name, value in scores.items()},
        total=round(100 * weighted / sum(weights.values()), 1) if weights else None,
        gates=apply_gates(scores, thresholds),
        notes=tuple(_notes(component, built, facts, mutation)),
        pass_at_1={
            str(stage.stage): round(stage.passed / stage.samples, 4)
            for stage in built.stages
            if stage.samples
        },
    )


def atomicity(facts: SourceFacts) -> float:
    """One public callable, no effect on import, no complexity over 10, at most 40 lines, allowed imports
    only.
    """
    checks = (
        len(facts.public) == 1,
        not facts.effects,
        facts.complexity <= MOST_COMPLEXITY,
        facts.lines <= MOST_LINES,
        # What the spec does not allow is refused before it runs.
        not facts.forbidden,
    )
    return sum(checks) / len(checks)


def compliance(component: Component, verdict: SourceVerdict) -> float:
    """The signature, the type of every value, and every requirement that has a case."""
    checks = [has_signature(component, verdict.facts), verdict.shape_ok]
    for text in covered_by(component.cases):
        deciding = [case_id for case_id, covers in case_covers(component.cases).items() if text in covers]
        checks.append(all(not verdict.cases.get(case_id, "missing") for case_id in deciding))
    return sum(checks) / len(checks)


def has_signature(component: Component, facts: SourceFacts) -> bool:
    """Return whether the parameters match the spec by name and in order; further ones must be optional. For a
    language with positional arguments only, names do not count.
    """
    if not component.parameters:
        return True
    count = len(component.parameters)
    if len(facts.parameters) < count or any(parameter["needed"] for parameter in facts.parameters[count:]):
        return False
    return all(
        str(parameter_facts["name"]) in (name, "")
        for parameter_facts, (name, _) in zip(facts.parameters, component.parameters, strict=False)
    )


def integration(component: Component, built: BuiltComponent) -> float:
    """Share of its cases that pass with real dependencies; zero if any is a stand-in."""
    real = 1 - len(built.stubs) / len(component.dependencies) if component.dependencies else 1.0
    return built.stages[-1].verdict.share if real == 1.0 else 0.0


def performance(component: Component, evidence: Evidence | None) -> float | None:
    limits = component.cases.limits
    if evidence is None:
        return None
    within_limits = []
    if limits.events is not None:
        within_limits.append(evidence.events <= limits.events)
    if limits.memory_kib is not None:
        within_limits.append(evidence.peak_bytes <= limits.memory_kib * 1024)
    return _mean(within_limits)


def apply_gates(scores: dict[str, float | None], thresholds: ScoreThresholds) -> dict[str, bool]:
    """Apply the gates. A figure without evidence fails its gate, unless it does not apply."""
    gates = {}
    for name, least in thresholds.model_dump().items():
        if least is not None:
            value = scores.get(name)
            if value is not None or name not in ("supervision", "adherence", "performance", "consistency"):
                gates[name] = value is not None and value >= least
    return gates


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


def _notes(
    component: Component, built: BuiltComponent, facts: SourceFacts, mutation: MutationScore | None
) -> list[str]:
    notes = []
    if built.handwritten:
        notes.append("written by hand, verified, not changed")
    if built.stubs:
        notes.append(f"verified with stand-ins for {', '.join(built.stubs)}")
    unproven = [text for text in component.requirements if text not in covered_by(component.cases)]
    if unproven:
        notes.append(f"{len(unproven)} of {len(component.requirements)} requirements have no case")
    if mutation is not None and mutation.score is not None and mutation.score < WEAK_TESTS:
        lines = ", ".join(map(str, mutation.survived[:8]))
        notes.append(
            f"weak cases: {mutation.killed} of {mutation.mutants} mutants are noticed (lines {lines})"
        )
    notes += [f"quality: {finding}" for finding in facts.quality]
    return notes


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
    generated = _generated_hashes(out)
    sources = {}
    for component in plan.components:
        name = source_name(plan, component)
        path = out / name
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if text_hash(text) not in generated.get(name, ()):
                sources[component.module] = text
    return sources


def require_free(out: Path, plan: ComponentPlan, ids: Collection[str]) -> None:
    """Raise UserError if the package would overwrite a file that no generation wrote."""
    components = [component for component in plan.components if component.id in ids]
    shared = (
        ("mix.exs", "test/test_helper.exs") if plan.language == "elixir" else (f"{plan.package}/__init__.py",)
    )
    files: dict[str, str | None] = dict.fromkeys((CARD_FILE, CARD_PAGE, *shared))
    files |= {tests_name(plan, component): tests_text(plan, component) for component in components}
    _require_own(out, files, _generated_hashes(out), handwritten=set())


def _require_own(
    out: Path, files: Mapping[str, str | None], digests: dict[str, set[str]], *, handwritten: set[str]
) -> None:
    """Every file is absent, written by a generation, or about to be written (None: not known yet)."""
    for name, text in files.items():
        path = out / name
        if name in handwritten or not path.exists():
            continue
        present = text_hash(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ""
        if present in digests.get(name, ()) or (text is not None and present == text_hash(text)):
            continue
        raise UserError(
            f"{name} already exists, and was not written by a generation",
            why="files written by a person are never overwritten; nothing was written",
            fix="move it away, or generate into another folder with --out",
            where=str(path),
        )


def write_package(
    out: Path, files: dict[str, str], manifest: PackageManifest, *, handwritten: set[str]
) -> PackageManifest:
    """Checks everything before it writes the first byte."""
    generated = _generated_hashes(out)
    _require_own(out, {**files}, generated, handwritten=handwritten)
    package_texts = {name: text for name, text in files.items() if name not in handwritten}
    hashed = {name: text_hash(text) for name, text in sorted(package_texts.items())}
    manifest = manifest.model_copy(update={"files": hashed})
    # One line for each attempt since the last complete package.
    path = out / INTENDED_FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_atomic(path, before + json.dumps(manifest.model_dump(mode="json")) + "\n")
    for name, text in package_texts.items():
        write_atomic(out / name, text)
    for name, digests in generated.items():
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
    digests_by_name: dict[str, set[str]] = {}
    complete, path = read_manifest(out), out / INTENDED_FILE
    manifests = [complete] if complete is not None else []
    if path.is_file():
        manifests += map(PackageManifest.from_json, path.read_bytes().splitlines())
    for manifest in manifests:
        for name, digest in manifest.files.items():
            digests_by_name.setdefault(name, set()).add(digest)
    return digests_by_name


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
        failed = [name for name, passes in card.gates.items() if not passes]
        state = "not built" if not card.built else "pass" if not failed else f"fails {', '.join(failed)}"
        scores = [card.scores.get(name) for name in names]
        score_texts = ["–" if score is None else f"{score:.2f}" for score in scores]
        total = "–" if card.total is None else f"{card.total:.1f}"
        lines.append(
            f"| {card.component} {card.function} | {state} | {total} | " + " | ".join(score_texts) + " |"
        )
    notes = [f"- {card.component}: {note}" for card in cards for note in card.notes]
    return "\n".join([*lines, "", *notes, ""])


GENERATION = "generation"


class ProvenanceReport(Record):
    """Links that were checked, and what is wrong with the broken ones."""

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
    """Raises UserError if this is not the folder of a generation."""
    manifest = read_manifest(out)
    if manifest is None:
        raise UserError(
            "there is no generated package here",
            why=f"{MANIFEST_FILE} is missing",
            fix="specify the folder that `graft generate --out` wrote",
            where=str(out),
        )
    entries = Journal(out / GENERATION / JOURNAL_FILE).read()
    links = _Links()
    broken = check_chain(entries)
    links.require(not broken, f"the journal: {broken}")
    hashes = {entry.get("hash") for entry in entries} | {FIRST}
    links.require(manifest.journal in hashes, "the journal ends before the package was made")
    if plan is not None:
        links.require(
            manifest.spec_hash == plan.spec_hash, "the package was made from a different specification"
        )
    for name, digest in manifest.files.items():
        path = out / name
        if links.require(path.is_file(), f"{name} is missing"):
            links.require(text_hash(path.read_text(encoding="utf-8")) == digest, f"{name} was changed")
    by_key = {(entry["kind"], entry["key"]): entry for entry in entries if "key" in entry}
    links.require(
        (PACKAGED, manifest_key(manifest)) in by_key,
        f"{MANIFEST_FILE} is not recorded in the journal: it was changed, or the run ended too early",
    )
    for identifier, part in manifest.components.items():
        if part["how"] != "handwritten":
            accepted = [
                AcceptedStage.model_validate(entry["stage"])
                for entry in entries
                if entry.get("kind") == ACCEPTED and entry["stage"]["component"] == identifier
            ]
            _check_component(identifier, part, accepted, manifest.language, by_key, links)
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
    by_key: dict[tuple[str, str], dict[str, Any]],
    links: _Links,
) -> None:
    for stage in accepted:
        if stage.how == "answer":
            _check_answer(stage, language, by_key, links)
    sources = [stage.source for stage in accepted if stage.submission == part["submission"]]
    if not links.require(bool(sources), f"{identifier}: no stage was accepted with this source"):
        return
    links.require(text_hash(sources[-1]) == part["source"], f"{identifier}: the source does not match")
    verdict = by_key.get((VERDICT, part["submission"]))
    if links.require(verdict is not None, f"{identifier}: the verdict is missing"):
        assert verdict is not None
        links.require(bool(verdict["verdict"]["ok"]), f"{identifier}: the verdict is negative")
        links.require(
            verdict["source"] == fingerprint(sources[-1]),
            f"{identifier}: the verdict is for a different source",
        )


def _check_answer(
    stage: AcceptedStage, language: Language, by_key: dict[tuple[str, str], dict[str, Any]], links: _Links
) -> None:
    label = f"{stage.component}, stage {stage.stage}"
    answer = by_key.get((ANSWER, stage.answer))
    if not links.require(answer is not None, f"{label}: the answer is missing"):
        return
    assert answer is not None
    links.require(
        source_of(answer, language) == stage.source, f"{label}: the source does not match the answer"
    )
    prompt = by_key.get((PROMPT, answer["prompt"]))
    if links.require(prompt is not None, f"{label}: the prompt is missing"):
        assert prompt is not None
        links.require(fingerprint(prompt["messages"]) == answer["prompt"], f"{label}: the prompt was changed")
    started = [entry for (kind, _), entry in by_key.items() if kind == "started"]
    models = {entry["identity"] for entry in started}
    links.require(answer["identity"] in models, f"{label}: no run of this model is recorded")


PASSED, FAILED = "success", "failed"


Episode = tuple[str, str, dict[str, Any]]
"""The hash of the prompt, the answer, and the row of a log without the answer."""


class EpisodeFiles(Record):
    """How many rows each file got, and what was left out."""

    interactions: int
    pairs: int
    failed: int
    prompts: int
    cases: int
    held_out: tuple[str, ...] = ()
    left_out: int = 0
    """Episodes whose prompt is held out by a project."""
    with_dependencies: int = 0
    """Components that are not prompts for rollouts: their calls need other components."""
    files: dict[str, str] = {}


def is_held_out(identifier: str, held_out: Collection[str]) -> bool:
    """Whether it is one of these nodes or below one of them."""
    return any(identifier == ancestor or identifier.startswith(f"{ancestor}.") for ancestor in held_out)


def list_episodes(
    plan: ComponentPlan, journal: GenerationJournal, *, held_out: Collection[str] = ()
) -> Iterator[Episode]:
    """Every distinct answer with its verdict, of components that are not held out."""
    yielded: set[tuple[str, str]] = set()
    component_ids = {component.id for component in plan.components}
    for entry in journal.of_kind(ATTEMPT):
        answer = journal.find(ANSWER, entry["key"])
        verdict = journal.find(VERDICT, entry["submission"])
        if answer is None or verdict is None or entry["component"] not in component_ids:
            continue
        if is_held_out(entry["component"], held_out) or (answer["prompt"], answer["text"]) in yielded:
            continue
        yielded.add((answer["prompt"], answer["text"]))
        prompt = journal.find(PROMPT, answer["prompt"])
        if prompt is None or not answer["text"].strip():
            continue
        cases = verdict["verdict"]["cases"]
        yield (
            answer["prompt"],
            answer["text"],
            {
                "id": entry["key"],
                "group": plan.package,
                "session": f"{plan.package}/{entry['component']}",
                "domain": f"stage {entry['stage']}",
                "stage": entry["stage"],
                "reward": 1.0 if entry["ok"] else 0.0,
                "model": answer["model"],
                "split": "train",
                "messages": prompt["messages"],
                "cases_passed": sum(not reason for reason in cases.values()),
                "cases": len(cases),
                "component": entry["component"],
                "finish_reason": answer["finish_reason"],
            },
        )


def to_rows(episodes: Collection[Episode]) -> tuple[list[dict[str, Any]], int]:
    """Rows of a log, and how many of them are pairs. An unpaired failed answer has the status `failed`."""
    by_prompt: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for prompt, text, row in episodes:
        by_prompt[prompt].append((text, row))
    rows, pairs = [], 0
    for group in by_prompt.values():
        passed = [(text, row) for text, row in group if row["reward"]]
        failed = [(text, row) for text, row in group if not row["reward"]]
        paired = min(len(passed), len(failed))
        pairs += paired
        for (chosen_text, row), (rejected, _) in zip(passed, failed, strict=False):
            columns = {key: value for key, value in row.items() if key != "messages"}
            pair = {"prompt": row["messages"], "chosen": chosen_text, "rejected": rejected}
            rows.append(columns | pair | {"status": PASSED})
        for text, row in (*passed[paired:], *failed[paired:]):
            messages = [*row["messages"], {"role": "assistant", "content": text}]
            rows.append({**row, "messages": messages, "status": PASSED if row["reward"] else FAILED})
    return rows, pairs


REWARDED_STAGES: tuple[Stage, ...] = (1, 2, 4)
"""Stages decided only by calls. Stage 3 also asks for less work, which no call shows."""


def list_cases(
    plan: ComponentPlan, journal: GenerationJournal, component: Component
) -> list[tuple[str, dict[str, Any]]]:
    """Return a component as one case for each stage that was attempted: for evaluation, or for rollouts with
    rewards. Each has the hash of its prompt.
    """
    accepted = {
        entry["stage"]["stage"]: entry["stage"]["source"]
        for entry in journal.of_kind(ACCEPTED)
        if entry["stage"]["component"] == component.id
    }
    asked_stages = {
        entry["stage"] for entry in journal.of_kind(ATTEMPT) if entry["component"] == component.id
    }
    stage_cases = []
    for stage in REWARDED_STAGES:
        before = next(
            (accepted[earlier] for earlier in sorted(accepted, reverse=True) if earlier < stage),
            "",
        )
        if stage != 1 and not (stage in asked_stages and before):
            continue
        messages = write_prompt(plan, component, stage, source=before)
        calls = [
            {"call": component.function, "args": call.args, "named": call.named}
            | ({"raises": call.raises} if call.raises else {"gives": call.gives})
            for call in component.cases.calls
            if call.stage <= stage
        ]
        case = {
            "id": f"{plan.package}/{component.id}/stage-{stage}",
            "messages": [message.model_dump() for message in messages],
            "reference": f"```python\n{accepted[stage]}```" if accepted.get(stage) else "",
            "group": plan.package,
            "session": f"{plan.package}/{component.id}",
            "domain": f"stage {stage}",
            "checks": [{"python_calls": calls}],
        }
        stage_cases.append((prompt_hash(messages), case))
    return stage_cases


def dump_lines(rows: Collection[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
