"""All cases put to an endpoint, some at a time, every answer kept as soon as it is there.

In: a job that names an endpoint, and its cases. Out: answers in the job's folder, and the times of the
first of them, which are asked one at a time. A busy endpoint is asked again; one that stays broken ends the
job, and its answers stay.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from graftwork.engines.endpoint import EndpointEngine, EndpointPolicy
from graftwork.engines.interface import DecodingSettings, EngineReply, EngineUnavailable
from graftwork.evaluate.ask.answers import AnswerBook, read_answers, repeats_of
from graftwork.evaluate.ask.runner import Progress, stopped, summarise
from graftwork.evaluate.cases import asked_messages, cases_to_time
from graftwork.process.asking import ask_many
from graftwork.process.http_client import FIRST_PAUSE
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import Answer, Case, EvalJob, Generation
from graftwork.text.wording import plural

FIRST_WAIT = FIRST_PAUSE


def ask_endpoint(
    job: EvalJob, cases: Sequence[Case], *, progress: Progress, stop_asked: threading.Event
) -> Generation:
    assert job.endpoint is not None
    book = AnswerBook(job, cases)
    planned = book.plan({case.id: 0 for case in cases})
    began, answered_before = time.monotonic(), book.answered
    stopping = threading.Event()
    engine = EndpointEngine(job.endpoint, EndpointPolicy(wait=stopping.wait, first_pause=FIRST_WAIT))

    def ask(question: tuple[Case, int]) -> EngineReply:
        case, repeat = question
        decoding = DecodingSettings(job.max_new_tokens, job.temperature, job.top_p, seed=job.seed + repeat)
        try:
            return engine.ask(asked_messages(job, case), decoding)
        except EngineUnavailable as trouble:
            attempts = plural(trouble.attempts, "attempt")
            raise EnvironmentLacks(
                f"the endpoint did not answer case {case.id} in {attempts}: {trouble}",
                why="a rate over the answered cases alone would flatter it",
                fix="run `graft eval` again when it is well: what was answered is kept",
                where=job.subject,
            ) from trouble

    def keep(question: tuple[Case, int], reply: EngineReply) -> None:
        case, repeat = question
        book.write(
            Answer(
                case_id=case.id,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=reply.seconds or 0.0,
                repeat=repeat,
                first_token_seconds=reply.first_token_seconds,
            )
        )

    def report() -> None:
        done, total = book.answered, book.total
        new = done - answered_before
        left = (time.monotonic() - began) / new * (total - done) if new else None
        progress.beat("answering", done, total, seconds_left=left, subject=job.subject)
        if stop_asked.is_set():
            verb = "is" if done == 1 else "are"
            raise stopped(job, f"{done} of {plural(total, 'case')} {verb} answered")

    missing = {(case_id, batch.repeat) for batch in planned for case_id in batch.cases}
    missing -= {(answer.case_id, answer.repeat) for answer in read_answers(Path(job.folder))}
    questions = [
        (case, repeat) for repeat in range(repeats_of(job)) for case in cases if (case.id, repeat) in missing
    ]
    timed_cases = cases_to_time(cases, most=job.latency_cases)
    timed_ids = {case.id for case in timed_cases}
    alone = [(case, repeat) for case, repeat in questions if repeat == 0 and case.id in timed_ids]
    together = [question for question in questions if question not in alone]
    for some, at_once in ((alone, 1), (together, job.endpoint.concurrency)):
        ask_many(some, ask, together=at_once, on_reply=keep, on_poll=report, give_up=stopping.set)

    first = {answer.case_id: answer for answer in read_answers(Path(job.folder)) if answer.repeat == 0}
    timed = [first[case.id] for case in timed_cases]
    first_tokens = [a.first_token_seconds for a in timed if a.first_token_seconds is not None]
    return summarise(
        job,
        single_latency_seconds=tuple(answer.seconds for answer in timed),
        first_token_seconds=tuple(first_tokens) if len(first_tokens) == len(timed) else (),
        peak_memory_gib=0.0,
        details=engine.facts.details,
    )
