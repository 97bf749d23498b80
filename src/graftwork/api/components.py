"""Specifications and components made from them: check, generate and verify, and what the folders hold.

Of a folder in a project that `graft generate --out` wrote, running or done, the journal and the package are
read; nothing is run.
"""

import difflib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graftwork.api.project import Project, changed_at
from graftwork.components.attempts import (
    ANSWER,
    ATTEMPT,
    JOURNAL_FILE,
    PROMPT,
    VERDICT,
    GenerationJournal,
)
from graftwork.components.check import SpecReport, check_file
from graftwork.components.project import ComponentRequest, verify_components
from graftwork.components.project import generate_components as generate
from graftwork.components.results import (
    CARD_FILE,
    GENERATION,
    PackageManifest,
    ProvenanceReport,
    read_manifest,
)
from graftwork.components.results import ScoreCard as ScoreCard  # noqa: PLC0414
from graftwork.components.session import (
    STARTED,
    GenerationOutcome,
    StageRate,
    compare_rates,
    spent_tokens,
    stage_rates,
)
from graftwork.components.settings import GenerateOptions
from graftwork.components.stages import ACCEPTED, FAILED, AcceptedStage
from graftwork.process.worker import lock_holder
from graftwork.records.base import Record
from graftwork.records.errors import Corrupted, GraftError, UserError


def check_spec(path: str | Path) -> SpecReport:
    """Findings of a specification by line, and which of its requirements a case decides."""
    return check_file(Path(path))


def generate_components(
    spec: str | Path,
    *,
    engine: str,
    out: str | Path,
    only: Sequence[str] = (),
    settings: GenerateOptions | None = None,
) -> GenerationOutcome:
    """Generate, verify and package the components of a specification; the same call resumes.

    `engine` is an endpoint as URL#model, `base`, or recorded:FILE.
    """
    request = ComponentRequest(
        Path(spec), engine, Path(out), settings or GenerateOptions(), wanted=tuple(only)
    )
    return generate(request)


def verify_generated(out: str | Path, *, spec: str | Path | None = None) -> ProvenanceReport:
    """Check the chain from specification to files; with a spec, also run every component again."""
    return verify_components(Path(out), spec=Path(spec) if spec is not None else None)


DEEPEST = 3
MOST_FOUND = 50
MOST_TRIES = 50
_SKIPPED = frozenset({".graft", ".git", ".venv", "node_modules", "__pycache__"})
_CARDS = TypeAdapter(tuple[ScoreCard, ...])


class GenerationGlance(Record):
    """One line of the list; `problem` says why it could not be read."""

    name: str
    """The folder, relative to the project."""
    changed_at: float
    package: str = ""
    language: str = ""
    model: str = ""
    running: bool = False
    finished: bool = False
    """Whether the package was written."""
    components: int = 0
    passed: int = 0
    answers: int = 0
    tokens: int = 0
    rates: tuple[StageRate, ...] = ()
    problem: str = ""


class ComponentLine(Record):
    """A component in a generation that may still run."""

    id: str
    function: str
    stage: int
    """The last stage that was accepted."""
    answers: int
    passed: int
    card: ScoreCard | None = None
    failed: str = ""


class ComponentTry(Record):
    """One answer and its verdict."""

    stage: int
    round: int
    sample: int
    ok: bool
    reason: str
    text: str
    cases_passed: int
    cases: int


class ComponentView(Record):
    line: ComponentLine
    stages: tuple[AcceptedStage, ...]
    changes: tuple[tuple[str, ...], ...]
    """For each stage, the lines of a diff against the stage before; the first has none."""
    tries: tuple[ComponentTry, ...]
    more_tries: int = 0
    prompt: str = ""


def list_generations(project: Project) -> tuple[GenerationGlance, ...]:
    """Folders below the project folder, most recently changed first."""
    found = [_glance(project.root, folder) for folder in _find_folders(project.root)]
    return tuple(sorted(found, key=lambda glance: -glance.changed_at))


def has_generations(project: Project) -> bool:
    return next(_find_folders(project.root), None) is not None


def read_generation(
    project: Project, name: str, *, against: str = ""
) -> tuple[GenerationGlance, tuple[ComponentLine, ...], list[dict[str, Any]]]:
    """A generation and its components; pass@1 by stage, before and after, if another one is compared."""
    folder = _require_folder(project, name)
    glance = _glance(project.root, folder)
    if glance.problem:
        raise Corrupted(glance.problem, where=str(folder))
    before = _journal(_require_folder(project, against)) if against else None
    rows = compare_rates(stage_rates(before), glance.rates) if before is not None else []
    return glance, tuple(_lines(folder)), rows


def read_component(project: Project, name: str, component: str) -> ComponentView:
    folder = _require_folder(project, name)
    line = next((each for each in _lines(folder) if each.id == component), None)
    if line is None:
        raise UserError(f"there is no component {component} in {name}", fix="choose one of the list")
    journal = _journal(folder)
    accepted = [
        entry["stage"] for entry in journal.of_kind(ACCEPTED) if entry["stage"]["component"] == component
    ]
    last_accepted = sorted({body["stage"]: body for body in accepted}.items())
    stages = tuple(AcceptedStage.model_validate(body) for _, body in last_accepted)
    sources = [stage.source.splitlines() for stage in stages]
    changes = [
        tuple(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
        for before, after in pairwise(sources)
    ]
    attempts = [entry for entry in journal.of_kind(ATTEMPT) if entry["component"] == component]
    answers = [journal.find(ANSWER, entry["key"]) or {} for entry in attempts]
    prompts = (journal.find(PROMPT, answer.get("prompt", "")) for answer in answers)
    first = next((prompt for prompt in prompts if prompt is not None), None)
    tries = []
    for entry, answer in zip(attempts[:MOST_TRIES], answers, strict=False):
        verdict = (journal.find(VERDICT, entry["submission"]) or {}).get("verdict", {})
        cases = verdict.get("cases", {})
        tries.append(
            ComponentTry(
                stage=entry["stage"],
                round=int(answer.get("round", 0)),
                sample=int(answer.get("sample", 0)),
                ok=bool(entry["ok"]),
                reason=str(verdict.get("reason", "")),
                text=str(answer.get("text", "")),
                cases_passed=sum(not reason for reason in cases.values()),
                cases=len(cases),
            )
        )
    return ComponentView(
        line=line,
        stages=stages,
        changes=((), *changes) if stages else (),
        tries=tuple(tries),
        more_tries=max(0, len(attempts) - MOST_TRIES),
        prompt=first["messages"][-1]["content"] if first else "",
    )


def _find_folders(root: Path) -> Iterator[Path]:
    """Folders with the journal of a generation; hidden and deep folders are not searched."""
    waiting, found = [(root, 0)], 0
    while waiting and found < MOST_FOUND:
        folder, depth = waiting.pop(0)
        if (folder / GENERATION / JOURNAL_FILE).is_file():
            found += 1
            yield folder
            continue
        if depth == DEEPEST:
            continue
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        waiting += [
            (folder / name, depth + 1) for name in names if name not in _SKIPPED and not name.startswith(".")
        ]


def _require_folder(project: Project, name: str) -> Path:
    """One of the listed folders; no other can be requested."""
    for folder in _find_folders(project.root):
        if _name(project.root, folder) == name:
            return folder
    raise UserError(
        f"there is no generation {name!r} in this project",
        why="the folder has no journal of `graft generate`",
        fix="choose one of the list, or generate into the project folder with --out",
    )


def _name(root: Path, folder: Path) -> str:
    return folder.relative_to(root).as_posix()


def _glance(root: Path, folder: Path) -> GenerationGlance:
    name, changed = _name(root, folder), changed_at(folder / GENERATION / JOURNAL_FILE)
    try:
        journal, manifest, cards = _journal(folder), _manifest(folder), _cards(folder)
    except GraftError as error:
        return GenerationGlance(name=name, changed_at=changed, problem=error.what)
    begun = next(iter(journal.of_kind(STARTED)), {})
    asked = {entry["component"] for entry in journal.of_kind(ATTEMPT)}
    return GenerationGlance(
        name=name,
        changed_at=changed,
        package=str(begun.get("package", "")),
        language=manifest.language if manifest else "",
        model=str(begun.get("model", "")),
        running=lock_holder(folder / GENERATION) is not None,
        finished=manifest is not None,
        components=len(cards) or len(asked),
        passed=sum(card.ok for card in cards),
        answers=sum(1 for _ in journal.of_kind(ANSWER)),
        tokens=spent_tokens(journal),
        rates=stage_rates(journal),
    )


def _lines(folder: Path) -> Iterator[ComponentLine]:
    journal = _journal(folder)
    cards = {card.component: card for card in _cards(folder)}
    tries: dict[str, list[bool]] = defaultdict(list)
    for entry in journal.of_kind(ATTEMPT):
        tries[entry["component"]].append(bool(entry["ok"]))
    accepted = {entry["stage"]["component"]: entry["stage"]["stage"] for entry in journal.of_kind(ACCEPTED)}
    failed = {entry["component"]: entry["reason"] for entry in journal.of_kind(FAILED)}
    known = dict.fromkeys((*cards, *tries, *failed))

    def by_number(identifier: str) -> tuple[tuple[int, int | str], ...]:
        return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in identifier.split("."))

    for identifier in sorted(known, key=by_number):
        card = cards.get(identifier)
        yield ComponentLine(
            id=identifier,
            function=card.function if card else "",
            stage=accepted.get(identifier, 0),
            answers=len(tries[identifier]),
            passed=sum(tries[identifier]),
            card=card,
            failed="" if card and card.built else failed.get(identifier, ""),
        )


def _journal(folder: Path) -> GenerationJournal:
    path = folder / GENERATION / JOURNAL_FILE
    found = path.stat()
    return _read_journal(path.parent, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _read_journal(folder: Path, _changed: int, _size: int) -> GenerationJournal:
    """Cached by file identity: checking the chain of a large journal takes a while."""
    return GenerationJournal(folder)


def _manifest(folder: Path) -> PackageManifest | None:
    try:
        return read_manifest(folder)
    except (ValueError, OSError) as error:
        raise Corrupted("the manifest cannot be read", why=str(error)[:200], where=str(folder)) from error


def _cards(folder: Path) -> tuple[ScoreCard, ...]:
    try:
        return _CARDS.validate_json((folder / CARD_FILE).read_bytes())
    except FileNotFoundError:
        return ()
    except (ValidationError, OSError) as error:
        raise Corrupted("the score card cannot be read", why=str(error)[:200], where=str(folder)) from error
