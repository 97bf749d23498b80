"""What an evaluation measured: answers, rates with exact intervals, paired comparisons."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Message, Origin


class Case(Record):
    """A held-out question with the reply that the log holds for it."""

    id: str
    origin: Origin
    messages: tuple[Message, ...]
    reference: str
    group: str | None = None
    session: str | None = None


class EvalJob(Record):
    """All that an evaluation worker is told. `adapter_folder` None means the base itself."""

    subject: str
    folder: str
    base_folder: str
    adapter_folder: str | None
    cases_file: str
    worked_example: tuple[Message, ...] = ()
    max_new_tokens: int
    batch_size: int
    threads: int | None = None
    latency_cases: int = 8
    reasoning: bool = True
    """Whether the template may let the model think first, as the rows were rendered."""


class Answer(Record):
    """What a subject said to a case."""

    case_id: str
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    seconds: float


class Generation(Record):
    """How the answers of a subject were produced."""

    subject: str
    answers: int
    seconds: float
    tokens_per_second: float
    single_latency_seconds: tuple[float, ...]
    peak_memory_gib: float
    settings: dict[str, Any]


class Metric(Record):
    """A measured figure. A rate has `successes` of `n`; a number has only its value and range.

    `low` and `high` are the bounds of the interval at `confidence`; `scores` holds one value a
    case (None where the metric does not apply), so that subjects can be compared in pairs.
    """

    name: str
    kind: Literal["rate", "number"]
    value: float
    low: float
    high: float
    n: int
    successes: int | None = None
    unit: str = ""
    confidence: float = 0.95
    scores: dict[str, float | None] = {}


class Comparison(Record):
    """Two subjects on the same cases, pair by pair."""

    metric: str
    baseline: str
    candidate: str
    n: int
    wins: int
    losses: int
    difference: float
    low: float
    high: float
    p_value: float


class SubjectReport(Record):
    subject: str
    metrics: dict[str, Metric]
    generation: Generation


class Report(Record):
    """Base and candidate on the same cases."""

    cases_hash: str
    cases: int
    baseline: SubjectReport
    candidate: SubjectReport
    comparisons: tuple[Comparison, ...]
    looks: int = 1
    settings: dict[str, Any] = {}
    groups: dict[str, str] = {}
