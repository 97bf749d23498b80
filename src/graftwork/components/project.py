"""Component generation connected to models, judges, sandboxes and projects.

Input: a spec file, the name of a model. Output: a package, its verification, episodes for training. A project
is needed only where the model is one of its own, and gives settings if there is one.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.components.attempts import (
    ComponentModel,
    GenerationJournal,
    OnProgress,
    RecordedAnswers,
    prompt_hash,
)
from graftwork.components.cases import Stage
from graftwork.components.plan import ComponentPlan, load_plan
from graftwork.components.results import (
    GENERATION,
    EpisodeFiles,
    ProvenanceReport,
    dump_lines,
    is_held_out,
    list_cases,
    list_episodes,
    read_manifest,
    to_rows,
    verify_package,
)
from graftwork.components.session import (
    GenerateJob,
    GenerationOutcome,
    StageRate,
    generate,
    open_verifier,
    stage_rates,
)
from graftwork.components.settings import GenerateOptions
from graftwork.components.stages import ENDINGS, STAGES
from graftwork.components.verifier import Submission
from graftwork.engines.embedded import EMBEDDED
from graftwork.engines.endpoint import EndpointEngine
from graftwork.engines.interface import EngineSource
from graftwork.engines.llamacpp import DEFAULT_PRECISION, LLAMACPP
from graftwork.engines.local import EngineChild
from graftwork.evaluate.project import Grading
from graftwork.evaluate.project_subjects import find_device, find_weights
from graftwork.evaluate.subjects import NamedSubject, parse_subject
from graftwork.files.dataset import read_rows
from graftwork.files.disk import write_atomic
from graftwork.model.base import EMBEDDED as EMBEDDED_BASE
from graftwork.model.base import find_base
from graftwork.process.sandbox import SandboxSettings
from graftwork.project.open_project import OpenProject
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserError

RECORDED = "recorded:"
ENGINES = "URL#model, base, engine:llamacpp@base, run:ID, release:ID, champion and recorded:FILE"
HELD_OUT_SPLITS: tuple[Literal["validation", "test"], ...] = ("validation", "test")


class ComponentRequest(NamedTuple):
    """The user's request."""

    spec: Path
    engine: str
    out: Path
    settings: GenerateOptions
    cases: Path | None = None
    wanted: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = STAGES
    judged: bool = False
    max_total_tokens: int | None = None
    max_minutes: float | None = None


def generate_components(
    request: ComponentRequest,
    *,
    work: OpenProject | None = None,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> GenerationOutcome:
    plan = load_plan(request.spec, request.cases)
    chosen_ids = choose_components(plan, request.wanted)
    judge = None
    if request.judged:
        if work is None or work.settings.evaluate.judge is None:
            raise UserError(
                "no judge is configured",
                why="--judge uses the judge of a project",
                fix="specify one under evaluate.judge in graft.yaml",
                where="--judge",
            )
        judge = Grading(work, ()).judge
    with open_model(request.engine, work) as model:
        job = GenerateJob(
            plan,
            model,
            request.out,
            request.settings,
            chosen_ids,
            request.stages,
            judge,
            sandbox=_sandbox_of(work),
            max_total_tokens=request.max_total_tokens,
            max_minutes=request.max_minutes,
            on_progress=on_progress,
        )
        return generate(job)


def choose_components(plan: ComponentPlan, names: Sequence[str]) -> tuple[str, ...]:
    """Components by id, by function, or all below a node."""
    identifiers: list[str] = []
    for name in names:
        matching = [
            component.id
            for component in plan.components
            if component.function == name or is_held_out(component.id, (name,))
        ]
        if not matching:
            examples = ", ".join(component.id for component in plan.components[:12])
            raise UserError(
                f"there is no component {name}",
                why=f"the specification has {examples}",
                fix="`graft spec show` lists the nodes",
                where="--only",
            )
        identifiers += matching
    return tuple(dict.fromkeys(identifiers))


@contextmanager
def open_model(name: str, work: OpenProject | None) -> Iterator[ComponentModel]:
    """recorded:FILE, URL#model, base, or a subject of a project: run:ID, release:ID, champion, …"""
    if name.startswith(RECORDED):
        path = Path(name.removeprefix(RECORDED))
        recorded = RecordedAnswers(path)
        yield ComponentModel(f"{RECORDED}{path.name}", recorded.digest, recorded.ask)
        return
    try:
        subject = parse_subject(name)
    except UserError as error:
        raise UserError(
            f"{name!r} is not an engine",
            why=f"engines are {ENGINES}",
            fix="for example `--engine base`, or `--engine http://localhost:8000/v1#model`",
            where="--engine",
        ) from error
    if subject.endpoint is not None:
        engine = EndpointEngine(subject.endpoint)
        identity = engine.facts.fingerprint
        yield ComponentModel(subject.name, identity, engine.ask, at_once=subject.endpoint.concurrency)
        return
    with _open_local(subject, work) as model:
        yield model


@contextmanager
def _open_local(subject: NamedSubject, work: OpenProject | None) -> Iterator[ComponentModel]:
    if subject.kind not in ("base", "folder", "run", "release", "model"):
        raise UserError(
            f"{subject.name!r} cannot generate components",
            why=f"engines are {ENGINES}",
            fix="use one of these",
            where="--engine",
        )
    if subject.kind != "base" and work is None:
        raise UserError(
            f"{subject.name!r} is a model of a project",
            why="there is no graft.yaml here",
            fix="run the command in a project, or specify one with -C",
            where="--engine",
        )
    weights = find_weights(work, subject, None) if work is not None and subject.kind != "base" else None
    base = work.weights if work is not None else find_base(EMBEDDED_BASE, project_folder=Path(), weights=True)
    kind = subject.engine or (LLAMACPP if weights is None else EMBEDDED)
    on_llamacpp = kind == LLAMACPP
    adapters = {"adapter": weights.folder} if weights is not None else {}
    identity = fingerprint([base.revision, weights.adapter_hash if weights is not None else None])
    source = EngineSource(
        base_folder=Path(base.folder),
        adapters=adapters,
        device="cpu" if on_llamacpp else find_device(),
        precision=subject.precision or (DEFAULT_PRECISION if on_llamacpp else "float32"),
        threads=work.settings.train.threads if work is not None else None,
        fingerprint=identity,
    )
    with tempfile.TemporaryDirectory(prefix="graft-engine-") as folder:
        child = EngineChild(kind, source, folder=Path(folder))
        with closing(child):
            label = f"{subject.name} ({base.name})" if subject.kind == "base" else subject.name
            yield ComponentModel(label, identity, child.ask_once, give_up=child.stop)


def _sandbox_of(work: OpenProject | None) -> SandboxSettings:
    return work.settings.evaluate.sandbox if work is not None else SandboxSettings()


def verify_components(
    out: Path,
    *,
    spec: Path | None = None,
    cases: Path | None = None,
    work: OpenProject | None = None,
) -> ProvenanceReport:
    """Check the chain; with a spec, run every source again and compare what it does."""
    plan = load_plan(spec, cases) if spec is not None else None
    report = verify_package(out, plan=plan)
    if plan is None:
        return report
    problems = list(report.problems)
    manifest = read_manifest(out)
    assert manifest is not None
    texts = {
        identifier: (out / part["file"]).read_text(encoding="utf-8")
        for identifier, part in manifest.components.items()
        if (out / part["file"]).is_file()
    }
    components = [component for component in plan.components if component.id in texts]
    ending = ENDINGS[plan.language]
    submissions = [
        Submission(
            component,
            texts[component.id],
            4,
            tuple(
                (f"{dependency.module}{ending}", texts[dependency.id])
                for dependency in components
                if dependency.id != component.id
            ),
        )
        for component in components
    ]
    verdicts = open_verifier(plan, _sandbox_of(work)).verify(submissions)
    for component, verdict in zip(components, verdicts, strict=True):
        if not verdict.ok:
            problems.append(f"{component.id}: when run again, it fails its cases: {verdict.reason}")
    return report.model_copy(update={"problems": tuple(problems), "rerun": len(submissions)})


def write_episodes(
    out: Path,
    *,
    spec: Path,
    to: Path,
    cases: Path | None = None,
    held_out: Sequence[str] = (),
    work: OpenProject | None = None,
) -> EpisodeFiles:
    """Interactions and pairs, prompts for rollouts, and cases of the components that are held out.

    Prompts and cases have checks that run Python: a plan in another language gives interactions only.
    """
    plan = load_plan(spec, cases)
    choose_components(plan, held_out)
    journal = GenerationJournal(out / GENERATION)
    episodes = list(list_episodes(plan, journal, held_out=held_out))
    files = {"interactions": "episodes.jsonl", "prompts": "prompts.jsonl", "cases": "held_out.jsonl"}
    paths = {name: str(to / file) for name, file in files.items()}
    # What the validation and test splits of the project's datasets hold: prompts by hash, and sessions.
    log, held_prompts, held_sessions = Path(paths["interactions"]), set[str](), set[str]()
    held_out_prompts = set[str]()
    datasets = sorted(work.project.datasets.glob("*/manifest.json")) if work is not None else []
    for split in HELD_OUT_SPLITS:
        for row in (row for manifest in datasets for row in read_rows(manifest.parent, split)):
            prompt = prompt_hash(row.messages)
            held_prompts.add(prompt)
            if row.session is not None:
                held_sessions.add(row.session)
            # Rows of the log of episodes stay in it: they keep their split.
            if work is not None and (work.project.root / row.origin.file).resolve() != log.resolve():
                held_out_prompts.add(prompt)
    logged = [episode for episode in episodes if episode[0] not in held_out_prompts]
    rows, pairs = to_rows(logged)
    simple = [
        component
        for component in plan.components
        if plan.language == "python" and not component.dependencies and component.cases.calls
    ]
    prompts, case_rows = [], []
    for component in simple:
        stage_cases = list_cases(plan, journal, component)
        if is_held_out(component.id, held_out):
            case_rows += [case for _, case in stage_cases]
        else:
            # A session is a component: if one of its stages is held out, all are.
            prompts += [
                case
                for prompt, case in stage_cases
                if prompt not in held_prompts and case["session"] not in held_sessions
            ]
    for name, content in (("interactions", rows), ("prompts", prompts), ("cases", case_rows)):
        write_atomic(Path(paths[name]), dump_lines(content))
    return EpisodeFiles(
        interactions=len(rows),
        pairs=pairs,
        failed=sum(row["status"] == "failed" for row in rows),
        prompts=len(prompts),
        cases=len(case_rows),
        held_out=tuple(component.id for component in plan.components if is_held_out(component.id, held_out)),
        left_out=len(episodes) - len(logged),
        with_dependencies=sum(bool(component.dependencies) for component in plan.components),
        files=paths,
    )


def read_rates(out: Path) -> tuple[StageRate, ...]:
    if read_manifest(out) is None and not (out / GENERATION).is_dir():
        raise UserError(
            "no generation was found here", fix="specify the folder that --out wrote", where=str(out)
        )
    return stage_rates(GenerationJournal(out / GENERATION))
