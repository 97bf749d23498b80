"""A run without a card: what the plain step on a processor holds and takes. Pure."""

from graftwork.model.shape import total_parameters
from graftwork.plan.fit.candidate import Candidate, Way
from graftwork.plan.fit.own_step import ALONE
from graftwork.plan.fit.plain_steps import trained
from graftwork.plan.fit.setups import half_precision
from graftwork.plan.fit.sharding import WIDTH
from graftwork.plan.memory import training_memory
from graftwork.plan.timing.processor import processor_step
from graftwork.records.base import Figure
from graftwork.records.fit import FitQuestion, MemoryPeak
from graftwork.records.hardware import Cpu
from graftwork.records.plan import Workload
from graftwork.records.units import GIB

UNKNOWN_CPU = Cpu(
    name="a processor",
    cores=8,
    gflops=280.0,
    bandwidth_gb_s=40.0,
    watts=65.0,
    source="guessed: 35 GFLOPS a core, two channels of DDR4",
    dated="2026-11-15",
)


def processor_candidate(question: FitQuestion) -> Candidate:
    """All rows of a step at once, in host memory."""
    shape = question.shape
    mean = sum(question.lengths) / len(question.lengths)
    work = Workload(
        lengths=question.lengths if len(question.lengths) > 1 else question.lengths * question.batch_rows,
        trained_tokens=round(
            mean * question.trained_share * max(len(question.lengths), question.batch_rows)
            if len(question.lengths) == 1
            else sum(question.lengths) * question.trained_share
        ),
        batch_rows=question.batch_rows,
        epochs=1,
        rank=question.rank,
        targets=question.targets,
        adapted_layers=question.adapted_layers,
        method=question.method,
    )
    parts = training_memory(
        shape,
        work,
        parameters=total_parameters(shape),
        trainable=trained(question),
        width=WIDTH[half_precision(question)],
    )
    tokens = question.batch_rows * mean
    step = processor_step(
        shape,
        tokens=round(tokens),
        adapted=question.adapted_layers,
        cpu=question.machine.cpu or UNKNOWN_CPU,
        method=question.method,
        trained_share=question.trained_share,
        mean_length=mean,
        rank=question.rank,
    )
    seconds = {**step.parts, **step.once_a_step}
    # The C library takes and gives back pages: what is reserved is what is there.
    held = {name: float(size) for name, size in parts.model_dump().items() if isinstance(size, int | float)}
    peak = MemoryPeak(allocated=parts.total, reserved=parts.total, parts=held, phase="loss")
    return Candidate(
        way=Way("graft", False, ALONE, question.batch_rows, 0),
        setup=None,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=Figure.about(parts.total / GIB, down=0.85, up=1.2, unit="GiB"),
        seconds_a_step=sum(seconds.values()),
        step_parts=seconds,
        tokens_a_step=tokens,
        passes=1,
    )
