"""Full fine-tuning with layers streamed from host memory, as a candidate. Pure.

In: a question, what the card reaches. Out: a FitCandidate. `graft train` asks the same function for its step,
under the same limits.
"""

from graftwork.costmodel.distributed import Distribution
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.streamed import choose_streamed, streamed_step_parts
from graftwork.costmodel.streamed_memory import StreamedWork, streamed_peak
from graftwork.plan.fit.candidate import RESERVED_SPREAD, FitCandidate, StrategyOption
from graftwork.plan.fit.own_step import own_limit
from graftwork.plan.fit.plain_step import PROCESS_GIB, plain_run
from graftwork.plan.fit.question import host_room
from graftwork.records.base import Figure
from graftwork.records.plan import FitQuestion, Level

ON_HOST = Distribution("none", "weights", 1)
HOST_RANGE = (0.98, 1.03)
"""Host memory is counted; pages of files and the allocator are not."""


def streams(question: FitQuestion) -> bool:
    """Whether `graft train` can stream the layers of this run."""
    return (
        question.engine == "graft"
        and question.algorithm == "sft"
        and question.method == "full"
        and question.optimizer == "adamw_fused"
        and question.offload in ("auto", "weights")
        and question.machine.gpu is not None
    )


def streamed_candidate(
    question: FitQuestion, *, rates: StepRates, level: Level, correction: float = 1.0
) -> FitCandidate:
    """The fastest that fits, or the one that lacks the least."""
    run = plain_run(question, rates=rates, correction=correction)
    whole = question.adapted_layers == question.shape.layers
    work = StreamedWork(
        lengths=question.lengths,
        batch_rows=question.batch_rows,
        trained_share=question.trained_share,
        adapted_layers=None if whole else question.adapted_layers,
    )
    step = choose_streamed(
        run,
        work,
        limit_gib=own_limit(question),
        host_gib=host_room(question),
        spread=RESERVED_SPREAD[level],
    )
    peak, parts = streamed_peak(run, work, step), streamed_step_parts(run, work, step)
    low, high = HOST_RANGE
    process, counted = PROCESS_GIB, step.host_gib - PROCESS_GIB[1]
    return FitCandidate(
        way=StrategyOption("graft", False, ON_HOST, step.micro_rows, question.adapted_layers),
        setup=None,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=Figure(
            value=step.host_gib, low=counted * low + process[0], high=counted * high + process[2], unit="GiB"
        ),
        seconds_a_step=sum(parts.values()),
        step_parts=parts,
        tokens_a_step=question.batch_rows * sum(question.lengths) / len(question.lengths),
        passes=-(-question.batch_rows // step.micro_rows),
        streamed=step,
    )
