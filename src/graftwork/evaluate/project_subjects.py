"""The subjects of an evaluation on an open project, the prompted base among them, and the cases to ask.

Input: an open project, its dataset, a subject as it was named. Output: an EvalJob, or None for the log, which
is not asked; the prompt of the subject `base+prompt`, whose worked examples come from the training split
alone; cases of the test split or of the file that `evaluate.cases` names, which know the system prompt of the
log. Releases are verified byte by byte. A subject's identity is the hash of its weights, so that an adapter
and the release made of it share their answers. A case whose prompt is trained on is refused.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.data.project import PreparedData, audit_context
from graftwork.engines.llamacpp import LLAMACPP
from graftwork.engines.local import name_engine
from graftwork.evaluate.ask.prompt_search import PromptSearchJob, require_gepa
from graftwork.evaluate.cases import choose_cases, draw_cases, read_case_file, write_cases
from graftwork.evaluate.project import price_cases
from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.evaluate.subjects import (
    CHAMPION,
    LOGGED_PROMPT,
    PROMPTED,
    Asking,
    NamedSubject,
    Subject,
    parse_subject,
)
from graftwork.files.dataset import iterate_rows, read_rows
from graftwork.files.disk import file_digest, folder_digest, make_folder
from graftwork.grading.answers import AnswerFields, read_answer
from graftwork.project.open_project import OpenProject, load_template, name_entry
from graftwork.project.supervise import WorkerTask, run_job
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row, Split
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.release import PROMPT_FILE, TOOLS, PromptVariant, Release, replace_system
from graftwork.records.report import Case, EvalJob
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import find_release
from graftwork.registry.project import full_alias, open_store
from graftwork.train.rollouts.project import find_case_file, read_prompt_file

if TYPE_CHECKING:
    from graftwork.store.runs import RunEntry

ANSWERS_FOLDER = "answers"

DROPPED = "drop"

FIRST = "Answer the user's request exactly in the form that the examples show."
MOST_CASES = 50
"""Cases of each split; with more, a search tries fewer instructions."""

REFUSAL_FROM = 4
"""From this many examples on, the last may be a refusal, if the training rows have any."""


@dataclass(frozen=True)
class SubjectWeights:
    """Weights to load in addition to the base."""

    folder: Path
    adapter_hash: str | None
    release: str | None = None
    prompt: PromptVariant | None = None
    """Prompt of a release that is a prompt on the base, without weights of its own."""


def resolve_subject(
    work: OpenProject, subject: NamedSubject, *, asking: Asking, outcome: TrainOutcome | None
) -> Subject:
    """Return the job that asks this subject. `outcome` is that of the training, if it was needed."""
    if subject.kind == "log":
        identity = fingerprint(["log", asking.cases_file.name])
        return Subject("log", asking.cases_file.parent / f"log-{identity[:12]}", identity=identity)
    if subject.kind == "endpoint":
        assert subject.endpoint is not None
        identity = fingerprint(["endpoint", subject.endpoint.url, subject.endpoint.model])
        job = _job(
            work,
            subject.name,
            asking,
            identity=identity,
            example=asking.example,
            endpoint=subject.endpoint,
            device="remote",
        )
        return Subject(subject.name, Path(job.folder), job, identity)
    weights = find_weights(work, subject, outcome)
    engine = name_engine(subject.engine) if subject.engine else ""
    # The same weights through another engine are another subject.
    asked_through = [[engine, subject.precision]] if engine else []
    identity = fingerprint([work.base.revision, weights.adapter_hash if weights else None, *asked_through])
    # What is put before each case. A subject that was trained on these tasks needs no example of them.
    prompt = PromptVariant(examples=asking.example)
    if weights is not None:
        prompt = weights.prompt or PromptVariant()
    elif subject.kind == "prompt":
        assert asking.prompt is not None
        prompt = asking.prompt
    folder = weights.folder if weights and weights.prompt is None else None
    job = _job(
        work,
        subject.name,
        asking,
        identity=identity,
        example=prompt.examples,
        instruction=prompt.instruction,
        logged_system=subject.kind == "logged_prompt",
        adapter_folder=str(folder) if folder else None,
        device="cpu" if subject.engine == LLAMACPP else find_device(),
        shards=asking.shards,
        # llama.cpp gives no probabilities of a given reply.
        perplexity=work.settings.evaluate.perplexity and subject.engine != LLAMACPP,
        engine=engine,
        precision=subject.precision,
    )
    return Subject(
        subject.name, Path(job.folder), job, identity, release=weights.release if weights else None
    )


def find_champion(work: OpenProject, *, unlike: str) -> Release | None:
    """The served release, if it can be compared: of this base and template, another adapter."""
    release_id = work.releases.aliases().get(full_alias(work))
    if release_id is None:
        return None
    release = work.releases.get(release_id)
    same = release.base_fingerprint == work.base.revision
    return release if same and release.adapter_hash != unlike else None


def find_device() -> str:
    """The GPU if this process may use one; detected without heavy imports."""
    from graftwork.process.machine import list_gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible not in _gpus_found and list_gpus():
        _gpus_found.add(visible)
    return "cuda" if visible in _gpus_found else "cpu"


_gpus_found: set[str | None] = set()
"""Settings of CUDA_VISIBLE_DEVICES with a GPU: the driver's tool is called once, since it takes up to seconds
to answer.
"""


def find_weights(
    work: OpenProject, subject: NamedSubject, outcome: TrainOutcome | None
) -> SubjectWeights | None:
    if subject.kind in ("base", "prompt", "logged_prompt"):
        return None
    if subject.kind == "folder":
        folder = (work.project.root / subject.which).expanduser()
        _require_adapter(folder)
        return SubjectWeights(folder, folder_digest(folder))
    done = outcome if subject.kind == "adapter" else None
    if subject.kind == "run":
        entry = work.runs.get(subject.which)
        if entry is None or entry.outcome is None:
            raise explain_unfinished(subject.which, entry)
        done = TrainOutcome.model_validate(entry.outcome)
        _require_adapter(Path(done.adapter_folder))
    elif subject.kind == "model":
        done = find_trained(work, subject.which)
        if done is None:
            raise UserError(
                f"the model {subject.which!r} is not trained",
                why=f"graft.yaml names: {', '.join(work.project.settings.all_models)}",
                fix=f"`graft train --model {subject.which}` trains it",
                where="--subject",
            )
    if subject.kind in ("adapter", "run", "model"):
        assert done is not None
        require_same_base(work, done.run_id, subject=subject.name)
        return SubjectWeights(Path(done.adapter_folder), done.adapter_hash)
    release = find_release(work.releases, full_alias(work) if subject.which == CHAMPION else subject.which)
    if release.base_fingerprint != work.base.revision:
        raise UserError(
            f"release {release.id[:12]} was trained on a different base",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="evaluate it in a project, or with a --model, that has this base",
            where="--subject",
        )
    if release.template_fingerprint != load_template(work).template_fingerprint:
        raise UserError(
            f"release {release.id[:12]} was trained with a different chat template",
            why="with a different template than in training, the model answers badly",
            fix="restore the template of the base model, or compare with another release",
            where="--subject",
        )
    folder = open_store(work).get(release.id)
    if (folder / PROMPT_FILE).is_file():
        # The base answers: what it was asked with is known from other evaluations of the same prompt.
        prompt = PromptVariant.from_json((folder / PROMPT_FILE).read_bytes())
        return SubjectWeights(folder, None, release=release.id, prompt=prompt)
    return SubjectWeights(folder, release.adapter_hash, release=release.id)


def explain_unfinished(run_id: str, entry: "RunEntry | None") -> UserError:
    """Why this run has no adapter; a failed run says its error."""
    if entry is not None and entry.error is not None:
        return UserError(
            f"run {run_id} {'failed' if entry.state == 'failed' else 'has not finished'}: "
            f"{entry.error.get('what')}",
            why=str(entry.error.get("why") or "only a run that has finished has an adapter"),
            fix=str(entry.error.get("fix") or "`graft train` continues the run"),
            where="--subject",
        )
    return UserError(
        f"no finished run is named {run_id!r}",
        why="only a run that has finished has an adapter",
        fix="`graft status` lists the runs",
        where="--subject",
    )


def require_same_base(work: OpenProject, run_id: str, *, subject: str) -> None:
    """Refuse the adapter of a run on another base: loaded on this one, it would answer at random."""
    entry = work.runs.get(run_id)
    base = entry.plan.get("base_fingerprint") if entry is not None else None
    if entry is None or base in (None, work.base.revision):
        return
    raise UserError(
        f"{subject} was trained on a different base",
        why=f"run {run_id} needs {entry.plan.get('base')} with revision {str(base)[:12]}",
        fix="use --model with a model in graft.yaml that has this base, or train again",
        where="--subject",
    )


def find_trained(work: OpenProject, name: str) -> TrainOutcome | None:
    """Outcome of the last training of a model of this project; None if it is gone or never existed."""
    if name not in work.project.settings.all_models:
        return None
    entry = work.ledger.get(name_entry(work, "train", model=name))
    done = TrainOutcome.model_validate(entry.output) if entry is not None else None
    return done if done is not None and Path(done.adapter_folder).is_dir() else None


def find_without_repaired(work: OpenProject) -> str | None:
    """The model that is trained like this one, but without the rows that a teacher answered."""
    models = work.project.settings.models
    settings = models.get(work.model)
    if settings is None or not settings.repaired:
        return None
    alike = settings.model_copy(update={"repaired": False})
    return next((name for name, model in models.items() if model == alike), None)


def _require_adapter(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
        raise UserError(
            "there is no adapter in this folder",
            why="a PEFT folder holds adapter_config.json and adapter_model.safetensors",
            fix="specify the folder that holds these files",
            where=str(folder),
        )


def _job(work: OpenProject, name: str, asking: Asking, **fields: Any) -> EvalJob:
    settings = work.settings.evaluate
    example = fields.pop("example")
    job = EvalJob(
        subject=name,
        folder="",
        base_folder=work.weights.folder,
        adapter_folder=fields.pop("adapter_folder", None),
        cases_file=str(asking.cases_file),
        worked_example=example,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size or rows_at_once(fields["device"]),
        threads=work.settings.train.threads,
        latency_cases=settings.latency_cases if asking.timed else 0,
        reasoning=work.settings.data.reasoning == "keep",
        answers_folder=str(work.project.state / ANSWERS_FOLDER),
        temperature=settings.sampling.temperature,
        top_p=settings.sampling.top_p,
        seed=settings.sampling.seed,
        repeats=settings.repeats,
        **fields,
    )
    # Named by what decides the answers, so that a subject is asked the same cases only once.
    decided_by = [
        job.identity,
        asking.cases_file.name,
        [message.model_dump() for message in job.worked_example],
        [job.max_new_tokens, job.batch_size, job.temperature, job.top_p, job.seed, job.repeats],
        [job.perplexity, job.reasoning, job.device],
        *([[job.instruction, job.logged_system]] if job.instruction or job.logged_system else []),
    ]
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    folder = asking.cases_file.parent / f"{plain}-{fingerprint(decided_by)[:12]}"
    return job.model_copy(update={"folder": str(folder)})


def rows_at_once(device: str) -> int:
    """A few rows saturate a CPU; a GPU takes many in the time of one."""
    return 256 if device.startswith("cuda") else 32


def read_held_out(work: OpenProject, folder: Path) -> tuple[Case, ...]:
    """As many as the settings allow; of the dataset in `folder` if no file is named. Those of a quick trial
    are of the validation split, unless that is empty or chooses a prompt or a checkpoint: each use of the
    test questions makes the gate stricter.
    """
    settings = work.settings.evaluate
    if settings.cases is None:
        chooses = settings.prompt.optimizer != "none" or work.settings.train.eval.every is not None
        is_apart = work.quick and not chooses and any(iterate_rows(folder, "validation"))
        split: Split = "validation" if is_apart else "test"
        return tuple(price_cases(work, choose_cases(read_rows(folder, split), most=settings.max_cases)))
    cases = read_case_file(work.project.root / settings.cases, named=settings.checks)
    # The prompts of the training rows, and those that reinforcement learning answers.
    trained = {row.messages for row in iterate_rows(folder, "train")}
    train = work.settings.train
    if train.objective == "grpo" and (path := find_case_file(work)) is not None:
        trained |= {case.messages for case in read_prompt_file(path, train.rollouts)}
    elif train.objective == "grpo" and train.rollouts.source == "rl":
        trained |= {row.messages for row in iterate_rows(folder, "rl")}
    leaked = [case for case in cases if case.messages in trained]
    if leaked:
        raise UserError(
            f"the case {leaked[0].id} is a training row",
            why=f"{len(leaked)} of {len(cases)} cases were trained on, so they would measure memorization",
            fix="remove them from the file, or from data.logs and train.rollouts.source",
            where="evaluate.cases",
        )
    return draw_cases(cases, most=settings.max_cases)


def hash_case_file(work: OpenProject) -> str | None:
    """Hash the file of cases; None if none is configured or it does not exist yet."""
    file_name = work.settings.evaluate.cases
    path = work.project.root / file_name if file_name is not None else None
    return file_digest(path) if path is not None and path.is_file() else None


def subjects_by_settings(work: OpenProject) -> tuple[str, ...]:
    """Prompted subjects that the settings ask for, by a rule of the gate or by what was dropped."""
    needed = work.settings.gate.subjects_needed()
    subjects = [PROMPTED] if "prompt" in needed else []
    dropped = work.settings.data.logged_system_prompt == DROPPED
    return (*subjects, *([LOGGED_PROMPT] if dropped or "logged_prompt" in needed else []))


MOST_EXAMPLE_TOKENS = 2048
"""Maximum tokens of all worked examples together."""


def find_prompt(work: OpenProject, prepared: PreparedData) -> PromptVariant:
    """Worked examples from the training split, and an optimized instruction if the settings ask for one."""
    settings = work.settings.evaluate
    prompt = choose_examples(
        read_rows(Path(prepared.folder), "train"),
        most=settings.prompt.examples,
        max_tokens=MOST_EXAMPLE_TOKENS,
        fields=settings.fields,
    )
    if settings.prompt.optimizer == "none":
        return prompt
    return optimize_prompt(work, prepared, prompt)


def with_logged_prompts(work: OpenProject, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases, each with the logged system prompt if it differs from its own."""
    prompts = find_logged_prompts(work, {case.origin for case in cases})

    def with_prompt(case: Case) -> Case:
        system_prompt = "\n\n".join(turn.content for turn in case.messages if turn.role == "system")
        logged = prompts.get(case.origin)
        return case if logged in (None, system_prompt) else case.model_copy(update={"logged_system": logged})

    return tuple(with_prompt(case) for case in cases)


def find_logged_prompts(work: OpenProject, origins: Collection[Origin]) -> dict[Origin, str]:
    """The system prompts that the logs have, redacted as the rows are.

    A line with several rows gives the prompt of its first. They are in no dataset: what a dataset drops or
    replaces stays out of it.
    """
    from graftwork.data.corpus.build import build_corpus
    from graftwork.data.prepare import FEATURES

    corpus = build_corpus(
        audit_context(work, template=load_template(work)),
        folder=work.project.data / FEATURES,
        root=work.project.root,
        on_progress=lambda _phase, _done, _total: None,
    )
    row_numbers = [number for number in range(corpus.rows) if corpus.origin(number) in origins]
    prompts: dict[Origin, str] = {}
    for _, row in corpus.rows_at(row_numbers):
        text = "\n\n".join(turn.content for turn in row.messages if turn.role == "system")
        if text:
            prompts.setdefault(row.origin, text)
    return prompts


def remark_on_prompts(work: OpenProject, cases: Sequence[Case]) -> tuple[str, ...]:
    """How many tokens a request is shorter without the logged system prompt, over the held-out cases."""
    changed = [case for case in cases if case.logged_system is not None]
    if not changed:
        return ()
    template = load_template(work)
    before = [len(template.prompt(replace_system(c.messages, c.logged_system or ""))) for c in changed]
    after = [len(template.prompt(case.messages)) for case in changed]
    saved = [float(long - short) for long, short in zip(before, after, strict=True)]
    mean = math.fsum(saved) / len(saved)
    low, high = mean, mean
    if len(set(saved)) > 1:
        low, high = bootstrap_mean(saved, confidence=work.settings.evaluate.confidence)
    spread = "" if low == high else f" ({low:,.0f} to {high:,.0f})"
    return (
        f"The logged system prompt is trained away: a request has {mean:,.0f}{spread} tokens less, "
        f"{sum(after) / len(after):,.0f} instead of {sum(before) / len(before):,.0f}, over "
        f"{len(changed)} of {len(cases)} held-out cases.",
    )


def optimize_prompt(work: OpenProject, prepared: PreparedData, examples: PromptVariant) -> PromptVariant:
    """The prompt of an earlier search if nothing has changed since."""
    require_gepa()
    settings = work.settings.evaluate
    example_rows = set(examples.rows)
    train = [row for row in read_rows(Path(prepared.folder), "train") if row.id not in example_rows]
    validation = read_rows(Path(prepared.folder), "validation")
    if not train or not validation:
        return examples
    training, validation_cases = (choose_cases(rows, most=MOST_CASES) for rows in (train, validation))
    instruction = usual_instruction(train) or FIRST
    decided = [
        prepared.dataset.content_hash,
        work.base.revision,
        examples.fingerprint(),
        instruction,
        settings.model_dump(mode="json", include={"prompt", "fields", "checks", "metrics", "max_new_tokens"}),
        settings.costs.success,
    ]
    folder = work.project.evaluations / f"prompt-search-{fingerprint(decided)[:12]}"
    make_folder(folder)
    if not (folder / PROMPT_FILE).is_file():
        cases_file = folder / "cases.jsonl"
        write_cases(cases_file, cases=(*training, *validation_cases))
        asking = Asking(cases_file, example=examples.examples, timed=False)
        base = resolve_subject(work, parse_subject("base"), asking=asking, outcome=None)
        assert base.job is not None
        job = PromptSearchJob(
            folder=str(folder),
            job=base.job.model_copy(update={"folder": str(folder)}),
            training=len(training),
            instruction=instruction,
            rows=examples.rows,
            settings=settings,
            project_folder=str(work.project.root),
        )
        task = WorkerTask(
            name="optimizing the prompt of the base",
            module="graftwork.evaluate.ask.prompt_search",
            job=job,
            folder=folder,
        )
        run_job(task, reporter=work.reporter, place=work.place)
    return PromptVariant.from_json((folder / PROMPT_FILE).read_bytes())


def usual_instruction(rows: Sequence[Row]) -> str:
    """The most common system prompt, without tool definitions; empty if rows have none."""
    texts = Counter(
        turn.content
        for row in rows
        for turn in row.messages
        if turn.role == "system" and TOOLS not in turn.content
    )
    return texts.most_common(1)[0][0] if texts else ""


def choose_examples(
    rows: Sequence[Row], *, most: int, max_tokens: int, fields: AnswerFields
) -> PromptVariant:
    """Up to `most` rows that fit into `max_tokens` together: each role in turn, rows of usual length first.

    The first examples answer: a base that sees refusals first refuses.
    """
    answering = [row for row in rows if not _refuses(row, fields)]
    refusing = [row for row in rows if _refuses(row, fields)] if most >= REFUSAL_FROM else []
    ranked = _in_turn(answering or rows)
    picked: list[Row] = []
    spent = 0
    for limit, pool in ((most - 1 if refusing else most, ranked), (most, _in_turn(refusing)[:1])):
        for row in pool:
            if len(picked) < limit and spent + len(row.tokens) <= max_tokens:
                picked.append(row)
                spent += len(row.tokens)
    examples: list[Message] = []
    for row in picked:
        examples += [turn for turn in row.messages if turn.role != "system"]
        examples.append(Message(role="assistant", content=row.reply))
    return PromptVariant(examples=tuple(examples), rows=tuple(row.id for row in picked))


def _refuses(row: Row, fields: AnswerFields) -> bool:
    answer = read_answer(row.reply, fields=fields)
    return answer is not None and bool(answer.refused)


def _in_turn(rows: Sequence[Row]) -> list[Row]:
    """One row of each role, then the second ones; within a role those nearest to its median length first."""
    by_role: dict[str, list[Row]] = {}
    for row in rows:
        by_role.setdefault(row.group or "", []).append(row)
    ranked: list[tuple[int, str, Row]] = []
    for role, members in by_role.items():
        lengths = sorted(len(row.tokens) for row in members)
        middle = lengths[(len(lengths) - 1) // 2]
        near = sorted(members, key=lambda row: (abs(len(row.tokens) - middle), row.id))
        ranked += [(turn, role, row) for turn, row in enumerate(near)]
    largest = {role: -len(members) for role, members in by_role.items()}
    ordered = sorted(ranked, key=lambda place: (place[0], largest[place[1]], place[1]))
    return [row for _, _, row in ordered]
