"""One generation from start to finish: hacks, stages, scores, package. The same call resumes it.

Input: a plan, a model, a folder. Output: the package in that folder, its journal below `generation/`, an
outcome.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.components.attempts import (
    ANSWER,
    ATTEMPT,
    Attempts,
    Budget,
    ComponentModel,
    GenerationJournal,
    OnProgress,
    shown_calls,
    submission_key,
    write_prompt,
)
from graftwork.components.cases import Stage
from graftwork.components.elixir import ElixirVerifier, why_no_elixir
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.results import (
    PACKAGED,
    PackageManifest,
    ScoreCard,
    find_handwritten,
    manifest_key,
    package_files,
    read_manifest,
    require_free,
    score_component,
    source_name,
    text_hash,
    write_package,
)
from graftwork.components.settings import GenerateOptions
from graftwork.components.stages import (
    STAGES,
    BuiltComponent,
    ComponentBuilder,
    with_dependencies,
)
from graftwork.components.verifier import MutationScore, Submission, Verifier
from graftwork.grading.code import extract_code
from graftwork.grading.interface import CannotGrade, Rater
from graftwork.grading.reward_audit import PROGRAMS, TEXTS
from graftwork.process.sandbox import SandboxSettings, open_sandbox
from graftwork.process.worker import hold_lock
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.interaction import Origin
from graftwork.records.report import Case


class StageRate(Record):
    """The answers of one stage that were asked without feedback."""

    stage: int
    components: int
    answers: int
    passed: int
    solved: int
    """Components with at least one answer that passed every case."""

    @property
    def pass_at_1(self) -> float:
        return self.passed / self.answers if self.answers else 0.0

    @property
    def pass_at_n(self) -> float:
        return self.solved / self.components if self.components else 0.0


class GenerationOutcome(Record):
    """A finished generation."""

    package: str
    out: str
    language: str
    model: str
    built: tuple[str, ...]
    failed: dict[str, str]
    """Components that could not be built, each with stage and reason."""
    cards: tuple[ScoreCard, ...]
    rates: tuple[StageRate, ...]
    answers: int
    verdicts: int
    tokens: int
    journal: str
    skipped: str = ""
    """Why part of the work was not done, such as a language that is not installed."""

    @property
    def ok(self) -> bool:
        return not self.failed and all(card.ok for card in self.cards)


def stage_rates(journal: GenerationJournal) -> tuple[StageRate, ...]:
    first = {entry["key"]: entry for entry in journal.of_kind(ANSWER) if entry["round"] == 0}
    outcomes: dict[int, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for entry in journal.of_kind(ATTEMPT):
        if entry["key"] in first:
            outcomes[entry["stage"]][entry["component"]].append(bool(entry["ok"]))
    return tuple(
        StageRate(
            stage=stage,
            components=len(by_component),
            answers=sum(map(len, by_component.values())),
            passed=sum(map(sum, by_component.values())),
            solved=sum(map(any, by_component.values())),
        )
        for stage, by_component in sorted(outcomes.items())
    )


def spent_tokens(journal: GenerationJournal) -> int:
    return sum(entry["tokens"] + entry["prompt_tokens"] for entry in journal.of_kind(ANSWER))


def compare_rates(before: tuple[StageRate, ...], after: tuple[StageRate, ...]) -> list[dict[str, Any]]:
    """pass@1 by stage of two generations."""
    old, new = ({rate.stage: rate for rate in rates} for rates in (before, after))
    rows = []
    for stage in sorted({*old, *new}):
        first, second = old.get(stage), new.get(stage)
        rows.append(
            {
                "stage": stage,
                "before": round(first.pass_at_1, 4) if first else None,
                "after": round(second.pass_at_1, 4) if second else None,
                "answers_before": first.answers if first else 0,
                "answers_after": second.answers if second else 0,
            }
        )
    return rows


HACKS = "hacks"
TRIED_TOGETHER = 4
"""Number of components whose hacks are tried in one batch and one step of progress."""


def list_hacks(component: Component) -> dict[str, str]:
    """List sources that deserve no reward, by name; the last two look at the shown cases."""
    hacks = {name: text.format(name=component.function) for name, text in PROGRAMS.items()}
    hacks |= {name: extract_code(text) for name, text in TEXTS.items()}
    calls = shown_calls(component, 4)
    if not calls:
        return hacks
    values = [call.gives for call in calls if call.raises is None]
    common = max(values, key=values.count, default=None)
    head = f"def {component.function}(*args, **named):\n"
    table = "".join(
        f"    if list(args) == {list(call.args)!r} and named == {call.named!r}:\n        "
        + (f"raise {call.raises}\n" if call.raises else f"return {call.gives!r}\n")
        for call in calls
    )
    return hacks | {
        "the same value for everything": f"{head}    return {common!r}\n",
        "a table of the shown cases": f"{head}{table}    return {common!r}\n",
    }


def find_accepted_hacks(
    components: Sequence[Component],
    verifier: Verifier,
    journal: GenerationJournal,
    *,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> dict[str, list[str]]:
    """Names of accepted hacks by the id of their component. No hack needs its dependencies."""
    accepted_hacks: dict[str, list[str]] = {}
    queue: list[tuple[Component, str, dict[str, str]]] = []
    for component in components:
        if not component.cases.calls and not component.cases.properties:
            continue
        hacks = list_hacks(component)
        content = component.model_dump(mode="json", exclude={"line"})
        key = fingerprint([content, hacks])[:24]
        entry = journal.find(HACKS, key)
        if entry is None:
            queue.append((component, key, hacks))
        elif entry["accepted"]:
            accepted_hacks[component.id] = entry["accepted"]
    for first in range(0, len(queue), TRIED_TOGETHER):
        on_progress("hacks", first, len(queue))
        part = queue[first : first + TRIED_TOGETHER]
        submissions = [
            Submission(component, text, 4) for component, _, hacks in part for text in hacks.values()
        ]
        verdicts = iter(verifier.verify(submissions))
        for component, key, hacks in part:
            accepted = [name for name in hacks if next(verdicts).ok]
            journal.add(HACKS, key, component=component.id, tried=len(hacks), accepted=accepted)
            if accepted:
                accepted_hacks[component.id] = accepted
    return accepted_hacks


def require_no_hack(accepted: dict[str, list[str]]) -> None:
    if accepted:
        identifier, names = next(iter(accepted.items()))
        other_ids = ", ".join(list(accepted)[1:])
        raise UserError(
            f"the cases of component {identifier} accept an answer that solves nothing: {names[0]}",
            why="a model that is rewarded by these cases learns to write such answers"
            + (f"; the cases of {other_ids} accept some too" if other_ids else ""),
            fix="add calls with other arguments and values, or a property; `generate.hacks: false` in "
            "graft.yaml turns this check off",
            where=f"components.{identifier}",
        )


GENERATION_FOLDER = "generation"
STARTED, MUTATION, JUDGED, EXUNIT = "started", "mutation", "judged", "exunit"
SECONDS, MEMORY_MIB = 4.0, 256
"""Time and memory limits for the cases of one source."""
MUTATED_TOGETHER = 4
"""Number of components whose mutants are run in one batch and one step of progress."""


class GenerateJob(NamedTuple):
    """What is generated, by which model, and into which folder."""

    plan: ComponentPlan
    model: ComponentModel
    out: Path
    settings: GenerateOptions
    wanted: tuple[str, ...] = ()
    """Ids; all components without any."""
    stages: tuple[Stage, ...] = STAGES
    judge: Rater | None = None
    verifier: Verifier | None = None
    """Defaults to the sandbox."""
    sandbox: SandboxSettings = SandboxSettings()
    max_total_tokens: int | None = None
    """Limit on the tokens of all runs together, input and output."""
    max_minutes: float | None = None
    """Time limit of this run."""
    on_progress: OnProgress = lambda _phase, _done, _total: None


def generate(job: GenerateJob) -> GenerationOutcome:
    folder = job.out / GENERATION_FOLDER
    verifier = job.verifier or open_verifier(job.plan, job.sandbox)
    wanted_ids = job.wanted or tuple(component.id for component in job.plan.components)
    chosen_ids = with_dependencies(job.plan, wanted_ids)
    _require_cases(job.plan, chosen_ids, find_handwritten(job.out, job.plan))
    require_free(job.out, job.plan, chosen_ids)
    with hold_lock(folder):
        journal = GenerationJournal(folder)
        handwritten = find_handwritten(job.out, job.plan)
        # The first link of the chain: which spec, which model, which settings.
        content = {
            "spec": job.plan.spec_hash,
            "package": job.plan.package,
            "model": job.model.label,
            "identity": job.model.identity,
            "settings": job.settings.model_dump(mode="json"),
        }
        journal.add_once(STARTED, text_hash(repr(sorted(content.items(), key=str)))[:24], **content)
        if job.settings.hacks and job.plan.language == "python":
            tried = [component for component in job.plan.components if component.id in chosen_ids]
            require_no_hack(find_accepted_hacks(tried, verifier, journal, on_progress=job.on_progress))
        budget = Budget(job.max_total_tokens, job.max_minutes, spent=spent_tokens(journal))
        attempts = Attempts(job.model, verifier, journal, job.settings, budget, on_progress=job.on_progress)
        builder = ComponentBuilder(
            job.plan,
            attempts,
            journal,
            job.settings,
            handwritten=handwritten,
            on_progress=job.on_progress,
        )
        # Components of the package that is there, which this run does not build.
        present = read_manifest(job.out)
        same_package = present is not None and present.package == job.plan.package
        kept_ids = present.components.keys() - chosen_ids if present is not None and same_package else set()
        earlier = [component.id for component in job.plan.components if component.id in kept_ids]
        built = builder.run(wanted_ids, stages=job.stages, recalled=earlier)
        cards = _score(job, builder, built, verifier, journal)
        own_files = {
            source_name(job.plan, component)
            for component in job.plan.components
            if component.module in handwritten
        }
        cards = _run_exunit(job, built, cards, verifier, journal)
        files = package_files(job.plan, built, cards)
        manifest = write_package(job.out, files, _manifest(job, built, journal), handwritten=own_files)
        journal.add_once(PACKAGED, manifest_key(manifest), files=manifest.files)
    gone = [identifier for identifier in earlier if identifier not in manifest.components]
    return GenerationOutcome(
        package=job.plan.package,
        out=str(job.out),
        language=job.plan.language,
        model=job.model.label,
        built=tuple(component.id for component in built if component.source is not None),
        failed={
            component.id: f"stage {component.failed_stage}: {component.failed}"
            for component in built
            if component.failed
        },
        cards=tuple(cards),
        rates=stage_rates(journal),
        answers=sum(1 for _ in journal.of_kind("answer")),
        verdicts=sum(1 for _ in journal.of_kind("verdict")),
        tokens=spent_tokens(journal),
        journal=str(folder),
        skipped=f"{', '.join(gone)} left the package: made for another specification" if gone else "",
    )


def _require_cases(plan: ComponentPlan, chosen: set[str], handwritten: Mapping[str, str]) -> None:
    components = [component for component in plan.components if component.id in chosen]
    if any(
        component.cases.calls or component.cases.properties or component.module in handwritten
        for component in components
    ):
        return
    ids = ", ".join(component.id for component in components[:8])
    raise UserError(
        f"no component has an executable case: {ids}" if components else "the specification has no leaf",
        why="only cases can accept an answer",
        fix="write calls or properties in NAME.cases.yaml next to the specification; docs/components.md "
        "shows them",
        where=f"components.{components[0].id}" if components else "",
    )


def open_verifier(plan: ComponentPlan, settings: SandboxSettings) -> Verifier:
    """Raises EnvironmentFailure if the language of the plan cannot run here."""
    sandbox = open_sandbox(settings.model_copy(update={"seconds": SECONDS, "memory_mib": MEMORY_MIB}))
    if plan.language == "python":
        return Verifier(plan, sandbox)
    if lacking := why_no_elixir():
        raise EnvironmentFailure(
            f"the components of {plan.package} cannot be verified here", why=lacking, fix="install it"
        )
    return ElixirVerifier(plan, sandbox)


def _score(
    job: GenerateJob,
    builder: ComponentBuilder,
    built: Sequence[BuiltComponent],
    verifier: Verifier,
    journal: GenerationJournal,
) -> list[ScoreCard]:
    by_id = {build.id: build for build in built}
    submissions = {
        build.id: Submission(component, build.source, 4, builder.modules_for(component))
        for build in built
        if build.source is not None and (component := job.plan.get(build.id))
    }
    mutations = dict(
        zip(submissions, _mutate(job, list(submissions.values()), verifier, journal), strict=True)
    )
    cards = []
    for build in built:
        users = [
            by_id[user.id]
            for user in job.plan.components
            if build.id in user.dependencies and user.id in by_id
        ]
        component, mutation = job.plan.get(build.id), mutations.get(build.id)
        card = score_component(
            component, build, users, mutation, job.settings.thresholds, language=job.plan.language
        )
        if job.judge is not None and build.id in submissions:
            mark = _judge(job, job.judge, submissions[build.id], journal)
            card = card.model_copy(update={"judge": mark})
        cards.append(card)
    return cards


def _mutate(
    job: GenerateJob, submissions: Sequence[Submission], verifier: Verifier, journal: GenerationJournal
) -> list[MutationScore]:
    keys = [submission_key(submission) for submission in submissions]
    missing = {
        key: submission
        for key, submission in zip(keys, submissions, strict=True)
        if journal.find(MUTATION, key) is None
    }
    missing_keys = list(missing)
    for first in range(0, len(missing_keys), MUTATED_TOGETHER):
        job.on_progress("mutation score", first, len(missing_keys))
        part = missing_keys[first : first + MUTATED_TOGETHER]
        for key, score in zip(part, verifier.mutate([missing[key] for key in part]), strict=True):
            journal.add(MUTATION, key, score=score.model_dump(mode="json"))
    entries = [journal.find(MUTATION, key) for key in keys]
    return [MutationScore.model_validate(entry["score"]) for entry in entries if entry is not None]


def _judge(
    job: GenerateJob, judge: Rater, submission: Submission, journal: GenerationJournal
) -> float | None:
    """A judge's score for a source, shown next to the figures. A judge without a score changes nothing."""
    key = submission_key(submission)
    entry = journal.find(JUDGED, key)
    if entry is None:
        messages = write_prompt(job.plan, submission.component, 4)
        origin = Origin(file="spec", line=submission.component.line)
        case = Case(id=submission.component.id, origin=origin, messages=messages, reference="")
        try:
            entry = journal.add(JUDGED, key, mark=judge.rate(case, f"```python\n{submission.source}```"))
        except CannotGrade:
            entry = journal.add(JUDGED, key, mark=None)
    return None if entry["mark"] is None else float(entry["mark"])


def _run_exunit(
    job: GenerateJob,
    built: Sequence[BuiltComponent],
    cards: list[ScoreCard],
    verifier: Verifier,
    journal: GenerationJournal,
) -> list[ScoreCard]:
    """Run the tests of an Elixir package on the whole package: a gate for every component."""
    if not isinstance(verifier, ElixirVerifier) or not any(card.built for card in cards):
        return cards
    files = package_files(job.plan, list(built), [])
    key = text_hash(repr(sorted(files.items())))[:24]
    entry = journal.find(EXUNIT, key)
    if entry is None:
        total, failures = verifier.run_tests(files)
        entry = journal.add(EXUNIT, key, total=total, failures=failures)
    note = f"ExUnit: {entry['total']} tests of the package, {entry['failures']} failures"
    passed = entry["failures"] == 0 and entry["total"] > 0
    return [
        card.model_copy(update={"gates": {**card.gates, "exunit": passed}, "notes": (*card.notes, note)})
        if card.built
        else card
        for card in cards
    ]


def _manifest(
    job: GenerateJob, built: Sequence[BuiltComponent], journal: GenerationJournal
) -> PackageManifest:
    """The last entry before packaging: packaging the same work again gives the same manifest."""
    work = [entry for entry in journal.entries if entry["kind"] != PACKAGED]
    components = {
        component.id: {
            "function": component.function,
            "file": source_name(job.plan, job.plan.get(component.id)),
            "source": text_hash(component.source),
            "submission": component.stages[-1].submission,
            "how": component.stages[-1].how,
        }
        for component in built
        if component.source is not None
    }
    return PackageManifest(
        package=job.plan.package,
        language=job.plan.language,
        spec_hash=job.plan.spec_hash,
        model=job.model.label,
        model_identity=job.model.identity,
        journal=str(work[-1]["hash"]),
        components=components,
        files={},
    )
