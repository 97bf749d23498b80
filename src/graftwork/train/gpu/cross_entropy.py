"""The loss of logits and its gradient, in one kernel on a GPU: logits become their gradient in place.

In: logits [places, vocabulary], targets, weights, and what a family does to its logits. Out: -log p of each
target. A negative target counts nothing.
"""

import torch
from torch import Tensor

from graftwork.model.parts import LogitsEnding
from graftwork.train.loss import loss_and_gradient, token_losses


def replace_by_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor | None, ending: LogitsEnding
) -> Tensor:
    """-log p of each target, not weighted; the logits are replaced by the gradient of the weighted sum."""
    losses: Tensor = _cross_entropy_(logits, targets, weights, ending.multiplier / ending.divisor, ending.cap)
    return losses


def target_losses(logits: Tensor, targets: Tensor, ending: LogitsEnding) -> Tensor:
    """-log p of each target; of places without one, of token 0."""
    losses: Tensor = _cross_entropy(logits, targets, ending.multiplier / ending.divisor, ending.cap)
    return losses


@torch.library.custom_op("graftwork::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(
    logits: Tensor, targets: Tensor, weights: Tensor | None, factor: float, cap: float | None
) -> Tensor:
    ending = LogitsEnding(multiplier=factor, cap=cap)
    wide = ending.apply_(logits.float() if logits.dtype != torch.float32 else logits.clone())
    losses = token_losses(wide, targets.clamp(min=0))
    _, d = loss_and_gradient(wide, targets, weights)
    logits.copy_(ending.backward_(d, wide))
    return losses


@_cross_entropy_.register_kernel("cuda")
def _(logits: Tensor, targets: Tensor, weights: Tensor | None, factor: float, cap: float | None) -> Tensor:
    from graftwork.train.gpu import kernels

    return kernels.cross_entropy(
        logits, targets, weights, LogitsEnding(multiplier=factor, cap=cap), gradient=True
    )


@torch.library.custom_op("graftwork::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor, factor: float, cap: float | None) -> Tensor:
    ending = LogitsEnding(multiplier=factor, cap=cap)
    return token_losses(ending.of(logits.float()), targets.clamp(min=0))


@_cross_entropy.register_kernel("cuda")
def _(logits: Tensor, targets: Tensor, factor: float, cap: float | None) -> Tensor:
    from graftwork.train.gpu import kernels

    return kernels.cross_entropy(
        logits, targets, None, LogitsEnding(multiplier=factor, cap=cap), gradient=False
    )
