"""Memory and time of full fine-tuning whose layers are streamed from host memory (`train/streamed`). Pure.

In: a decoder's shape, the rows of a step, the machine, the limits. Out: the fastest StreamedStep within
them, with the bytes of the device and of the host. The tensors that the engine holds are counted as it
makes them (a test compares the two); what passes through one block is replayed like the plain step.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from graftwork.costmodel.distributed import PCIE_SHARE, PlainRun, adam_seconds
from graftwork.costmodel.plain_decoder import Machinery, PlainDecoder
from graftwork.costmodel.plain_memory import replayed
from graftwork.costmodel.plain_tape import Node, Storage, Tape, Tensor
from graftwork.costmodel.plain_time import expected_longest, plain_step
from graftwork.costmodel.stream import AllocationStream, MemoryTrace
from graftwork.model.families.registry import recipe_family
from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.fit import MemoryPeak, PlainSetup
from graftwork.records.plan import ModelShape, StreamedStep
from graftwork.records.units import ELEMENT_BYTES, GIB, MIB

SLOTS = 2
"""Of weights and of gradients on the device: `train/streamed/transfers.py`."""
FLOAT = 4
STATE_BYTES = 12.0
"""A weight in float32 with both moments."""
PROCESS_GIB = 2.5
"""Python, torch and CUDA on the host (as `plan/fit` has it)."""
CHUNK_BYTES = 256 * MIB
"""Of logits in float32 that exist at once."""
LEAST_CHUNK = 256
UPDATE_SLICES = 2 * (4 * FLOAT + FLOAT) * (1 << 22)
"""Slices of Adam's states on the card: `train/streamed/update.py`."""
ABOUT_AS_FAST = 1.02
SIMULATED_BLOCKS = 2
"""Blocks that are replayed tensor by tensor; the others take and give back the same."""


class StreamedWork(NamedTuple):
    """The rows of a run, as far as memory and time depend on them."""

    lengths: tuple[int, ...]
    batch_rows: int
    trained_share: float = 1.0
    """Of the tokens, those that are predicted."""
    adapted_layers: int | None = None
    """None: all, with embedding and head."""


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


class HeldTensors(NamedTuple):
    """Bytes on the device that outlive the pass of a block, by what they are for."""

    weights: int
    gradients: int
    inputs: int
    states: int
    head: int
    outer: int

    def parts(self) -> dict[str, int]:
        return {name: size for name, size in self._asdict().items() if size}


def held_tensors(
    shape: ModelShape, step: StreamedStep, portions: Sequence[int], *, trained_layers: int | None = None
) -> HeldTensors:
    """What the engine holds when the backward pass begins; `portions` are the padded tokens of passes."""
    width, passes = ELEMENT_BYTES[step.dtype], len(portions)
    layers = shape.layers if trained_layers is None else trained_layers
    whole = layers == shape.layers
    block, table = layer_parameters(shape), shape.vocab_size * shape.hidden_size
    outer = total_parameters(shape) - shape.layers * block - table * (1 if shape.tied_embeddings else 2)
    hidden = shape.hidden_size * width
    several = passes > 1 or step.head_tokens is not None
    # A shared table is added to on the host, in float32; what has several parts is summed in float32.
    of_head = FLOAT if several or shape.tied_embeddings else width
    of_outer = FLOAT if several else width
    below = shape.layers - layers
    kept = layers - min(max(step.host_inputs - below, 0), layers)
    return HeldTensors(
        weights=SLOTS * block * width,
        gradients=SLOTS * block * width + (block * FLOAT if passes > 1 and width != FLOAT else 0),
        inputs=kept * sum(portions) * hidden,
        states=sum(portions) * hidden,
        head=table * (width + (of_head if whole else 0)),
        outer=outer * (width + (of_outer if whole else 0)),
    )


def host_bytes(run: PlainRun, work: StreamedWork, step: StreamedStep) -> float:
    """Masters, working copies, gradients, moments, and inputs that wait there."""
    shape, width = run.shape, ELEMENT_BYTES[step.dtype]
    total, table = total_parameters(shape), shape.vocab_size * shape.hidden_size
    copies = 0.0 if width == FLOAT else total * width
    whole = run.trainable >= total
    gradients = (run.trainable - table) * width + table * FLOAT if whole else run.trainable * width
    inputs = step.host_inputs * work.batch_rows * max(work.lengths) * shape.hidden_size * width
    return total * FLOAT + copies + gradients + run.trainable * 8.0 + inputs


def streamed_peak(run: PlainRun, work: StreamedWork, step: StreamedStep) -> MemoryPeak:
    """The most that the device holds, with what passes through a block and what the allocator adds."""
    longest = max(work.lengths)
    portions = -(-work.batch_rows // step.micro_rows)
    chunk = step.head_tokens or round(step.micro_rows * longest * work.trained_share)
    key = step.model_copy(
        update={"limit_gib": 0.0, "peak_gib": 0.0, "host_gib": 0.0, "parts_gib": {}, "seconds_a_token": None}
    )
    peak = _cached_peak(
        run.shape.model_dump_json(),
        key.model_dump_json(),
        run.architecture,
        (portions, longest, max(chunk, 1), work.adapted_layers or run.shape.layers),
    )
    if run.correction == 1.0:
        return peak
    scaled = {name: size * run.correction for name, size in peak.parts.items()}
    return peak.model_copy(
        update={
            "allocated": peak.allocated * run.correction,
            "reserved": peak.reserved * run.correction,
            "parts": scaled,
        }
    )


@lru_cache(maxsize=2048)
def _cached_peak(
    shape_json: str, step_json: str, architecture: str, sizes: tuple[int, int, int, int]
) -> MemoryPeak:
    shape, step = ModelShape.model_validate_json(shape_json), StreamedStep.model_validate_json(step_json)
    portions, longest, chunk, trained = sizes
    return replayed(_Replay(shape, step, architecture, chunk=chunk, trained=trained).run(portions, longest))


class _Replay:
    """One step as the memory sees it: what is held, and the passes through a few blocks and the head."""

    def __init__(
        self, shape: ModelShape, step: StreamedStep, architecture: str, *, chunk: int, trained: int
    ) -> None:
        self._shape, self._step, self._chunk, self._trained = shape, step, chunk, trained
        self._architecture = architecture
        self._stream = AllocationStream()
        self._tape = Tape(self._stream)
        self._width = ELEMENT_BYTES[step.dtype]

    def run(self, portions: int, longest: int) -> MemoryTrace:
        stream, shape = self._stream, self._shape
        tokens = self._step.micro_rows * longest
        sizes = [tokens] * portions
        held = held_tensors(shape, self._step, sizes, trained_layers=self._trained)
        stream.enter("setup")
        self._tape.warm_up()
        self._keep(held.weights, "weights", SLOTS)
        self._keep(held.gradients, "gradients", SLOTS)
        self._keep(held.outer, "weights", 1)
        if self._step.update == "card":
            self._keep(UPDATE_SLICES, "optimizer", 2)
        setup = PlainSetup(
            method="full",
            targets=(),
            adapted_layers=1,
            dtype=self._step.dtype,
            autocast=False,
            rows=self._step.micro_rows,
            tokens=longest,
        )
        shared = Machinery(self._tape, setup)
        cut = shape.model_copy(update={"layers": 1, "parameters": None})
        decoder = PlainDecoder(cut, setup, recipe_family(self._architecture))
        for weight in decoder.weights:
            # Weights are in the slots already.
            weight.storage = Storage(stream, 0, "weights")
        hidden = tokens * shape.hidden_size
        waves = (
            self._tape.new(longest * shape.head_dim, self._width),
            self._tape.new(longest * shape.head_dim, self._width),
        )
        stream.enter("forward")
        states = [self._tape.new(hidden, self._width, part="activations") for _ in sizes]
        kept: list[Tensor] = []
        inputs = held.inputs // max(hidden * self._width, 1)
        for at in range(self._shape.layers):
            for number in range(portions):
                given = states[number]
                if at < SIMULATED_BLOCKS:
                    self._tape.learning = False
                    states[number] = decoder.blocks[0].run(shared, given, waves)
                    self._tape.learning = True
                else:
                    states[number] = self._tape.new(hidden, self._width, part="activations")
                if len(kept) < inputs:
                    kept.append(given)
                del given
        stream.enter("loss")
        self._head(decoder, shared, tokens, hidden)
        stream.enter("backward")
        for _ in range(SIMULATED_BLOCKS):
            for number in range(portions):
                # An input that waited on the host comes back, and the next one with it.
                given = kept.pop() if kept else self._tape.new(hidden, self._width)
                states[number] = self._back(decoder, shared, given, states[number], waves)
                del given
                for weight in decoder.weights:
                    weight.gradient = None
        return stream.finish()

    def _keep(self, size: int, part: str, pieces: int) -> None:
        for _ in range(pieces):
            self._stream.take(size // pieces, part)

    def _back(
        self,
        decoder: PlainDecoder,
        shared: Machinery,
        given: Tensor,
        gradient: Tensor,
        waves: tuple[Tensor, Tensor],
    ) -> Tensor:
        """A block runs again and back: the gradients of all its weights exist at the end of it."""
        found: list[Tensor] = []

        def collect(grads: list[Tensor]) -> list[Tensor | None]:
            found.append(grads.pop())
            return []

        leaf = Tensor(given.storage, given.count, given.width)
        leaf.edge = (Node([], collect), 0)
        out = decoder.blocks[0].run(shared, leaf, waves)
        root = out.edge
        del out, leaf
        assert root is not None
        self._tape.backward(root, gradient)
        return found.pop()

    def _head(self, decoder: PlainDecoder, shared: Machinery, tokens: int, hidden: int) -> None:
        """The last norm over all positions, then a chunk of logits with its gradients."""
        tape, width = self._tape, self._width
        table = self._shape.vocab_size * self._shape.hidden_size
        chunk = min(self._chunk, tokens)
        head = tape.new(table, width, part="weights")
        whole = self._trained == self._shape.layers
        several = self._step.head_tokens is not None
        of_head = FLOAT if several or self._shape.tied_embeddings else width
        summed = tape.new(table, of_head, part="gradients") if whole else None
        leaf = tape.new(hidden, width)
        leaf.edge = (Node([], lambda _grads: []), 0)
        states = decoder.norm.run(shared, leaf)
        chosen, back, gradient = (tape.new(hidden, width) for _ in range(3))
        logits = tape.new(chunk * self._shape.vocab_size, width, part="logits")
        wide = tape.new(logits.count, FLOAT, part="logits") if width != FLOAT else logits
        logs = tape.new(logits.count, FLOAT, part="logits")
        made = tape.new(logits.count, FLOAT, part="logits")
        del logs, wide, logits
        narrow = tape.new(made.count, width, part="logits") if width != FLOAT else made
        del made
        product = tape.new(table, width, part="gradients") if whole else None
        del narrow, product, chosen, gradient
        root = states.edge
        del states
        if root is not None:
            tape.backward(root, back)
        decoder.norm.weight.gradient = None
        del head, summed, leaf, back


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
