"""The loss of a model whose own weights are learned: they stay in float32, their products are faster.

In: the model, and the type that the plan computes in. Out: the loss in mixed precision, or None where
there is nothing to mix. Only bfloat16, whose range is that of float32: no gradient is lost for being
small.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

    from graftwork.train.loss import TokenBatch


def mixed_loss(model: Any, settings: TrainSettings, *, dtype: str) -> "Callable[[TokenBatch], Tensor] | None":
    if settings.method != "full" or settings.strategy != "single" or dtype != "bfloat16":
        return None
    import torch

    from graftwork.train.loss import summed_loss

    kind = next(model.parameters()).device.type

    def loss(batch: "TokenBatch") -> "Tensor":
        with torch.autocast(kind, dtype=torch.bfloat16):
            return summed_loss(model, batch)

    return loss
