"""How long training takes: a card's step part by part, else operations over what the machine gives. Pure."""

import math

from graftwork.model.shape import adapter_parameters, layer_parameters
from graftwork.plan.pooling import pool_runs
from graftwork.plan.timing.card import card_step
from graftwork.plan.timing.rates import Rates
from graftwork.records.base import Figure
from graftwork.records.fit import Level
from graftwork.records.plan import DeviceFacts, ModelShape, PlainStep, Tuning, Workload

LOAD_SECONDS = 10.0
"""Interpreter, libraries, the base and two proofs of it (measured: 11 s with a small base on 2 cores)."""
CHECKPOINT_SECONDS = 0.15
GUESSED_GFLOPS_A_THREAD = 35.0
"""A server core of recent years in fp32, for machines that nobody has measured."""

EFFICIENCY = 0.55
"""Share of the measured matrix rate that a whole training step reaches (measured on CPU)."""
PROCESSOR_EFFICIENCY = 0.67
"""The same of the step that is written for processors (measured: 0.67 learning, 0.71 in frozen blocks)."""

MEASURED_GFLOPS = 700_000.0
"""Half-precision products of the card that tunings are reckoned for where no rates are known."""
CARD_SPREAD: dict[Level, float] = {"computed": 1.35, "traced": 1.35, "probed": 1.15}
"""Factor, either way, on a card whose rates are known. A run has checkpoints and looks between steps."""
FIXED = "beginning and end"


def training_flops(shape: ModelShape, work: Workload) -> float:
    """Operations of the whole run."""
    if work.processor is not None:
        return processor_flops(shape, work)
    return _plain_flops(shape, work)


def _plain_flops(shape: ModelShape, work: Workload) -> float:
    """Forward through all layers; backward through the adapted ones alone, for activations only, since
    their weights are frozen; the head only where a reply token is predicted; what all rows begin with
    once a batch.
    """
    tokens = _read_tokens(work)
    replies = work.trained_tokens * work.epochs
    layer = layer_parameters(shape)
    forward = 2.0 * layer * shape.layers * tokens
    # Frozen weights need no gradient of their own.
    backward = (4.0 if work.method == "full" else 2.0) * layer * work.adapted_layers * tokens
    head = 2 * 2.0 * shape.vocab_size * shape.hidden_size * replies
    scores = _scores(shape, work)
    return forward + backward + head + scores * tokens * (shape.layers + 2 * work.adapted_layers)


def processor_flops(shape: ModelShape, work: Workload) -> float:
    """The processor's step: frozen blocks once a row and not once an epoch where their output is kept; the
    last block beyond keys and values only where a reply is predicted; the adapters beside the weights."""
    own = work.processor
    tokens, layer = _read_tokens(work), layer_parameters(shape)
    replies = work.trained_tokens * work.epochs
    frozen = shape.layers - work.adapted_layers
    kept = own is not None and own.kept != "nowhere"
    trunk_tokens = own.distinct_tokens + work.shared_tokens if own is not None and kept else tokens
    scores = _scores(shape, work)
    trunk = trunk_tokens * frozen * (2.0 * layer + scores)
    grafted = adapter_parameters(shape, rank=work.rank, targets=work.targets, layers=1, ranks=work.ranks)
    # Forward and back through frozen weights; an adapter has its own gradient besides.
    block = 4.0 * layer + 6.0 * grafted + 3.0 * scores
    entered = 4.0 * 2 * shape.hidden_size * shape.kv_heads * shape.head_dim
    above = tokens * ((work.adapted_layers - 1) * block + entered) + replies * block
    head = 4.0 * shape.vocab_size * shape.hidden_size * replies
    return trunk + above + head


def validation_share(shape: ModelShape, work: Workload) -> float:
    """Of a trained token's time, what reading one without learning takes: all blocks, once, forward."""
    if work.processor is None:
        return 0.5
    replies = work.trained_tokens / sum(work.lengths)
    read = shape.layers * (2.0 * layer_parameters(shape) + _scores(shape, work))
    read += 2.0 * shape.vocab_size * shape.hidden_size * replies
    return read * sum(work.lengths) * work.epochs / training_flops(shape, work)


def _read_tokens(work: Workload) -> float:
    """Tokens of a run, the common beginning once a batch."""
    rows = len(work.lengths)
    batches = math.ceil(rows / work.batch_rows)
    return float((sum(work.lengths) - work.shared_tokens * (rows - batches)) * work.epochs)


def _scores(shape: ModelShape, work: Workload) -> float:
    """Operations of one token's attention in one block."""
    mean_length = sum(work.lengths) / len(work.lengths)
    return 4.0 * mean_length * shape.heads * shape.head_dim


def tokens_per_second(
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    learned: tuple[float, ...],
    tuning: Tuning | None = None,
    plain: PlainStep | None = None,
    rates: Rates | None = None,
) -> Figure:
    """From a card's rates or a measured matrix rate, else a guess; pooled with earlier runs of the same kind.

    `rates` are those of this very card: of a probe, or of the catalog.
    """
    prior = _computed_rate(shape, work, device, tuning=tuning, plain=plain, rates=rates)
    return pool_runs(prior, learned)


def _computed_rate(
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    tuning: Tuning | None,
    plain: PlainStep | None,
    rates: Rates | None,
) -> Figure:
    """What is expected before any run of this kind was seen."""
    if rates is not None and device.kind == "cuda":
        rate = _card_rate(shape, work, tuning=tuning, plain=plain, rates=rates)
        if rate is not None:
            spread = CARD_SPREAD[rates.certainty]
            return Figure.about(rate, down=1 / spread, up=spread, unit="tokens/s")
    if tuning is not None:
        # Reckoned for one card; others are as much slower as their products are.
        share = (device.gflops or MEASURED_GFLOPS) / MEASURED_GFLOPS
        return Figure.about(share / tuning.seconds_a_token, down=0.6, up=1.25, unit="tokens/s")
    flops_a_token = training_flops(shape, work) / (sum(work.lengths) * work.epochs)
    efficiency = EFFICIENCY if work.processor is None else PROCESSOR_EFFICIENCY
    if device.gflops is not None:
        rate = device.gflops * 1e9 * efficiency / flops_a_token
        return Figure.about(rate, down=0.55, up=1.6, unit="tokens/s")
    rate = GUESSED_GFLOPS_A_THREAD * 1e9 * device.threads * efficiency / flops_a_token
    return Figure.about(rate, down=0.25, up=4.0, unit="tokens/s")


def _card_rate(
    shape: ModelShape, work: Workload, *, tuning: Tuning | None, plain: PlainStep | None, rates: Rates
) -> float | None:
    """Tokens a second of the step that the run takes on a card."""
    if tuning is None:
        return None if plain is None or plain.seconds_a_token is None else 1 / plain.seconds_a_token
    total = sum(work.lengths)
    step = card_step(
        shape,
        tuning,
        adapted=work.adapted_layers,
        trainable=adapter_parameters(
            shape, rank=work.rank, targets=work.targets, layers=work.adapted_layers, ranks=work.ranks
        ),
        rates=rates,
        # Of the row that a token is in, not of all rows.
        mean_length=sum(length * length for length in work.lengths) / total,
        trained_share=min(work.trained_tokens / total, 1.0),
        uneven=min(work.lengths) < max(work.lengths),
    )
    tokens = total * work.batch_rows / len(work.lengths)
    fixed = step.parts.get(FIXED, 0.0)
    # The last pass of a step is seldom full: its tokens count, its beginning and end too.
    passes = max(math.ceil(tokens / tuning.micro_tokens), 1)
    seconds = (sum(step.parts.values()) - fixed) * tokens / tuning.micro_tokens + fixed * passes
    return tokens / (seconds + sum(step.once_a_step.values()))
