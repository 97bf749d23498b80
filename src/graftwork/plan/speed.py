"""How long training takes: floating point operations over what the machine gives. Pure."""

import math

from graftwork.model.shape import layer_parameters
from graftwork.records.figure import Figure
from graftwork.records.plan import DeviceFacts, ModelShape, Tuning, Workload

LOAD_SECONDS = 6.0
CHECKPOINT_SECONDS = 0.15
GUESSED_GFLOPS_A_THREAD = 35.0
"""A server core of recent years in fp32, for machines that nobody has measured."""

EFFICIENCY = 0.55
"""Share of the measured matrix rate that a whole training step reaches (measured on CPU)."""


MEASURED_GFLOPS = 700_000.0
"""Half-precision products of the card that tunings are reckoned for."""


def training_flops(shape: ModelShape, work: Workload) -> float:
    """Operations of the whole run.

    Forward through all layers; backward through the adapted ones alone, for activations only, since
    their weights are frozen; the head only where a reply token is predicted; what all rows begin with
    once a batch.
    """
    rows = len(work.lengths)
    batches = math.ceil(rows / work.batch_rows)
    tokens = (sum(work.lengths) - work.shared_tokens * (rows - batches)) * work.epochs
    replies = work.trained_tokens * work.epochs
    layer = layer_parameters(shape)
    forward = 2.0 * layer * shape.layers * tokens
    # Frozen weights need no gradient of their own.
    backward = (4.0 if work.method == "full" else 2.0) * layer * work.adapted_layers * tokens
    head = 2 * 2.0 * shape.vocab_size * shape.hidden_size * replies
    mean_length = sum(work.lengths) / rows
    scores = 4.0 * mean_length * shape.heads * shape.head_dim
    attention = scores * tokens * (shape.layers + 2 * work.adapted_layers)
    return forward + backward + head + attention


def tokens_per_second(
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    learned: tuple[float, ...],
    tuning: Tuning | None = None,
) -> Figure:
    """From earlier runs of the same kind, else from a measured matrix rate, else from a guess."""
    if learned:
        middle = sorted(learned)[len(learned) // 2]
        return Figure.about(middle, down=0.8, up=1.25, unit="tokens/s")
    if tuning is not None:
        # Reckoned for one card; others are as much slower as their products are.
        share = (device.gflops or MEASURED_GFLOPS) / MEASURED_GFLOPS
        return Figure.about(share / tuning.seconds_a_token, down=0.6, up=1.25, unit="tokens/s")
    flops_a_token = training_flops(shape, work) / (sum(work.lengths) * work.epochs)
    if device.gflops is not None:
        rate = device.gflops * 1e9 * EFFICIENCY / flops_a_token
        return Figure.about(rate, down=0.55, up=1.6, unit="tokens/s")
    rate = GUESSED_GFLOPS_A_THREAD * 1e9 * device.threads * EFFICIENCY / flops_a_token
    return Figure.about(rate, down=0.25, up=4.0, unit="tokens/s")
