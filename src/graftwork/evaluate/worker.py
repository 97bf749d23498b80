"""`python -m graftwork.evaluate.worker JOB.json`: one subject, all cases, in a process of its own.

In: an EvalJob as a file. Out: `answers.jsonl`, and `generation.json` written last: its presence says
that all answers are there. The only file of this stage that loads a model.
"""

import sys
from functools import partial
from pathlib import Path

from graftwork.evaluate.ask import ANSWERS_FILE, BATCHES_FILE, Asker
from graftwork.evaluate.cases import read_cases
from graftwork.files.digest import file_digest, folder_digest
from graftwork.files.whole import write_whole
from graftwork.process.heartbeat import Heart
from graftwork.process.memory import peak_memory_gib
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.base import fingerprint
from graftwork.records.report import EvalJob

GENERATION_FILE = "generation.json"
IDENTITY_FILE = "asked_for.txt"


def evaluate(job: EvalJob) -> None:
    """Load the subject, ask everything, say how it went."""
    folder = Path(job.folder)
    drop_answers_of_another_job(job)
    if (folder / GENERATION_FILE).exists():
        return
    cases = read_cases(Path(job.cases_file))
    with Heart(folder) as heart:
        heart.beat("loading the model", 0, len(cases), subject=job.subject)
        asker = _make_asker(job, heart)
        asker.ask_all(cases)
        seconds = asker.time_single(cases)
        generation = asker.summarise(single_latency_seconds=seconds)
        write_whole(folder / GENERATION_FILE, generation.to_json())
        heart.beat("done", len(cases), len(cases), subject=job.subject)


def drop_answers_of_another_job(job: EvalJob) -> None:
    """Answers are taken up again only for the same question to the same model."""
    folder = Path(job.folder)
    identity = identify(job)
    marker = folder / IDENTITY_FILE
    if marker.exists() and marker.read_text() == identity:
        return
    for name in (GENERATION_FILE, ANSWERS_FILE, BATCHES_FILE):
        (folder / name).unlink(missing_ok=True)
    write_whole(marker, identity)


def identify(job: EvalJob) -> str:
    """A hash of what decides the answers: cases, weights, worked example, limits."""
    base = Path(job.base_folder)
    return fingerprint(
        {
            "cases": file_digest(Path(job.cases_file)),
            "adapter": folder_digest(Path(job.adapter_folder)) if job.adapter_folder else None,
            # Base weights are large and proven elsewhere; sizes catch an exchanged folder.
            "base": sorted((file.name, file.stat().st_size) for file in base.iterdir() if file.is_file()),
            "job": job.model_dump(
                mode="json",
                exclude={"folder", "base_folder", "adapter_folder", "cases_file", "latency_cases"},
            ),
        }
    )


def _make_asker(job: EvalJob, heart: Heart) -> Asker:
    from graftwork.model.adapter import load_adapter
    from graftwork.model.generate import Generator, Sampling
    from graftwork.model.load import load_base, use_threads
    from graftwork.model.template import Template

    use_threads(job.threads)
    model = load_base(Path(job.base_folder))
    if job.adapter_folder is not None:
        load_adapter(model, Path(job.adapter_folder))
    template = Template.from_folder(Path(job.base_folder), reasoning=job.reasoning)
    generator = Generator(model, stop_tokens=[template.eos])
    return Asker(
        job,
        turns=template,
        generate=partial(generator.generate, sampling=Sampling(max_new_tokens=job.max_new_tokens)),
        progress=heart,
        peak_memory_gib=peak_memory_gib,
        stop_asked=stop_asked.is_set,
    )


if __name__ == "__main__":
    sys.exit(run_worker(EvalJob, lambda job: Path(job.folder), evaluate))
