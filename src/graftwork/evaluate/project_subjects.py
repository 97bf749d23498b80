"""From the name of a subject to the job that asks it: what it is, where it is and how it is identified.

In: an open project and a subject as it was named. Out: an EvalJob, or None for the log, which is not
asked. Releases are verified byte by byte. A subject's identity is the hash of its weights, so that an
adapter and the release made of it share their answers.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.engines.llamacpp import LLAMACPP
from graftwork.engines.local import name_engine
from graftwork.evaluate.subjects import CHAMPION, Asking, NamedSubject, Subject
from graftwork.files.disk import folder_digest
from graftwork.project.open_project import OpenProject, load_template, name_entry
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.release import PROMPT_FILE, PromptVariant, Release
from graftwork.records.report import EvalJob
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import find_release
from graftwork.registry.project import full_alias, open_store

ANSWERS_FOLDER = "answers"


@dataclass(frozen=True)
class SubjectWeights:
    """What is loaded besides the base."""

    folder: Path
    adapter_hash: str | None
    release: str | None = None
    prompt: PromptVariant | None = None
    """Of a release that is a prompt on the base, without weights of its own."""


def resolve_subject(
    work: OpenProject, subject: NamedSubject, *, asking: Asking, outcome: TrainOutcome | None
) -> Subject:
    """The job that asks this subject. `outcome` is what training left, where it was needed."""
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
    """The release that serves now, where it can be compared: of this base and template, another adapter."""
    release_id = work.releases.aliases().get(full_alias(work))
    if release_id is None:
        return None
    release = work.releases.get(release_id)
    same = release.base_fingerprint == work.base.revision
    return release if same and release.adapter_hash != unlike else None


def find_device() -> str:
    """The card where there is one that this process may use; found without loading anything heavy."""
    from graftwork.process.machine import list_gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible not in _cards_found and list_gpus():
        _cards_found.add(visible)
    return "cuda" if visible in _cards_found else "cpu"


_cards_found: set[str | None] = set()
"""Settings of CUDA_VISIBLE_DEVICES under which there was a card: the driver's tool is asked once, since it
takes up to seconds to answer."""


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
            raise UserMistake(
                f"there is no finished run {subject.which!r}",
                why="only a run that came to its end has left an adapter",
                fix="`graft status` names the runs",
                where="--subject",
            )
        done = TrainOutcome.model_validate(entry.outcome)
        _require_adapter(Path(done.adapter_folder))
    elif subject.kind == "model":
        done = find_trained(work, subject.which)
        if done is None:
            raise UserMistake(
                f"the model {subject.which!r} is not trained",
                why=f"graft.yaml names: {', '.join(work.project.settings.all_models)}",
                fix=f"`graft train --model {subject.which}` trains it",
                where="--subject",
            )
    if subject.kind in ("adapter", "run", "model"):
        assert done is not None
        return SubjectWeights(Path(done.adapter_folder), done.adapter_hash)
    release = find_release(work.releases, full_alias(work) if subject.which == CHAMPION else subject.which)
    if release.base_fingerprint != work.base.revision:
        raise UserMistake(
            f"release {release.id[:12]} was trained on another base",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="evaluate it in a project, or with a --model, that has this base",
            where="--subject",
        )
    if release.template_fingerprint != load_template(work).template_fingerprint:
        raise UserMistake(
            f"release {release.id[:12]} was trained with another chat template",
            why="asked in another form than it was trained in, the model answers badly",
            fix="restore the template of the base model, or compare with another release",
            where="--subject",
        )
    folder = open_store(work).get(release.id)
    if (folder / PROMPT_FILE).is_file():
        # The base answers: what it was asked with is known from other evaluations of the same prompt.
        prompt = PromptVariant.from_json((folder / PROMPT_FILE).read_bytes())
        return SubjectWeights(folder, None, release=release.id, prompt=prompt)
    return SubjectWeights(folder, release.adapter_hash, release=release.id)


def find_trained(work: OpenProject, name: str) -> TrainOutcome | None:
    """What the last training of a model of this project left; None where it is gone or never was."""
    if name not in work.project.settings.all_models:
        return None
    entry = work.ledger.get(name_entry(work, "train", model=name))
    done = TrainOutcome.model_validate(entry.output) if entry is not None else None
    return done if done is not None and Path(done.adapter_folder).is_dir() else None


def find_without_repaired(work: OpenProject) -> str | None:
    """The model that is trained as this one is, but without the rows that a teacher answered."""
    models = work.project.settings.models
    own = models.get(work.model)
    if own is None or not own.repaired:
        return None
    alike = own.model_copy(update={"repaired": False})
    return next((name for name, model in models.items() if model == alike), None)


def _require_adapter(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
        raise UserMistake(
            "there is no adapter in this folder",
            why="a PEFT folder holds adapter_config.json and adapter_model.safetensors",
            fix="name the folder that holds these files",
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
    """A processor has its hands full with few rows; a card takes many in the time of one."""
    return 256 if device.startswith("cuda") else 32
