"""`python -m graftwork.evaluate.ask.timing JOB.json`: time single requests of several subjects in turn.

Input: a TimingJob as a file: subjects on one base, whose cases are answered, or are answered here first.
Output: each subject's `generation.json` with the new times, their cases and the group that they were timed
in. Timed one subject after the other, load that comes or goes in between looks like a difference of the
models; timed in turn it falls on all alike. The base is loaded once and the adapters take turns, as `graft
serve` answers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.interface import DecodingSettings, RenderedPrompt, Timing
from graftwork.engines.local import settle, source_of
from graftwork.evaluate.ask.runner import stopped, time_in_turn
from graftwork.evaluate.ask.worker import GENERATION_FILE, evaluate_with
from graftwork.evaluate.cases import asked_messages, cases_to_time, read_cases
from graftwork.files.disk import write_atomic
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.base import fingerprint
from graftwork.records.report import Case, EvalJob, Generation, TimingJob

PHASE = "timing single requests in turn"


def time_subjects(job: TimingJob) -> None:
    """Time the chosen cases of all subjects in turn, and record the times of each; answer first if
    requested.
    """
    with Heart(Path(job.folder)) as heart:
        shared = _SharedEngine(job)
        if job.answers_first:
            for subject in job.jobs:
                evaluate_with(shared.open_for, subject, adapter=shared.name_of(subject), heart=heart)
            if is_timed(job.jobs, job.group):
                return
        _time_in_turn(job, shared, heart)


class _SharedEngine:
    """One engine for all subjects, with the adapters of those that it was opened for."""

    def __init__(self, job: TimingJob) -> None:
        self._jobs = job.jobs
        self._names = {subject.subject: f"subject_{number}" for number, subject in enumerate(job.jobs)}
        self._engine: EmbeddedEngine | None = None

    def name_of(self, subject: EvalJob) -> str:
        return self._names[subject.subject]

    def open_for(self, subject: EvalJob) -> EmbeddedEngine:
        if self._engine is None:
            self._engine = EmbeddedEngine(source_of(settle(self._jobs[0]))._replace(adapters={}))
        name = self.name_of(subject)
        if subject.adapter_folder is not None and name not in self._engine.adapters:
            self._engine.load_adapter(name, Path(subject.adapter_folder))
        return self._engine


def _time_in_turn(job: TimingJob, shared: _SharedEngine, heart: Heart) -> None:
    first = settle(job.jobs[0])
    cases = cases_to_time(read_cases(Path(first.cases_file)), most=job.requests)
    heart.beat("loading the model", 0, len(cases))
    for subject in job.jobs:
        engine = shared.open_for(subject)
    adapter_of = {
        subject.subject: shared.name_of(subject) if subject.adapter_folder is not None else None
        for subject in job.jobs
    }
    decoding = DecodingSettings(first.max_new_tokens, first.temperature, first.top_p, first.seed)
    prompts = {
        subject.subject: [engine.render(asked_messages(subject, case)) for case in cases]
        for subject in job.jobs
    }

    def time_one(name: str, prompt: RenderedPrompt) -> Timing:
        return engine.time_one(prompt, decoding, adapter=adapter_of[name])

    def after_round(done: int) -> None:
        heart.beat(PHASE, done, len(cases))
        if stop_asked.is_set():
            raise stopped(first, "all cases are answered, single requests are being timed")

    for name, rendered in prompts.items():
        # The first pass pays for lazy initialization; no user's request does.
        time_one(name, rendered[0])
    timings = time_in_turn(prompts, time_one=time_one, after_round=after_round)
    for subject in job.jobs:
        note_times(subject, timings[subject.subject], cases=cases, group=job.group)
    heart.beat("done", len(cases), len(cases))


def note_times(job: EvalJob, timings: Sequence[Timing], *, cases: Sequence[Case], group: str) -> None:
    """Store the times in the subject's record of how its answers were made."""
    path = Path(job.folder) / GENERATION_FILE
    firsts = [timing.first_token for timing in timings if timing.first_token is not None]
    generation = Generation.from_json(path.read_bytes()).model_copy(
        update={
            "single_latency_seconds": tuple(timing.total for timing in timings),
            "first_token_seconds": tuple(firsts) if len(firsts) == len(timings) else (),
            "timed_cases": tuple(case.id for case in cases),
            "timed_group": group,
        }
    )
    write_atomic(path, generation.to_json())


def group_of(jobs: Sequence[EvalJob], *, cases: Sequence[Case], requests: int) -> str:
    """Name a group: the same for the same subjects on the same cases."""
    subjects = sorted((job.subject, job.identity, job.folder) for job in jobs)
    return fingerprint([subjects, [case.id for case in cases_to_time(cases, most=requests)]])[:16]


def is_timed(jobs: Sequence[EvalJob], group: str) -> bool:
    """Return whether all of these were timed in this very group before."""
    paths = [Path(job.folder) / GENERATION_FILE for job in jobs]
    return all(
        path.exists() and Generation.from_json(path.read_bytes()).timed_group == group for path in paths
    )


if __name__ == "__main__":
    sys.exit(run_worker(TimingJob, lambda job: Path(job.folder), time_subjects))
