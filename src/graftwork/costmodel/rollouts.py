"""Sampling answers during training: memory and seconds, on a GPU and on a CPU. Pure.

Input: a shape and the answers of a batch. Output: bytes that the generator holds besides the weights, and
seconds. The weights are those in training: nothing is there twice. The sizes of its tensors are those that
the generator itself asks for (`model/generate/scheduler.py`). Models that remember windows or states do not
fit slots: they answer in static batches (`model/generate/generator.py`), on a CPU one prompt at a time, on a
GPU all prompts that are asked together, each read once for every answer, by passes that are not recorded.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.costmodel.cpu_step import PASS_TOKENS, reached_share, seconds_per_token
from graftwork.costmodel.rates import PLAIN_DEQUANTIZING, StepRates
from graftwork.model.generate.scheduler import (
    MOST_ROWS,
    PREFILL_TOKENS,
    DecoderSizes,
    allocated_columns,
    cut_prompts,
)
from graftwork.model.shape import cache_bytes, layer_parameters, total_parameters
from graftwork.records.base import GIB, NF4_BYTES
from graftwork.records.plan import ModelShape, RolloutLoad, Tuning, Workload

LAUNCHED_SECONDS_PER_BLOCK = 2.6e-3
"""Time per block of a pass whose kernels Python launches, with adapters. A lower bound: three steps of 512
passes through the 30 blocks of SmolLM2 took more than 120 s on an H200.
"""


def batch_size(load: RolloutLoad, *, gpu: bool) -> int:
    """Rows of one batch."""
    return min(load.rows_at_once if gpu else load.answers, MOST_ROWS)


def count_batches(load: RolloutLoad, *, gpu: bool) -> int:
    """Batches of a step, one after the other."""
    if not gpu:
        return load.prompts * -(-load.answers // MOST_ROWS)
    rounds, remainder = divmod(load.rows, load.rows_at_once)
    return rounds * -(-load.rows_at_once // MOST_ROWS) + -(-remainder // MOST_ROWS)


def remembered_bytes(shape: ModelShape, load: RolloutLoad, *, rows: int, width: float, gpu: bool) -> float:
    """Bytes of keys, values and states of a batch when its answers have their full length. A prompt that is
    read by each row stays whole until the first token is generated; one that is read once is cut to the
    windows when it is copied.
    """
    position = 2.0 * shape.kv_heads * shape.head_dim * width * rows
    final, read = load.longest + load.max_tokens - 1, load.longest if gpu else 0
    columns_by_layer = [min(final, size) if size else final for size in shape.remembered]
    # A layer's keys are copied for each token: both are there for a moment.
    return position * (sum(max(columns, read) for columns in columns_by_layer) + max(columns_by_layer) / 2)


def gpu_batch_seconds(
    shape: ModelShape, load: RolloutLoad, *, rates: StepRates, weight_bytes: float
) -> dict[str, float]:
    """Return the time of one step, without rewards."""
    weights = float(shape.layers * layer_parameters(shape))
    rows = batch_size(load, gpu=True)
    length = load.longest + load.max_tokens
    attended = sum(min(length, size) if size else length for size in shape.remembered) / len(shape.remembered)
    cache = cache_bytes(shape, tokens=attended, rows=rows, width=2.0)
    table = shape.vocab_size * shape.hidden_size * 2.0
    reading = (weights * weight_bytes + table + cache) / rates.bandwidth
    passing = shape.layers * LAUNCHED_SECONDS_PER_BLOCK + max(reading, rows * 2.0 * weights / rates.half)
    return {
        "reading prompts": load.rows * load.prompt_tokens * 2.0 * weights / rates.half,
        "generation": count_batches(load, gpu=True) * load.max_tokens * passing,
    }


READING_SHARE, WRITING_SHARE = 0.64, 0.52
"""Share of a CPU's measured matrix rate for prompts, and for rows that are generated together (measured)."""
WEIGHTS_PER_SECOND = 5.0e9
"""Bytes of weights that one CPU core reads for each token, whatever the rows (measured)."""
TOKEN_SECONDS_PER_BLOCK, WITH_FEWER_BITS = 1.2e-4, 2.3e-4
"""Time per block of a recorded pass over one token of each row, besides memory traffic: its kernels run one
after another. With 8-bit weights each product quantizes its input (H200, 0.1B and 7.6B).
"""
HANDLING_SECONDS_PER_TOKEN = 9e-6
"""Time per token of an answer besides sampling and training: journal, rows, the pass by the start (H200, two
runs of 128 answers, 0.50 and 0.56 s per step).
"""
SAMPLING_SHARE = 0.3
"""Share of the memory for answers that are sampled together. More rows hardly cost time, but their memory
stays allocated while a step is computed.
"""
USUAL_LENGTH = 0.65
"""Average length of answers, as a share of the longest allowed (guessed; the preflight measures it)."""
SAMPLING_COPIES = 2
"""Copies of the logits in 32 bits that sampling a token holds at once."""
FORWARD_SHARE = 1 / 3
"""Forward pass, as a share of a forward and backward pass."""
BYTES_OF_FORM = {"whole": 2.0, "eight": 1.0, "four": NF4_BYTES}


class PromptPass(NamedTuple):
    """Prompts that are read in one pass, padded to the same width, and the columns that they attend to."""

    rows: int
    width: int
    columns: int


class SamplingSizes(NamedTuple):
    """The tensors of the generator, by length."""

    slots: int
    columns: int
    """Columns of the cache."""
    token_rows: int
    """Rows of logits of a token pass."""
    recordings: int
    """Token passes of different sizes; each keeps its logits."""
    prompts: tuple[PromptPass, ...]


def sampling_sizes(load: RolloutLoad, *, recorded: bool) -> SamplingSizes:
    """Compute the sizes. `recorded`: as a GPU does it, in few sizes, with the prompts of all groups
    together.
    """
    sizes = DecoderSizes(padded=recorded)
    rows = min(load.rows_at_once, sizes.most)
    slots, columns = sizes.room(rows, load.longest + load.max_tokens)
    lengths = sorted({load.longest, round(load.prompt_tokens)})
    read = {wide for length in lengths for wide, _ in sizes.token_runs(length, load.max_tokens)}
    return SamplingSizes(
        slots=slots,
        columns=allocated_columns(columns),
        token_rows=sizes.rows(rows),
        recordings=max(len(read), 1) if recorded else 1,
        prompts=tuple(
            prompt_pass
            for length in lengths
            for prompt_pass in _prompt_passes(load, length, sizes, recorded=recorded)
        ),
    )


def _prompt_passes(
    load: RolloutLoad, length: int, sizes: DecoderSizes, *, recorded: bool
) -> list[PromptPass]:
    """The passes that read prompts of this length, each once, and then their last tokens in every row."""
    rows = min(load.rows_at_once, sizes.most) if recorded else load.answers
    read = [length - 1] * -(-rows // load.answers)
    passes = []
    for lengths in (read, [length + load.max_tokens] * load.answers) if load.has_turns else (read,):
        for indices in cut_prompts(lengths):
            needed = lengths[indices[0]]
            width = min(needed, PREFILL_TOKENS)
            width = sizes.recorded_width(len(indices), width) or width
            passes.append(PromptPass(len(indices), width, sizes.columns(needed)))
    return [*passes, PromptPass(rows, 1, sizes.columns(length))]


def prompt_bytes(shape: ModelShape, read: PromptPass, *, width: float) -> float:
    """Peak of one block while prompts are read by the model's own pass."""
    tokens, attended = read.rows * read.width, read.rows * read.columns
    heads, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mask = float(read.width * attended)
    # The keys and values of these slots are copied.
    attention = width * (tokens * (2 * shape.hidden_size + 2 * heads + 2 * groups) + 2 * groups * attended)
    if read.width > 1:
        # For every head once more, and the mask as numbers.
        attention += width * (2 * heads * attended * (groups < heads) + mask)
    else:
        # One token at a time has its scores written out, and their softmax in 32 bits.
        attention += shape.heads * attended * (width + 4 + 4 * (width < 4))
    return mask + max(attention, width * tokens * (4 * shape.hidden_size + 3 * shape.intermediate_size))


def sampling_memory(
    shape: ModelShape, load: RolloutLoad, *, width: float, recorded: bool
) -> dict[str, float]:
    """Bytes that the generator holds while answers are generated together, by purpose."""
    if load.on_server:
        return {}
    if shape.remembered:
        # Static batches.
        rows, recordings = batch_size(load, gpu=recorded), 1
        cache = remembered_bytes(shape, load, rows=rows, width=width, gpu=recorded)
        # A prompt that all rows share is read once, but for its last token.
        passes: Sequence[PromptPass] = (
            [PromptPass(rows, load.longest, load.longest)]
            if recorded
            else [PromptPass(1, load.longest - 1, load.longest - 1), PromptPass(rows, 1, load.longest)]
        )
    else:
        sizes = sampling_sizes(load, recorded=recorded)
        rows, recordings, passes = sizes.token_rows, sizes.recordings, sizes.prompts
        cache = cache_bytes(shape, tokens=sizes.columns, rows=sizes.slots, width=width)
    logits = 4.0 * shape.vocab_size * rows
    copies = SAMPLING_COPIES * logits
    # Where the head computes in 16 bits, its product is there too.
    product = shape.vocab_size * rows * width if width < 4 else 0.0
    reading = max(prompt_bytes(shape, read, width=width) for read in passes)
    return {
        "key-value cache": cache,
        "sampled logits": recordings * logits + product + copies,
        # Prompts are read before any token is sampled, in the same memory.
        "reading prompts": max(reading - copies, 0.0),
    }


def sampling_bytes(shape: ModelShape, load: RolloutLoad, *, width: float, recorded: bool) -> float:
    return sum(sampling_memory(shape, load, width=width, recorded=recorded).values())


def choose_prompts_at_once(
    shape: ModelShape, load: RolloutLoad, *, memory_gib: float, width: float, recorded: bool
) -> RolloutLoad:
    """Return the load with as many prompts answered together as fit into `SAMPLING_SHARE` of the memory."""
    room = SAMPLING_SHARE * memory_gib * GIB

    def size_of(together: int) -> float:
        tried = load.model_copy(update={"prompts_at_once": together})
        return sampling_bytes(shape, tried, width=width, recorded=recorded)

    # More prompts than the slots of the generator take no more memory.
    most = min(load.prompts, -(-MOST_ROWS // load.answers))
    together = 1 + bisect_right(range(2, most + 1), room, key=size_of)
    return load.model_copy(update={"prompts_at_once": load.prompts if together == most else together})


def sampling_gib(shape: ModelShape, work: Workload) -> float:
    """Memory for sampling on one GPU."""
    if work.rollouts is None:
        return 0.0
    return sampling_bytes(shape, work.rollouts, width=2.0, recorded=True) / GIB


def sampling_beyond(
    shape: ModelShape, load: RolloutLoad, parts: Mapping[str, float], *, width: float
) -> float:
    """Bytes of a CPU's memory that sampling takes beyond `parts`, those of a step: a step holds nothing while
    answers are sampled.
    """
    sampled = sampling_bytes(shape, load, width=width, recorded=False)
    return max(sampled - parts["activations"] - parts["logits"], 0.0)


def sampling_rounds(load: RolloutLoad, sizes: DecoderSizes) -> int:
    """Return how many times all parallel rows are filled for the answers of a step."""
    return -(-load.rows // min(load.rows_at_once, sizes.most))


def cpu_seconds(shape: ModelShape, load: RolloutLoad, *, gflops: float) -> dict[str, float]:
    """Return the seconds of a batch of rollouts: every prompt is read once, then all rows generate together.
    Those of a server are not known here.
    """
    if load.on_server:
        return _rewards(load)
    rate, flops = gflops * 1e9, 2.0 * total_parameters(shape)
    reading = load.prompts * load.prompt_tokens * flops / (rate * READING_SHARE)
    rounds = count_batches(load, gpu=False) if shape.remembered else sampling_rounds(load, DecoderSizes())
    passes = rounds * load.max_tokens * total_parameters(shape) * 4.0 / WEIGHTS_PER_SECOND
    writing = load.rows * load.answer_tokens * flops / (rate * WRITING_SHARE)
    return {"reading prompts": reading, "generation": passes + writing, **_rewards(load)}


def gpu_seconds(
    shape: ModelShape, load: RolloutLoad, *, rates: StepRates, weight_bytes: float
) -> dict[str, float]:
    """The same on a GPU, which replays recorded passes: each reads the weights and the cache."""
    if load.on_server:
        return _rewards(load)
    if shape.remembered:
        batches = gpu_batch_seconds(shape, load, rates=rates, weight_bytes=weight_bytes)
        return batches | _rewards(load)
    weights = float(shape.layers * layer_parameters(shape))
    table = shape.vocab_size * shape.hidden_size * 2.0
    sizes = DecoderSizes(padded=True)
    rows = sizes.rows(min(load.rows_at_once, sizes.most))
    runs = list(sizes.token_runs(round(load.prompt_tokens), load.max_tokens))
    columns = sum(read * passes for read, passes in runs) / max(sum(passes for _, passes in runs), 1)
    reading = weights * weight_bytes + table + cache_bytes(shape, tokens=columns, rows=rows, width=2.0)
    kernels = shape.layers * (TOKEN_SECONDS_PER_BLOCK if weight_bytes == 2 else WITH_FEWER_BITS)
    products = rows * 2.0 * weights / rates.half
    passing = kernels + max(reading / rates.bandwidth, products)
    return {
        "reading prompts": load.prompts * load.prompt_tokens * 2.0 * weights / rates.half,
        "generation": sampling_rounds(load, sizes) * load.max_tokens * passing,
        "handling answers": HANDLING_SECONDS_PER_TOKEN * load.rows * load.answer_tokens,
        **_rewards(load),
    }


LAUNCHED_KERNELS_PER_BLOCK = 60
"""Kernels of a block for one token, called from Python one by one (derived from the plain step's)."""


def launched_bytes(shape: ModelShape, *, prompt: int, completion: int, rows: int) -> dict[str, float]:
    """Transient memory on a GPU while transformers generates `rows` answers in parallel."""
    return {
        "key-value cache": cache_bytes(shape, tokens=prompt + completion, rows=rows, width=2.0),
        # Hidden states of all prompts at once.
        "activations": 8.0 * (shape.hidden_size + shape.intermediate_size) * prompt * rows,
        # Of one token, in float32, sorted for sampling.
        "logits": 12.0 * shape.vocab_size * rows,
    }


def launched_seconds(
    shape: ModelShape, *, prompt: int, completion: int, rows: int, rates: StepRates, four_bits: bool
) -> float:
    """One answer of `completion` tokens in each of `rows` rows by transformers: for every token all weights
    are read, and each kernel is launched."""
    weights = float(shape.layers * layer_parameters(shape))
    table = shape.vocab_size * shape.hidden_size * 2.0
    reading = (weights * 2.0 + table) / rates.bandwidth
    if four_bits:
        # Its codes are read, two bytes written, two read again for the product.
        reading = (weights * NF4_BYTES + table) / rates.bandwidth
        reading += weights * 4.0 / (rates.bandwidth * PLAIN_DEQUANTIZING) * 0.5
    middle = round(prompt + completion / 2)
    cache = cache_bytes(shape, tokens=middle, rows=rows, width=2.0) / rates.bandwidth
    launching = LAUNCHED_KERNELS_PER_BLOCK * shape.layers * rates.launch_seconds
    return completion * max(reading + cache, launching)


def _rewards(load: RolloutLoad) -> dict[str, float]:
    return {"rewards": load.rows * load.reward_seconds} if load.reward_seconds else {}


def forward_rows(load: RolloutLoad, *, own_step: bool) -> int:
    """Answers of a batch that a GPU reads forward only: with the initial model, to compare a server's
    probabilities, and once more if graft's own step measures the divergence from it.
    """
    compared = load.rows if load.on_server else load.reference_rows if own_step else 0
    return load.reference_rows + compared


def weight_width(tuning: Tuning | None) -> float:
    """Bytes of a frozen weight as a GPU holds it."""
    return BYTES_OF_FORM["whole" if tuning is None else tuning.form]


def passes_of(work: Workload) -> list[Workload]:
    """Return the work in passes, for estimates of memory: one prompt's answers, which share it; then the
    supervised rows of a mix.
    """
    load = work.rollouts
    if load is None:
        return [work]
    # The peak is at the longest prompt, which its answers share whole.
    longest = 0 if load.supervised_rows else max(work.lengths) - load.max_tokens
    group = work.model_copy(
        update={
            "batch_size": load.answers,
            "shared_tokens": max(round(load.prompt_tokens), longest),
            "most_replies": load.answers * load.max_tokens,
        }
    )
    if not load.supervised_rows:
        return [group]
    return [group, work.model_copy(update={"batch_size": load.supervised_rows})]


def update_seconds(shape: ModelShape, work: Workload, *, gflops: float, cores: float) -> dict[str, float]:
    """Seconds of training on the answers of one step on a CPU: a pass for each prompt, shared by its answers,
    the supervised rows of a mix, and the passes of the initial model.
    """
    load = work.rollouts
    if load is None:
        return {}
    cpu_step = work.cpu_step
    # The answers of a step as rows of their expected length.
    answers = work.model_copy(
        update={
            "lengths": (round(load.prompt_tokens + load.answer_tokens),) * load.rows,
            "trained_tokens": round(load.rows * load.answer_tokens),
            "shared_tokens": round(load.prompt_tokens),
            "batch_size": load.answers,
            "epochs": 1,
            "cpu_step": None if cpu_step is None else cpu_step.model_copy(update={"kept": "nowhere"}),
        }
    )
    tokens = sum(answers.lengths)
    parts = {
        name: seconds * tokens
        for name, seconds in seconds_per_token(shape, answers, gflops=gflops, cores=cores).items()
    }
    rate = gflops * 1e9 * reached_share(work, cores)
    parts["reference"] = _forward_flops(shape, load, rows=load.reference_rows) / rate
    if load.on_server:
        # Its probabilities are compared with those of the trainer.
        parts["comparing"] = _forward_flops(shape, load, rows=load.rows) / rate
    if load.supervised_rows:
        steps = len(work.lengths) / work.batch_size
        whole = load.rows * (load.prompt_tokens + load.max_tokens)
        supervised = max(sum(work.lengths) / steps - whole, 0.0)
        parts["supervised"] = supervised * sum(
            seconds_per_token(shape, work, gflops=gflops, cores=cores).values()
        )
    return parts


def _forward_flops(shape: ModelShape, load: RolloutLoad, *, rows: int) -> float:
    """Forward only; besides its tokens, a pass costs a quarter of one with a backward pass (measured)."""
    length = load.prompt_tokens + load.answer_tokens
    a_token = 2.0 * shape.layers * layer_parameters(shape)
    attention = 4.0 * length * shape.heads * shape.head_dim * shape.layers
    head = 2.0 * shape.vocab_size * shape.hidden_size * load.answer_tokens
    passes = PASS_TOKENS / 2 * a_token if rows else 0.0
    return rows * (length * (a_token + attention) + head) + passes
