"""The log itself as a subject: what the team's agents answered, and how long that took.

In: cases. Out: their recorded replies as answers, and how they were made as far as the log says. Costs
nothing. A grade that compares with the recorded reply would be perfect by definition: `score` gives none.
"""

from collections.abc import Sequence

from graftwork.evaluate.cases import cases_to_time
from graftwork.records.report import Answer, Case, Generation

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
    timed = [case.duration_ms for case in cases_to_time(cases, most=latency_cases)]
    known = [duration / 1000 for duration in timed if duration is not None]
    return Generation(
        subject=LOG,
        answers=len(cases),
        seconds=sum((case.duration_ms or 0.0) / 1000 for case in cases),
        tokens_per_second=0.0,
        single_latency_seconds=tuple(known) if len(known) == len(timed) else (),
        peak_memory_gib=0.0,
        settings={
            "decoding": "as recorded",
            "durations": sum(case.duration_ms is not None for case in cases),
        },
    )
