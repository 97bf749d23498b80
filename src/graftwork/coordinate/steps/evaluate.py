"""Step: base and adapter answer the same held-out cases, each in a child process."""

from pathlib import Path

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.prepare import Prepared
from graftwork.coordinate.supervise import run_job
from graftwork.coordinate.workplace import Workplace, now
from graftwork.evaluate.ask import read_answers
from graftwork.evaluate.cases import choose_cases, choose_worked_example, hash_cases, read_cases, write_cases
from graftwork.evaluate.score import make_report, score
from graftwork.evaluate.worker import GENERATION_FILE
from graftwork.files.dataset_folder import read_rows
from graftwork.records.base import Record, fingerprint
from graftwork.records.interaction import Message
from graftwork.records.report import Case, EvalJob, Generation, Report, SubjectReport
from graftwork.records.run import TrainOutcome

BASE = "base"
ADAPTER = "adapter"


class Evaluated(Record):
    """The report, and the folders in which the answers lie."""

    cases_file: str
    folders: dict[str, str]
    report: Report


def _do(work: Workplace, made: Made) -> Evaluated:
    prepared, outcome = made.get("prepare", Prepared), made.get("train", TrainOutcome)
    settings = work.settings.evaluate
    cases = choose_cases(read_rows(Path(prepared.folder), "test"), most=settings.max_cases)
    cases_file = work.project.evaluations / f"cases-{hash_cases(cases)[:12]}.jsonl"
    write_cases(cases_file, cases=cases)
    example: tuple[Message, ...] = ()
    if settings.worked_example:
        example = choose_worked_example(read_rows(Path(prepared.folder), "train"), fields=settings.fields)
    jobs = {
        BASE: _job(work, BASE, cases_file, example=example, adapter=None),
        ADAPTER: _job(work, ADAPTER, cases_file, example=(), adapter=outcome),
    }
    subjects = {name: _ask(work, job, cases) for name, job in jobs.items()}
    looks = work.looks.log(hash_cases(cases), subject=outcome.adapter_hash, when=now())
    report = make_report(
        cases, baseline=subjects[BASE], candidate=subjects[ADAPTER], settings=settings, looks=looks
    )
    return Evaluated(
        cases_file=str(cases_file),
        folders={name: job.folder for name, job in jobs.items()},
        report=report,
    )


def _job(
    work: Workplace,
    subject: str,
    cases_file: Path,
    *,
    example: tuple[Message, ...],
    adapter: TrainOutcome | None,
) -> EvalJob:
    settings = work.settings.evaluate
    folder = cases_file.parent / _folder_name(work, subject, cases_file, example, adapter)
    return EvalJob(
        subject=subject,
        folder=str(folder),
        base_folder=work.base.folder,
        adapter_folder=adapter.adapter_folder if adapter else None,
        cases_file=str(cases_file),
        worked_example=example,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        threads=work.settings.train.threads,
        latency_cases=settings.latency_cases,
        reasoning=work.settings.data.reasoning == "keep",
    )


def _folder_name(
    work: Workplace,
    subject: str,
    cases_file: Path,
    example: tuple[Message, ...],
    adapter: TrainOutcome | None,
) -> str:
    """Named by what decides the answers, so that a base is asked the same cases only once."""
    decided_by = [
        work.base.revision,
        adapter.adapter_hash if adapter else None,
        cases_file.name,
        [message.model_dump() for message in example],
        work.settings.evaluate.model_dump(mode="json", include={"max_new_tokens", "batch_size"}),
    ]
    return f"{subject}-{fingerprint(decided_by)[:12]}"


def _ask(work: Workplace, job: EvalJob, cases: tuple[Case, ...]) -> SubjectReport:
    folder = Path(job.folder)
    run_job(
        name=f"the evaluation of the {job.subject}",
        module="graftwork.evaluate.worker",
        job=job,
        folder=folder,
        narrator=work.narrator,
    )
    generation = Generation.from_json((folder / GENERATION_FILE).read_bytes())
    return score(cases, answers=read_answers(folder), generation=generation, settings=work.settings.evaluate)


def _still_there(_work: Workplace, evaluated: Evaluated) -> bool:
    files = [Path(folder) / GENERATION_FILE for folder in evaluated.folders.values()]
    return all(path.exists() for path in (*files, Path(evaluated.cases_file)))


def load_cases(evaluated: Evaluated) -> tuple[Case, ...]:
    return read_cases(Path(evaluated.cases_file))


STEP = Step(
    name="evaluate",
    title="evaluate base and adapter",
    needs=("prepare", "train"),
    makes=Evaluated,
    depends_on=lambda work, _made: work.settings.evaluate.model_dump(mode="json"),
    do=_do,
    identity=lambda evaluated: str(evaluated.report.fingerprint()),
    still_there=_still_there,
)
