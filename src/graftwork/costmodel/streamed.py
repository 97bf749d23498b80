"""Full fine-tuning whose layers are streamed from host memory: how, and in what time. Pure.

In: a decoder's shape, the rows of a step, the machine, the limits. Out: the fastest StreamedStep within
them, with the bytes of the device and of the host.
"""

from collections.abc import Iterator
from typing import Literal

from graftwork.costmodel.distributed import PCIE_SHARE, PlainRun, adam_seconds
from graftwork.costmodel.plain_time import expected_longest, plain_step
from graftwork.costmodel.streamed_memory import FLOAT, StreamedWork, host_bytes, streamed_peak
from graftwork.model.shape import layer_parameters
from graftwork.records.plan import ModelShape, PlainSetup, StreamedStep
from graftwork.records.units import ELEMENT_BYTES, GIB, MIB

STATE_BYTES = 12.0
"""A weight in float32 with both moments."""
PROCESS_GIB = 2.5
"""Python, torch and CUDA on the host (as `plan/fit` has it)."""
CHUNK_BYTES = 256 * MIB
"""Of logits in float32 that exist at once."""
LEAST_CHUNK = 256
ABOUT_AS_FAST = 1.02


def describe_streamed(step: StreamedStep) -> str:
    """How the model is streamed, for messages."""
    rows = f"{step.micro_rows} row{'s' * (step.micro_rows != 1)} at a time"
    inputs = f", inputs of {step.host_inputs} blocks on the host" if step.host_inputs else ""
    where = "processor" if step.update == "host" else "card"
    return f"layers streamed from host memory in {step.dtype}, {rows}{inputs}, Adam on the {where}"


def choose_streamed(
    run: PlainRun, work: StreamedWork, *, limit_gib: float, host_gib: float, spread: float = 0.0
) -> StreamedStep:
    """The fastest step within both limits; where there is none, the one that lacks the least.

    `spread` is how far the true peak may be above the computed one.
    """
    room = limit_gib / (1 + spread)
    options = [_settled(run, work, rows, room) for rows in _row_counts(work.batch_rows)]
    steps = [option.model_copy(update={"limit_gib": limit_gib}) for option in options]

    def lacking(step: StreamedStep) -> float:
        return max(step.peak_gib - room, 0.0) + max(step.host_gib - host_gib, 0.0)

    fitting = [step for step in steps if not lacking(step)]
    if fitting:
        fastest = min(step.seconds_a_token or 0.0 for step in fitting)
        # Of those that are about as fast, the one that moves the least.
        near = [step for step in fitting if (step.seconds_a_token or 0.0) <= ABOUT_AS_FAST * fastest]
        return min(near, key=lambda step: (step.host_inputs, step.seconds_a_token, step.peak_gib))
    return min(steps, key=lambda step: (lacking(step), step.seconds_a_token or 0.0))


def _row_counts(rows: int) -> Iterator[int]:
    while rows:
        yield rows
        rows //= 2


def _settled(run: PlainRun, work: StreamedWork, rows: int, room_gib: float) -> StreamedStep:
    """A step with so many rows at a time; as many inputs go to the host as the room asks for."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if run.half == "bfloat16" else "float32"
    longest = max(work.lengths)
    step = StreamedStep(
        micro_rows=rows,
        dtype=dtype,
        head_tokens=_head_tokens(run.shape, predicted=rows * longest * work.trained_share),
        update=_faster_update(run, work, dtype),
        limit_gib=0.0,
        peak_gib=0.0,
        host_gib=0.0,
    )
    peak = streamed_peak(run, work, step)
    a_block = work.batch_rows * longest * run.shape.hidden_size * ELEMENT_BYTES[dtype]
    most = run.shape.layers
    if peak.reserved > room_gib * GIB and a_block:
        moved = min(-(-int(peak.reserved - room_gib * GIB) // a_block) + 1, most)
        step = step.model_copy(update={"host_inputs": moved})
        peak = streamed_peak(run, work, step)
        while peak.reserved > room_gib * GIB and step.host_inputs < most:
            step = step.model_copy(update={"host_inputs": min(step.host_inputs + 1, most)})
            peak = streamed_peak(run, work, step)
    seconds = sum(streamed_step_parts(run, work, step).values())
    mean = sum(work.lengths) / len(work.lengths)
    return step.model_copy(
        update={
            "peak_gib": peak.reserved / GIB,
            "parts_gib": {name: size / GIB for name, size in peak.parts.items() if size > 0},
            "host_gib": host_bytes(run, work, step) / GIB + PROCESS_GIB,
            "seconds_a_token": seconds / (mean * work.batch_rows),
        }
    )


def _head_tokens(shape: ModelShape, *, predicted: float) -> int | None:
    """Positions whose logits exist at once; None where those of all fit."""
    most = max(LEAST_CHUNK, 1 << max((CHUNK_BYTES // (FLOAT * shape.vocab_size)).bit_length() - 1, 0))
    return None if predicted <= most else most


def _faster_update(run: PlainRun, work: StreamedWork, dtype: str) -> Literal["host", "card"]:
    """Where Adam ends sooner. The card's copies wait for those of the weights."""
    if run.machine.gpu is None:
        return "host"
    moved = _moved_bytes(run, dtype)
    on_card = (run.trainable * (STATE_BYTES + ELEMENT_BYTES[dtype]) + moved) / _host_rate(run)
    return "card" if on_card < adam_seconds(run.machine, run.trainable) else "host"


STREAMED_FACTOR = 1.22
"""Times the passes of a plain step: gradients of all weights are summed and measured (H200: 3B and 6.7B)."""
FORWARD_SHARE = 0.5
"""Of the forward pass, what an update on the card hides behind: both use the same link (H200)."""


def streamed_step_parts(run: PlainRun, work: StreamedWork, step: StreamedStep) -> dict[str, float]:
    """Seconds of an optimizer step: the passes, and what they wait for.

    The forward pass waits for the weights and for the update of the step before; the backward pass waits for
    weights and inputs on their way in and gradients on their way out.
    """
    shape = run.shape
    passes = -(-work.batch_rows // step.micro_rows)
    trained = work.adapted_layers or shape.layers
    usual = round(expected_longest(work.lengths, step.micro_rows))
    setup = PlainSetup(
        method="full",
        targets=(),
        adapted_layers=trained,
        dtype=step.dtype,
        autocast=False,
        rows=step.micro_rows,
        tokens=usual,
        checkpointed=trained,
    )
    once = plain_step(shape, setup, rates=run.rates, architecture=run.architecture).parts
    parts = {name: STREAMED_FACTOR * seconds * passes for name, seconds in once.items()}
    # Only where a reply is predicted are logits computed.
    parts["head"] *= work.trained_share
    forward = parts["computed again"] * shape.layers / max(trained, 1)
    backward = sum(parts.values()) - forward
    if run.machine.gpu is None:
        return parts
    rate, width = _host_rate(run), ELEMENT_BYTES[step.dtype]
    fetched = _moved_bytes(run, step.dtype) / rate
    inputs = step.host_inputs * work.batch_rows * usual * shape.hidden_size * width / rate
    sent = run.trainable * width / rate
    if step.update == "host":
        updating, hidden = adam_seconds(run.machine, run.trainable), max(forward, fetched)
    else:
        updating = fetched + run.trainable * (STATE_BYTES + width) / rate
        hidden = FORWARD_SHARE * forward
    parts["optimizer"] = max(updating - hidden, 0.0)
    waiting = max(fetched - forward, inputs - forward, 0.0)
    waiting += max(fetched + inputs - backward, sent - backward, 0.0)
    parts["host transfers"] = waiting
    return {name: seconds for name, seconds in parts.items() if seconds}


def _moved_bytes(run: PlainRun, dtype: str) -> float:
    """Weights of all blocks and the table or the head, once."""
    shape = run.shape
    blocks = shape.layers * layer_parameters(shape)
    return float((blocks + shape.vocab_size * shape.hidden_size) * ELEMENT_BYTES[dtype])


def _host_rate(run: PlainRun) -> float:
    """Bytes a second between pinned memory and the card, one way; both ways go at the same time."""
    gpu = run.machine.gpu
    return gpu.pcie_gb_s * PCIE_SHARE * 1e9 if gpu is not None else run.rates.host
