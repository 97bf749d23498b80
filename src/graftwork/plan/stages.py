"""How long each stage of a run takes, besides training, which has a plan of its own. Pure.

In: the size of the logs, the cases and who answers them, the machine, how far earlier estimates of the same
stage were off. Out: a figure for each stage. The constants were measured on two cores with the embedded base;
ranges are wide until the stage has run here a few times.
"""

from collections.abc import Mapping, Sequence

from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.hardware import GUESSED_GFLOPS_A_THREAD
from graftwork.plan.residuals import pool_runs
from graftwork.records.base import Figure, Record
from graftwork.records.plan import DeviceFacts, ModelShape, Residual

MEASURED = ("audit", "prepare", "plan", "evaluate", "gate", "release", "try", "report")
"""Stages whose time is recorded here. Training has its own residuals."""
FIXED_SECONDS = {
    "audit": 2.0,
    "prepare": 2.0,
    "plan": 4.0,
    "evaluate": 2.0,
    "gate": 0.5,
    "release": 1.0,
    "try": 8.0,
    "report": 0.7,
}
BYTES_A_SECOND = {"audit": 2.5e6, "prepare": 1.5e6}
"""Of logs, on two cores."""
ANSWER_START_SECONDS = 8.0
"""Interpreter, libraries and a small base, for every process that answers."""
READING_SHARE, WRITING_SHARE = 0.9, 0.35
"""Of the measured matrix rate, on two quiet cores: prompts are read in large products and share their
beginnings, answers are written in thin ones."""
ALONE_SHARE = 0.03
"""Single requests are bound by memory, not by products."""
TRIED_ANSWERS = 6
SPREAD = {"audit": 4.0, "prepare": 4.0, "evaluate": 3.0, "try": 2.5}
USUAL_SPREAD = 2.5


class StageFacts(Record):
    """What the time of the stages depends on."""

    log_bytes: int
    shape: ModelShape | None = None
    device: DeviceFacts
    cases: int = 0
    subjects: int = 2
    """Models that answer: base and adapter, the champion, further ones."""
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    timed_cases: int = 0
    repeats: int = 1


def estimate_stage(stage: str, facts: StageFacts) -> Figure:
    """Before any run of this stage was seen here."""
    seconds = FIXED_SECONDS[stage]
    if stage in BYTES_A_SECOND:
        seconds += facts.log_bytes / BYTES_A_SECOND[stage]
    if stage == "evaluate":
        seconds += _evaluate(facts)
    if stage == "try":
        seconds += ANSWER_START_SECONDS + TRIED_ANSWERS * _alone(facts)
    spread = SPREAD.get(stage, USUAL_SPREAD)
    return Figure.about(seconds, down=1 / spread, up=spread, unit="s")


def pool_stage(stage: str, prior: Figure, past: Sequence[Residual]) -> tuple[Figure, int]:
    """The estimate corrected by how far earlier ones were off, and how many these were."""
    ratios = [
        residual.actual / residual.planned.value
        for residual in past
        if residual.name == residual_name(stage) and residual.planned.value > 0
    ]
    return pool_runs(prior, [prior.value * ratio for ratio in ratios]), len(ratios)


def residual_name(stage: str) -> str:
    return f"stage.{stage}"


def add_up(seconds: Mapping[str, Figure]) -> Figure:
    """Stages of one run meet the same load: the ends of their ranges add up too. In minutes."""
    figures = seconds.values()
    return Figure(
        value=sum(figure.value for figure in figures) / 60,
        low=sum(figure.low for figure in figures) / 60,
        high=sum(figure.high for figure in figures) / 60,
        unit="min",
    )


def _evaluate(facts: StageFacts) -> float:
    """Every subject loads and answers all cases in batches; then one more process times single requests."""
    rate, flops = _rate(facts), _flops_a_token(facts)
    a_case = facts.prompt_tokens * flops / (rate * READING_SHARE)
    a_case += facts.answer_tokens * facts.repeats * flops / (rate * WRITING_SHARE)
    timed = (
        ANSWER_START_SECONDS + facts.timed_cases * facts.subjects * _alone(facts)
        if facts.timed_cases
        else 0.0
    )
    return facts.subjects * (ANSWER_START_SECONDS + facts.cases * a_case) + timed


def _alone(facts: StageFacts) -> float:
    """Seconds of one request."""
    rate, flops = _rate(facts), _flops_a_token(facts)
    reading = facts.prompt_tokens * flops / (rate * READING_SHARE)
    return reading + facts.answer_tokens * flops / (rate * ALONE_SHARE)


def _rate(facts: StageFacts) -> float:
    device = facts.device
    return (device.gflops or GUESSED_GFLOPS_A_THREAD * device.threads) * 1e9


def _flops_a_token(facts: StageFacts) -> float:
    return 2.0 * total_parameters(facts.shape) if facts.shape is not None else 0.0
