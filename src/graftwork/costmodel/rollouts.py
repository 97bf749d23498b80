"""Sampling answers during training: memory and seconds, on a card and on a processor. Pure.

In: a shape and the answers of a batch. Out: bytes that the generator holds besides the weights, and seconds.
The weights are those in training: nothing is there twice.
"""

from graftwork.costmodel.processor import PASS_TOKENS, reached_share, seconds_a_token
from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.plan import ModelShape, RolloutLoad, Tuning, Workload
from graftwork.records.units import GIB

READING_SHARE, WRITING_SHARE = 0.64, 0.52
"""Of the measured matrix rate of a processor, for prompts and for rows that write together (measured)."""
WEIGHTS_A_SECOND = 5.0e9
"""Bytes of weights that one processor core reads for each token, whatever the rows (measured)."""
TOKEN_SECONDS_A_BLOCK, WITH_FEWER_BITS = 1.2e-4, 2.3e-4
"""Of a recorded pass for one token of each row, besides what it reads: its kernels follow each other. With
weights in 8 bits each product quantizes its input (H200, 0.1B and 7.6B)."""
READ_COLUMNS = 1.4
"""Columns of the cache that a recorded pass reads, over those in use: recordings come in few sizes."""
USUAL_LENGTH = 0.65
"""Of the longest answer allowed, what answers have on average (guessed; the preflight measures it)."""
LOGIT_COPIES = 3
BYTES_OF_FORM = {"whole": 2.0, "eight": 1.0, "four": 0.52}


def cache_bytes(shape: ModelShape, *, tokens: float, rows: int, width: float) -> float:
    """Keys and values of rows that grow to `tokens`."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * width * tokens * rows


def sampling_bytes(shape: ModelShape, load: RolloutLoad, *, width: float) -> float:
    """What the generator holds while answers are written together."""
    rows = load.rows_at_once
    cache = cache_bytes(shape, tokens=load.prompt_tokens + load.max_tokens, rows=rows, width=width)
    prompt = (4 * shape.hidden_size + 3 * shape.intermediate_size) * width * load.prompt_tokens
    return cache + prompt + LOGIT_COPIES * 4.0 * shape.vocab_size * rows


def sampling_gib(shape: ModelShape, work: Workload, *, width: float = 2.0) -> float:
    return 0.0 if work.rollouts is None else sampling_bytes(shape, work.rollouts, width=width) / GIB


def processor_seconds(shape: ModelShape, load: RolloutLoad, *, gflops: float) -> dict[str, float]:
    """Seconds of a batch of rollouts: every prompt is read once, then all rows write together."""
    rate, flops = gflops * 1e9, 2.0 * total_parameters(shape)
    reading = load.prompts * load.prompt_tokens * flops / (rate * READING_SHARE)
    passes = load.rounds * load.max_tokens * total_parameters(shape) * 4.0 / WEIGHTS_A_SECOND
    writing = load.rows * load.answer_tokens * flops / (rate * WRITING_SHARE)
    return {"reading prompts": reading, "generation": passes + writing, **_rewards(load)}


def card_seconds(
    shape: ModelShape, load: RolloutLoad, *, rates: StepRates, weight_bytes: float
) -> dict[str, float]:
    """The same on a card, which replays recorded passes: each reads the weights and the cache."""
    weights = float(shape.layers * layer_parameters(shape))
    table = shape.vocab_size * shape.hidden_size * 2.0
    middle = load.prompt_tokens + load.answer_tokens / 2
    cache = READ_COLUMNS * cache_bytes(shape, tokens=middle, rows=load.rows_at_once, width=2.0)
    reading = weights * weight_bytes + table + cache
    kernels = shape.layers * (TOKEN_SECONDS_A_BLOCK if weight_bytes == 2 else WITH_FEWER_BITS)
    products = load.rows_at_once * 2.0 * weights / rates.half
    passing = kernels + max(reading / rates.bandwidth, products)
    return {
        "reading prompts": load.prompts * load.prompt_tokens * 2.0 * weights / rates.half,
        "generation": load.rounds * load.max_tokens * passing,
        **_rewards(load),
    }


def _rewards(load: RolloutLoad) -> dict[str, float]:
    return {"rewards": load.rows * load.reward_seconds} if load.reward_seconds else {}


def weight_width(tuning: Tuning | None) -> float:
    """Bytes of a frozen weight as a card holds it."""
    return BYTES_OF_FORM["whole" if tuning is None else tuning.form]


def passes_of(work: Workload) -> list[Workload]:
    """The work as the memory of single passes sees it: one prompt's answers, which share it; then the
    supervised rows of a mix."""
    load = work.rollouts
    if load is None:
        return [work]
    # The peak is at the longest prompt, which its answers share whole.
    longest = 0 if load.supervised_rows else max(work.lengths) - load.max_tokens
    group = work.model_copy(
        update={
            "batch_rows": load.answers,
            "shared_tokens": max(round(load.prompt_tokens), longest),
            "most_replies": load.answers * load.max_tokens,
        }
    )
    if not load.supervised_rows:
        return [group]
    return [group, work.model_copy(update={"batch_rows": load.supervised_rows})]


def update_seconds(shape: ModelShape, work: Workload, *, gflops: float, cores: int) -> dict[str, float]:
    """Seconds of training on the answers of one step on a processor: a pass for each prompt, which its
    answers share, the supervised rows of a mix, and what the model of the start reads."""
    load = work.rollouts
    if load is None:
        return {}
    answers = _answers_of_step(work, load)
    tokens = sum(answers.lengths)
    found = {
        name: seconds * tokens
        for name, seconds in seconds_a_token(shape, answers, gflops=gflops, cores=cores).items()
    }
    rate = gflops * 1e9 * reached_share(work, cores)
    found["reference"] = _reference_flops(shape, load) / rate
    if load.supervised_rows:
        steps = len(work.lengths) / work.batch_rows
        whole = load.rows * (load.prompt_tokens + load.max_tokens)
        rest = max(sum(work.lengths) / steps - whole, 0.0)
        found["supervised"] = rest * sum(seconds_a_token(shape, work, gflops=gflops, cores=cores).values())
    return found


def _answers_of_step(work: Workload, load: RolloutLoad) -> Workload:
    """The answers of a step as rows of their expected length."""
    own = work.processor
    return work.model_copy(
        update={
            "lengths": (round(load.prompt_tokens + load.answer_tokens),) * load.rows,
            "trained_tokens": round(load.rows * load.answer_tokens),
            "shared_tokens": round(load.prompt_tokens),
            "batch_rows": load.answers,
            "epochs": 1,
            "processor": None if own is None else own.model_copy(update={"kept": "nowhere"}),
        }
    )


def _reference_flops(shape: ModelShape, load: RolloutLoad) -> float:
    """Forward only; besides its tokens, a pass costs a quarter of one with its way back (measured)."""
    length = load.prompt_tokens + load.answer_tokens
    a_token = 2.0 * shape.layers * layer_parameters(shape)
    attention = 4.0 * length * shape.heads * shape.head_dim * shape.layers
    head = 2.0 * shape.vocab_size * shape.hidden_size * load.answer_tokens
    passes = PASS_TOKENS / 2 * a_token if load.reference_rows else 0.0
    return load.reference_rows * (length * (a_token + attention) + head) + passes
