"""Subjects as a user names them.

Input: a text of `--subject` or of `evaluate.subjects`. Output: what kind of subject is meant, and which. Does
not know whether it exists.

    base                                 the base model alone
    base+prompt                          the base with worked examples, and an optimized instruction where
                                         graft.yaml asks for one
    base+logged_prompt                   the base with the system prompt that the log has
    adapter                              what the last training of this model left
    adapter:FOLDER                       a PEFT folder
    run:ID                               the adapter of a run
    model:NAME                           what the last training of another model of the project left
    release:ID, release:ALIAS            a release; `champion` is short for `release:champion`
    log                                  the replies and durations that the log holds
    URL#model, URL#model,key=VARIABLE    an OpenAI-compatible endpoint; the key is in that variable,
                                         and `,concurrency=16` asks this many questions at a time
    engine:NAME, engine:NAME/PRECISION   the adapter through another engine: llamacpp
    engine:NAME@SUBJECT                  another subject through it, such as engine:llamacpp@champion
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from graftwork.engines.embedded import EMBEDDED
from graftwork.engines.llamacpp import DEFAULT_PRECISION, LLAMACPP
from graftwork.engines.local import agree_on_engine, is_alone
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.records.release import GgufPrecision, PromptVariant
from graftwork.records.report import Answer, Case, Endpoint, EvalJob, Generation
from graftwork.text.redact import is_variable_name

Kind = Literal[
    "base", "prompt", "logged_prompt", "adapter", "folder", "run", "model", "release", "log", "endpoint"
]
ENGINES: dict[str, tuple[str, ...]] = {LLAMACPP: get_args(GgufPrecision)}
"""Engines that a subject can name, and the precisions of each."""
PROMPTED = "base+prompt"
LOGGED_PROMPT = "base+logged_prompt"
PLAIN: dict[str, Kind] = {
    "base": "base",
    PROMPTED: "prompt",
    LOGGED_PROMPT: "logged_prompt",
    "adapter": "adapter",
    "log": "log",
}
CHAMPION = "champion"
MAX_CONCURRENCY = 256


class NamedSubject(NamedTuple):
    """`which` is a folder, a run, a release or an alias, as the kind has it."""

    name: str
    kind: Kind
    which: str = ""
    endpoint: Endpoint | None = None
    engine: str = ""
    """The engine to ask, if it is not the one that all subjects share."""
    precision: str = ""


def parse_subject(text: str) -> NamedSubject:
    name = text.strip()
    if name in PLAIN:
        return NamedSubject(name, PLAIN[name])
    if name == CHAMPION:
        return NamedSubject(name, "release", which=CHAMPION)
    if name.startswith(("http://", "https://")):
        return parse_endpoint(name)
    before, colon, which = name.partition(":")
    if before == "engine" and which:
        return _parse_engine(name, which)
    kinds: dict[str, Kind] = {"adapter": "folder", "run": "run", "model": "model", "release": "release"}
    if colon and which and before in kinds:
        return NamedSubject(name, kinds[before], which=which)
    raise UserError(
        f"{text!r} is not a subject",
        why="a subject is base, base+prompt, base+logged_prompt, adapter, adapter:FOLDER, run:ID, "
        "model:NAME, release:ID, champion, log, engine:NAME or URL#model",
        fix="use one of these, for example `--subject release:champion`",
        where="--subject",
    )


def _parse_engine(name: str, which: str) -> NamedSubject:
    engine_and_precision, _, subject_name = which.partition("@")
    engine, _, precision = engine_and_precision.partition("/")
    subject = parse_subject(subject_name or "adapter")
    precisions = ENGINES.get(engine, ())
    if (
        not precisions
        or (precision and precision not in precisions)
        or subject.kind in ("log", "endpoint")
        or subject.engine
    ):
        raise UserError(
            f"{name!r} is not an engine",
            why=f"engines are {', '.join(ENGINES)}; llamacpp takes {', '.join(ENGINES[LLAMACPP])}",
            fix="write engine:llamacpp, engine:llamacpp/q4_1 or engine:llamacpp@champion",
            where="--subject",
        )
    default = DEFAULT_PRECISION if engine == LLAMACPP else ""
    return subject._replace(name=name, engine=engine, precision=precision or default)


def parse_subjects(texts: Iterable[str]) -> tuple[NamedSubject, ...]:
    """Each subject once, in the order in which they were first named."""
    return tuple({subject.name: subject for subject in map(parse_subject, texts)}.values())


def parse_endpoint(name: str, *, where: str = "--subject") -> NamedSubject:
    """`URL#model,key=VARIABLE` as passed to the option `where`."""
    address, _, model_and_options = name.partition("#")
    model, *options = model_and_options.split(",")
    parts = urlsplit(address)
    if not parts.hostname or not model:
        raise _wrong(address, "it is a URL and, after #, the model to request", where)
    if parts.username or parts.password or parts.query:
        raise _wrong(address.split("@")[-1].split("?")[0], "a key in a URL would end up in files", where)
    endpoint = Endpoint(url=address.rstrip("/"), model=model)
    for option in options:
        key, _, value = option.partition("=")
        if key == "key" and is_variable_name(value):
            endpoint = endpoint.model_copy(update={"api_key_env": value})
        elif key == "concurrency" and value.isdigit() and 1 <= int(value) <= MAX_CONCURRENCY:
            endpoint = endpoint.model_copy(update={"concurrency": int(value)})
        else:
            # The option is not repeated: it may be the key itself, which would then be in a log.
            raise _wrong(
                f"{address}#{model}",
                f"after the comma write key=VARIABLE_NAME or concurrency=1…{MAX_CONCURRENCY}",
                where,
            )
    return NamedSubject(f"{endpoint.url}#{model}", "endpoint", endpoint=endpoint)


def _wrong(name: str, why: str, where: str) -> UserError:
    return UserError(
        f"the endpoint {name} cannot be used",
        why=why,
        fix="write it as https://host/v1#model,key=NAME_OF_THE_VARIABLE",
        where=where,
    )


LOG = "log"


def answers_of_log(cases: Sequence[Case]) -> list[Answer]:
    """The recorded reply of each case. What the log does not state, its tokens, is 0."""
    return [
        Answer(
            case_id=case.id,
            text=case.reference,
            tokens=0,
            prompt_tokens=0,
            finish_reason="stop",
            seconds=(case.duration_ms or 0.0) / 1000,
        )
        for case in cases
    ]


def generation_of_log(cases: Sequence[Case], *, latency_cases: int) -> Generation:
    """Durations of the cases that the other subjects are timed on, where the log holds all of these."""
    from graftwork.evaluate.cases import cases_to_time  # settings import this module, and cases numpy

    timed = [case.duration_ms for case in cases_to_time(cases, most=latency_cases)]
    known_seconds = [duration / 1000 for duration in timed if duration is not None]
    return Generation(
        subject=LOG,
        answers=len(cases),
        seconds=sum((case.duration_ms or 0.0) / 1000 for case in cases),
        tokens_per_second=0.0,
        single_latency_seconds=tuple(known_seconds) if len(known_seconds) == len(timed) else (),
        peak_memory_gib=0.0,
        settings={
            "decoding": "as recorded",
            "durations": sum(case.duration_ms is not None for case in cases),
        },
    )


@dataclass(frozen=True)
class Asking:
    """What all subjects of one evaluation share."""

    cases_file: Path
    example: tuple[Message, ...] = ()
    """Shown to subjects that were not trained on these tasks."""
    prompt: PromptVariant | None = None
    """What the prompted base is asked with; None if it is not asked."""
    shards: int = 1
    timed: bool = True
    """Whether some of the requests are timed alone, too."""


@dataclass(frozen=True)
class Subject:
    """A subject that can be asked. `job` is None for the log, `release` names one where it is one."""

    name: str
    folder: Path
    job: EvalJob | None = None
    identity: str = ""
    release: str | None = None

    @property
    def is_endpoint(self) -> bool:
        return self.job is not None and self.job.endpoint is not None


@dataclass(frozen=True)
class Lineup:
    """The subjects that are compared. The candidate is measured against each of `references`, as against the
    baseline; `others` are candidates like it.
    """

    baseline: Subject
    candidate: Subject
    champion: Subject | None = None
    others: tuple[Subject, ...] = ()
    references: tuple[Subject, ...] = ()

    @property
    def all(self) -> tuple[Subject, ...]:
        champion = (self.champion,) if self.champion is not None else ()
        return (self.baseline, self.candidate, *champion, *self.others, *self.references)


def settle_engine(subject: Subject) -> Subject:
    """Return the subject with the engine that all models are asked with. A subject that names its engine
    keeps it. Answers of two engines differ slightly with the same weights: a comparison of base and adapter
    would attribute that to training. Answers of another engine are not reused.
    """
    if subject.job is None or subject.job.endpoint is not None or subject.job.engine:
        return subject
    return replace(subject, job=subject.job.model_copy(update={"engine": agree_on_engine()}))


def with_one_engine(lineup: Lineup) -> Lineup:
    """The same subjects, all models among them asked with the same engine."""
    return Lineup(
        baseline=settle_engine(lineup.baseline),
        candidate=settle_engine(lineup.candidate),
        champion=settle_engine(lineup.champion) if lineup.champion is not None else None,
        others=tuple(settle_engine(subject) for subject in lineup.others),
        references=tuple(settle_engine(subject) for subject in lineup.references),
    )


def share_engine(subjects: Sequence[Subject]) -> bool:
    """Whether one process answers for all of these before it times them.

    On a GPU opening it, loading the base and recording passes take longer than most evaluations. On a
    CPU each has its own, whose memory is then the subject's.
    """
    jobs = [subject.job for subject in subjects if subject.job is not None]
    embedded = all(job.engine.partition(" ")[0] == EMBEDDED for job in jobs)
    on_gpu = all(job.device.startswith("cuda") and job.shards == 1 for job in jobs)
    return embedded and on_gpu and len({(job.base_folder, job.reasoning) for job in jobs}) == 1


def timed_together(subjects: Sequence[Subject]) -> list[Subject]:
    """Subjects that one process can load together; none if there is only one."""
    timed = [
        subject
        for subject in subjects
        if subject.job is not None
        and not subject.is_endpoint
        and subject.job.latency_cases
        and not is_alone(subject.job)
    ]
    return timed if len(timed) > 1 else []
