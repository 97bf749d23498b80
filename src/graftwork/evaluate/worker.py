"""`python -m graftwork.evaluate.worker JOB.json`: one subject, all cases, in a process of its own.

In: an EvalJob as a file. Out: `answers.jsonl`, and `generation.json` written last: its presence says
that all answers are there. Who answers stands in `subjects/`: a model of our own, vLLM where it is used,
an endpoint, or several processes that share the cases.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from graftwork.evaluate.ask import Asker, summarise
from graftwork.evaluate.cases import insert_example, read_cases
from graftwork.evaluate.subjects.book import ANSWERS_FILE, BATCHES_FILE, PLAN_FILE, AnswerBook
from graftwork.evaluate.subjects.engines import is_vllm, settle
from graftwork.files.digest import file_digest, folder_digest
from graftwork.files.whole import write_whole
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.base import fingerprint
from graftwork.records.report import Case, EvalJob, Generation
from graftwork.text.redact import hide_in_tracebacks

GENERATION_FILE = "generation.json"
IDENTITY_FILE = "asked_for.txt"
NOT_DECIDING = {
    "folder",
    "base_folder",
    "adapter_folder",
    "cases_file",
    "latency_cases",
    "answers_folder",
    "shards",
    "endpoint",
}


def evaluate(job: EvalJob) -> None:
    """Load the subject, ask everything, say how it went."""
    folder = Path(job.folder)
    job = settle(job)
    drop_answers_of_another_job(job)
    cases = read_cases(Path(job.cases_file))
    if _all_is_there(job, cases):
        return
    with Heart(folder) as heart:
        if job.endpoint is not None:
            generation = _ask_endpoint(job, cases, heart)
        else:
            generation = _ask_model(job, cases, heart)
        write_whole(folder / GENERATION_FILE, generation.to_json())
        heart.beat("done", len(cases), len(cases), subject=job.subject)


def _all_is_there(job: EvalJob, cases: Sequence[Case]) -> bool:
    """Whether an evaluation before this one answered, and timed as many requests as this one wants."""
    path = Path(job.folder) / GENERATION_FILE
    if not path.exists():
        return False
    if job.endpoint is not None:
        # What it has answered is not paid for twice.
        return True
    timed = Generation.from_json(path.read_bytes()).single_latency_seconds
    return len(timed) >= min(job.latency_cases, len(cases))


def drop_answers_of_another_job(job: EvalJob) -> None:
    """Answers are taken up again only for the same question to the same model."""
    folder = Path(job.folder)
    identity = identify(job)
    marker = folder / IDENTITY_FILE
    if marker.exists() and marker.read_text() == identity:
        return
    for name in (GENERATION_FILE, ANSWERS_FILE, BATCHES_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)
    write_whole(marker, identity)


def identify(job: EvalJob) -> str:
    """A hash of what decides the answers: cases, weights or address, worked example, limits."""
    base = Path(job.base_folder)
    asked = [job.endpoint.url, job.endpoint.model] if job.endpoint else None
    return fingerprint(
        {
            "cases": file_digest(Path(job.cases_file)),
            "adapter": folder_digest(Path(job.adapter_folder)) if job.adapter_folder else None,
            # Base weights are large and proven elsewhere; sizes catch an exchanged folder.
            "base": asked
            or sorted((file.name, file.stat().st_size) for file in base.iterdir() if file.is_file()),
            "job": job.model_dump(mode="json", exclude=NOT_DECIDING),
        }
    )


def _ask_model(job: EvalJob, cases: Sequence[Case], heart: Heart) -> Generation:
    shards = _share_cases(job, cases, heart) if job.shards > 1 else 1
    heart.beat("loading the model", 0, len(cases), subject=job.subject)
    asker = _make_asker(job, heart, shards=shards)
    asker.ask_all(cases)
    timings = asker.time_requests(cases)
    firsts = [timing.first_token for timing in timings if timing.first_token is not None]
    return asker.summarise(
        single_latency_seconds=tuple(timing.total for timing in timings),
        first_token_seconds=tuple(firsts) if len(firsts) == len(timings) else (),
    )


def _share_cases(job: EvalJob, cases: Sequence[Case], heart: Heart) -> int:
    """What is missing, answered by several processes; this one then only measures single requests."""
    from graftwork.evaluate.subjects.shards import ask_in_shards
    from graftwork.model.template import Template

    template = Template.from_folder(Path(job.base_folder), reasoning=job.reasoning)
    lengths = {
        case.id: len(template.prompt(insert_example(case.messages, example=job.worked_example)))
        for case in cases
    }
    return ask_in_shards(
        job,
        AnswerBook(job, cases),
        lengths=lengths,
        progress=heart,
        stop_asked=stop_asked.is_set,
        cards=_count_cards() if job.device == "cuda" else 0,
    )


def _make_asker(job: EvalJob, heart: Heart, *, shards: int) -> Asker:
    from graftwork.evaluate.subjects.own import OwnModel
    from graftwork.evaluate.subjects.vllm_engine import VllmModel

    model = VllmModel(job) if is_vllm(job) else OwnModel(job)
    asker = Asker(
        job,
        turns=model.template,
        generate=model.generate,
        sample=model.sample,
        time_one=model.time_one,
        weigh=model.weigh,
        progress=heart,
        peak_memory_gib=model.peak_memory_gib,
        stop_asked=stop_asked.is_set,
        described={**model.described, "processes": shards},
    )
    if isinstance(model, OwnModel):
        model.on_token = asker.hear
    return asker


def _ask_endpoint(job: EvalJob, cases: Sequence[Case], heart: Heart) -> Generation:
    from graftwork.evaluate.subjects.remote import ask_endpoint

    asked = ask_endpoint(job, cases, progress=heart, stop_asked=stop_asked)
    return summarise(
        job,
        single_latency_seconds=asked.single_latency_seconds,
        first_token_seconds=asked.first_token_seconds,
        peak_memory_gib=0.0,
        described=asked.described,
    )


def _count_cards() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(EvalJob, lambda job: Path(job.folder), evaluate))
