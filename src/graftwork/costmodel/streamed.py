"""Full fine-tuning with layers streamed from host memory: how, in what time and memory. Pure.

Input: a decoder's shape, the rows of a step, the machine, the limits. Output: the fastest StreamedStep within
them, with the bytes of the device and of the host. The tensors that the engine (`train/streamed`) holds are
counted as it makes them (a test compares the two); what passes through one block is replayed like the plain
step.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from graftwork.costmodel.allocations import AllocationStream, MemoryTrace
from graftwork.costmodel.plain_decoder import Machinery, Node, PlainDecoder, Storage, Tape, Tensor
from graftwork.costmodel.plain_step import (
    PCIE_SHARE,
    PlainRun,
    adam_seconds,
    expected_longest,
    plain_step,
    replayed,
)
from graftwork.model.families import recipe_family
from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.base import ELEMENT_BYTES, GIB, MIB
from graftwork.records.plan import MemoryPeak, ModelShape, PlainSetup, StreamedStep

SLOTS = 2
"""Buffers for weights and for gradients on the device: `train/streamed/transfers.py`."""
FLOAT = 4
LEAVING = 2
"""Inputs in transfer to the host at the same time."""
UPDATE_SLICES, UPDATE_BUFFERS = 2 * (4 * FLOAT + FLOAT) * (1 << 22), 10
"""Slices of Adam's states on the GPU: `train/streamed/engine.py`."""
STEPS = 2
"""Steps to replay: the second starts with what the first allocated permanently."""
SIMULATED_BLOCKS, SIMULATED_CHUNKS = 2, 2
"""Blocks at both ends and chunks of logits that are replayed tensor by tensor; the others are the same."""


class StreamedWork(NamedTuple):
    """The rows of a run, as far as memory and time depend on them."""

    lengths: tuple[int, ...]
    batch_size: int
    trained_share: float = 1.0
    """Share of the tokens that are predicted."""
    adapted_layers: int | None = None
    """None: all layers, with embedding and head."""


def held_tensors(
    shape: ModelShape, step: StreamedStep, portions: Sequence[int], *, trained_layers: int | None = None
) -> dict[str, int]:
    """Bytes on the device that outlive the pass of a block, by purpose, when the backward pass begins;
    `portions` are the padded tokens of passes.
    """
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
    kept_layers = layers - min(max(step.host_inputs - below, 0), layers)
    gradients = SLOTS * block * width + (block * FLOAT if passes > 1 and width != FLOAT else 0)
    return {
        "weights": SLOTS * block * width,
        "gradients": gradients,
        "inputs": kept_layers * sum(portions) * hidden,
        "states": sum(portions) * hidden,
        "head": table * (width + (of_head if whole else 0)),
        "outer": outer * (width + (of_outer if whole else 0)),
    }


def host_bytes(run: PlainRun, work: StreamedWork, step: StreamedStep) -> float:
    """Masters, working copies, gradients, moments, and offloaded inputs."""
    shape, width = run.shape, ELEMENT_BYTES[step.dtype]
    total, table = total_parameters(shape), shape.vocab_size * shape.hidden_size
    copies = 0.0 if width == FLOAT else total * width
    whole = run.trainable >= total
    gradients = (run.trainable - table) * width + table * FLOAT if whole else run.trainable * width
    inputs = step.host_inputs * work.batch_size * max(work.lengths) * shape.hidden_size * width
    return total * FLOAT + copies + gradients + run.trainable * 8.0 + inputs


def streamed_peak(run: PlainRun, work: StreamedWork, step: StreamedStep) -> MemoryPeak:
    """Return the peak of the device, including what passes through a block and the allocator's overhead."""
    longest = max(work.lengths)
    tokens = step.micro_rows * longest
    # Nothing predicts the first token of a row.
    predicted = max(min(round(tokens * work.trained_share), tokens - step.micro_rows), 1)
    sizes = _StepSizes(
        portions=-(-work.batch_size // step.micro_rows),
        tokens=tokens,
        longest=longest,
        predicted=predicted,
        chunk=min(step.head_tokens or predicted, predicted),
        trained=work.adapted_layers or run.shape.layers,
    )
    key = step.model_copy(
        update={
            "limit_gib": 0.0,
            "peak_gib": 0.0,
            "host_gib": 0.0,
            "parts_gib": {},
            "seconds_per_token": None,
        }
    )
    peak = _cached_peak(run.shape.model_dump_json(), key.model_dump_json(), run.architecture, sizes)
    return peak if run.correction == 1.0 else peak.times(run.correction)


class _StepSizes(NamedTuple):
    """How the rows of a step go through the model."""

    portions: int
    """Passes of rows that go through a block together."""
    tokens: int
    """Tokens of a portion, with padding."""
    longest: int
    predicted: int
    """Predicted tokens of a portion."""
    chunk: int
    """Tokens whose logits exist at once."""
    trained: int
    """Layers, from the top."""


@lru_cache(maxsize=2048)
def _cached_peak(shape_json: str, step_json: str, architecture: str, sizes: _StepSizes) -> MemoryPeak:
    shape, step = ModelShape.model_validate_json(shape_json), StreamedStep.model_validate_json(step_json)
    # A worker's allocator maps pages where it needs them (`process/worker.py`).
    return replayed(_Replay(shape, step, architecture, sizes).run(), expandable=True)


class _Replay:
    """Memory of steps. Variables are held and dropped in the order in which the engine does it. Blocks in the
    middle allocate the same as those at the ends: only their results are replayed.
    """

    def __init__(self, shape: ModelShape, step: StreamedStep, architecture: str, sizes: _StepSizes) -> None:
        self._shape, self._step, self._sizes = shape, step, sizes
        self._stream = AllocationStream()
        self._tape = Tape(self._stream)
        self._width = ELEMENT_BYTES[step.dtype]
        setup = PlainSetup(
            method="full",
            targets=(),
            adapted_layers=1,
            dtype=step.dtype,
            autocast=False,
            rows=step.micro_rows,
            tokens=sizes.longest,
            deterministic=True,
        )
        self._shared = Machinery(self._tape, setup)
        cut = shape.model_copy(update={"layers": 1, "parameters": None})
        self._decoder = PlainDecoder(cut, setup, recipe_family(architecture))
        for weight in self._decoder.weights:
            # Weights are in the slots already.
            weight.storage = Storage(self._stream, 0, "weights")
        self._states: list[Tensor] = []
        """The hidden states of each portion; in the backward pass, their gradients."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        """Inputs of blocks, by block and portion."""
        self._leaving: list[Tensor] = []
        """Inputs in transfer to the host."""
        self._summed = False
        self._waves: list[tuple[Tensor, Tensor]] = []

    @property
    def _hidden(self) -> int:
        return self._sizes.tokens * self._shape.hidden_size

    @property
    def _table(self) -> int:
        return self._shape.vocab_size * self._shape.hidden_size

    def run(self) -> MemoryTrace:
        sizes, stream = self._sizes, self._stream
        tensors = held_tensors(
            self._shape, self._step, [sizes.tokens] * sizes.portions, trained_layers=sizes.trained
        )
        stream.enter("setup")
        self._keep(tensors["weights"], "weights", SLOTS)
        block = layer_parameters(self._shape) * self._width
        self._keep(SLOTS * block, "gradients", SLOTS)
        for number in range(STEPS):
            self._take_step(tensors)
            if number == 0 and self._step.update == "gpu":
                self._keep(UPDATE_SLICES, "optimizer", UPDATE_BUFFERS)
        return stream.finish()

    def _take_step(self, tensors: dict[str, int]) -> None:
        tape, sizes = self._tape, self._sizes
        self._stream.enter("forward")
        # Tokens, the attention mask, where a token is predicted, and which one.
        batch = (sizes.tokens * 8, sizes.tokens * 8, sizes.tokens, sizes.predicted * 8)
        batches = [tape.new(size, 1) for size in batch for _ in range(sizes.portions)]
        outer = tape.new(tensors["outer"], 1, part="weights")
        table = tape.new(self._table, self._width, part="weights")
        self._states = [tape.new(self._hidden, self._width) for _ in range(sizes.portions)]
        wave = sizes.longest * self._shape.head_dim
        self._waves = [
            (tape.new(wave, self._width), tape.new(wave, self._width)) for _ in range(sizes.portions)
        ]
        del table
        self._forward()
        self._stream.enter("loss")
        self._head()
        self._stream.enter("backward")
        self._backward(tensors)
        if self._whole:
            for _ in self._states:
                gathered = tape.new(self._hidden, self._width)
                wide = tape.new(self._hidden, FLOAT)
                del gathered
                summed = tape.new(self._hidden, FLOAT)
                del wide, summed
        self._states, self._waves = [], []
        del batches, outer

    @property
    def _whole(self) -> bool:
        """All weights are trained, the embedding and the head too."""
        return self._sizes.trained == self._shape.layers

    def _keep(self, size: int, part: str, pieces: int) -> None:
        for _ in range(pieces):
            self._stream.take(size // pieces, part)

    def _forward(self) -> None:
        tape, layers = self._tape, self._shape.layers
        tape.learning = False
        for layer in range(layers):
            for number, waves in enumerate(self._waves):
                block_input = self._states[number]
                if layer >= max(self._step.host_inputs, self._lowest):
                    self._leaving.clear()
                    self._kept[layer, number] = block_input
                elif layer >= self._lowest:
                    self._leaving = [*self._leaving, block_input][-LEAVING:]
                if SIMULATED_BLOCKS <= layer < layers - SIMULATED_BLOCKS:
                    self._states[number] = tape.new(self._hidden, self._width)
                else:
                    self._states[number] = self._decoder.blocks[0].run(self._shared, block_input, waves)
                del block_input
        tape.learning = True

    @property
    def _lowest(self) -> int:
        return self._shape.layers - self._sizes.trained

    def _head(self) -> None:
        """The last norm over all positions of a portion, then chunks of logits with their gradients."""
        tape, width, whole = self._tape, self._width, self._whole
        head = tape.new(self._table, width, part="weights")
        several = self._sizes.portions > 1 or self._step.head_tokens is not None
        # On the host, a shared table has its gradient in float32.
        on_host = FLOAT if self._shape.tied_embeddings else width
        on_gpu = FLOAT if several else on_host
        summed = tape.new(self._table, on_gpu, part="gradients") if whole else None
        for number, state in enumerate(self._states):
            self._states[number] = self._head_pass(state)
            del state
        sent = tape.new(self._table, on_host, part="gradients") if whole and on_gpu != on_host else None
        del head, summed, sent

    def _head_pass(self, hidden: Tensor) -> Tensor:
        """The gradient of one portion's hidden states."""
        tape, width, sizes = self._tape, self._width, self._sizes
        collected: list[Tensor] = []
        leaf = Tensor(hidden.storage, hidden.count, hidden.width)
        leaf.edge = (Node([], lambda grads: _collect(collected, grads)), 0)
        states = self._decoder.norm.run(self._shared, leaf)
        predicted = sizes.predicted * self._shape.hidden_size
        predicted_states = tape.new(predicted, width)
        back = tape.new(self._hidden, width)
        gradient = tape.new(predicted, width)
        for start in range(0, sizes.predicted, sizes.chunk):
            if start < SIMULATED_CHUNKS * sizes.chunk:
                self._chunk(min(sizes.chunk, sizes.predicted - start))
        del gradient
        root = states.edge
        if root is not None:
            tape.backward(root, back)
        self._decoder.norm.weight.gradient = None
        del states, predicted_states, back, leaf
        return collected.pop()

    def _chunk(self, positions: int) -> None:
        """Logits, their log-softmax and their gradients, which are replaced by those of head and states."""
        tape, width, count = self._tape, self._width, positions * self._shape.vocab_size
        logits = tape.new(count, width, part="logits")
        tape.multiply_matrices()
        wide = tape.new(count, FLOAT, part="logits") if width != FLOAT else logits
        logs = tape.new(count, FLOAT, part="logits")
        del wide, logits
        of_logs = tape.new(count, FLOAT, part="logits")
        of_logits = tape.new(count, FLOAT, part="logits")
        del of_logs, logs
        narrow = tape.new(count, width, part="logits") if width != FLOAT else of_logits
        del of_logits
        product = tape.new(self._table, width, part="gradients") if self._whole else None
        states = tape.new(positions * self._shape.hidden_size, width)
        del narrow, product, states

    def _backward(self, tensors: dict[str, int]) -> None:
        tape = self._tape
        several = tensors["gradients"] - SLOTS * layer_parameters(self._shape) * self._width
        if several and not self._summed:
            self._summed = True
            self._keep(several, "gradients", 1)
        for layer in reversed(range(self._lowest, self._shape.layers)):
            for number in range(self._sizes.portions):
                # The next input comes back from the host while this one is computed with.
                following = (layer, number + 1) if number + 1 < self._sizes.portions else (layer - 1, 0)
                for key in ((layer, number), following):
                    if key not in self._kept and key[0] >= self._lowest:
                        self._leaving.clear()
                        self._kept[key] = tape.new(self._hidden, self._width)
                block_input = self._kept.pop((layer, number))
                if layer >= self._shape.layers - SIMULATED_BLOCKS:
                    self._states[number] = self._back(block_input, number)
                else:
                    self._states[number] = tape.new(self._hidden, self._width)
                del block_input

    def _back(self, block_input: Tensor, number: int) -> Tensor:
        """A block is recomputed, then run backward: the gradients of all its weights exist at the end of
        it.
        """
        tape, decoder, collected = self._tape, self._decoder, list[Tensor]()
        leaf = Tensor(block_input.storage, block_input.count, block_input.width)
        leaf.edge = (Node([], lambda grads: _collect(collected, grads)), 0)
        out = decoder.blocks[0].run(self._shared, leaf, self._waves[number])
        assert out.edge is not None
        tape.backward(out.edge, self._states[number])
        del out, leaf
        for weight in decoder.weights:
            weight.gradient = None
        return collected.pop()


def _collect(collected: list[Tensor], gradients: list[Tensor]) -> "list[Tensor | None]":
    collected.append(gradients.pop())
    return []


STATE_BYTES = 12.0
"""Bytes of a weight in float32 with both moments."""
PROCESS_GIB = 2.5
"""Python, torch and CUDA on the host (as `plan/fit` has it)."""
CHUNK_BYTES = 256 * MIB
"""Size of a chunk of logits in float32."""
LEAST_CHUNK = 256
ABOUT_AS_FAST = 1.02


def describe_streamed(step: StreamedStep) -> str:
    """How the model is streamed, for messages."""
    rows = f"{step.micro_rows} row{'s' * (step.micro_rows != 1)} at a time"
    inputs = f", inputs of {step.host_inputs} blocks on the host" if step.host_inputs else ""
    where = "CPU" if step.update == "host" else "GPU"
    return f"layers streamed from host memory in {step.dtype}, {rows}{inputs}, Adam on the {where}"


def choose_streamed(
    run: PlainRun, work: StreamedWork, *, limit_gib: float, host_gib: float, spread: float = 0.0
) -> StreamedStep:
    """Choose the fastest step within both limits; if there is none, the one closest to them. `spread` is how
    far the true peak may exceed the computed one.
    """
    room = limit_gib / (1 + spread)
    options = [_settled(run, work, rows, room) for rows in _row_counts(work.batch_size)]
    steps = [option.model_copy(update={"limit_gib": limit_gib}) for option in options]

    def lacking(step: StreamedStep) -> float:
        return max(step.peak_gib - room, 0.0) + max(step.host_gib - host_gib, 0.0)

    fitting = [step for step in steps if not lacking(step)]
    if fitting:
        fastest = min(step.seconds_per_token or 0.0 for step in fitting)
        # Of those that are about as fast, the one that moves the least.
        near = [step for step in fitting if (step.seconds_per_token or 0.0) <= ABOUT_AS_FAST * fastest]
        return min(near, key=lambda step: (step.host_inputs, step.seconds_per_token, step.peak_gib))
    return min(steps, key=lambda step: (lacking(step), step.seconds_per_token or 0.0))


def _row_counts(rows: int) -> Iterator[int]:
    while rows:
        yield rows
        rows //= 2


def _settled(run: PlainRun, work: StreamedWork, rows: int, room_gib: float) -> StreamedStep:
    """Return a step with this many rows per pass; as many inputs are offloaded to the host as necessary."""
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
    a_block = work.batch_size * longest * run.shape.hidden_size * ELEMENT_BYTES[dtype]
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
            "seconds_per_token": seconds / (mean * work.batch_size),
        }
    )


def _head_tokens(shape: ModelShape, *, predicted: float) -> int | None:
    """Positions whose logits exist at the same time; None if all fit."""
    most = max(LEAST_CHUNK, 1 << max((CHUNK_BYTES // (FLOAT * shape.vocab_size)).bit_length() - 1, 0))
    return None if predicted <= most else most


def _faster_update(run: PlainRun, work: StreamedWork, dtype: str) -> Literal["host", "gpu"]:
    """Choose where Adam is faster. The GPU's copies wait for those of the weights."""
    if run.machine.gpu is None:
        return "host"
    moved = _moved_bytes(run, dtype)
    on_gpu = (run.trainable * (STATE_BYTES + ELEMENT_BYTES[dtype]) + moved) / _host_rate(run)
    return "gpu" if on_gpu < adam_seconds(run.machine, run.trainable) else "host"


STREAMED_FACTOR = 1.22
"""Time of passes relative to a plain step: gradients of all weights are summed and measured (H200: 3B and
6.7B).
"""
FORWARD_SHARE = 0.5
"""Share of the forward pass that can hide an update on the GPU: both use the same link (H200)."""


def streamed_step_parts(run: PlainRun, work: StreamedWork, step: StreamedStep) -> dict[str, float]:
    """Seconds of an optimizer step: the passes, and what they wait for.

    The forward pass waits for the weights and for the update of the step before; the backward pass waits for
    weights and inputs on their way in and gradients on their way out.
    """
    shape = run.shape
    passes = -(-work.batch_size // step.micro_rows)
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
    inputs = step.host_inputs * work.batch_size * usual * shape.hidden_size * width / rate
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
    """Bytes of the weights of all blocks and of the embedding or the head, once."""
    shape = run.shape
    blocks = shape.layers * layer_parameters(shape)
    return float((blocks + shape.vocab_size * shape.hidden_size) * ELEMENT_BYTES[dtype])


def _host_rate(run: PlainRun) -> float:
    """Bytes per second between pinned memory and the GPU, one way; both directions run at the same time."""
    gpu = run.machine.gpu
    return gpu.pcie_gb_s * PCIE_SHARE * 1e9 if gpu is not None else run.rates.host
