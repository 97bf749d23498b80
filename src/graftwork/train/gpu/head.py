"""The loss without the logits: a chunk of positions at a time, its gradient at once, then forgotten.

In: hidden states where a token is predicted, the targets, the head. Out: the summed cross entropy and
its gradient by the hidden states. At no time are more logits there than those of one chunk.
"""

import torch
from torch import Tensor

from graftwork.train.gpu.frozen import FrozenWeight, product, transposed_product


def chunk_loss(hidden: Tensor, targets: Tensor, head: FrozenWeight) -> tuple[Tensor, Tensor]:
    """Summed loss over a chunk and its gradient; a negative target counts nothing."""
    logits = product(head, hidden).float()
    counted = targets >= 0
    place = targets.clamp(min=0)[:, None]
    level = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = (level - logits.gather(1, place))[:, 0]
    columns = torch.arange(logits.shape[1], device=logits.device)[None]
    d = (torch.exp(logits - level) - (columns == place).float()) * counted[:, None]
    return (losses * counted).sum(), transposed_product(head, d.to(hidden.dtype))


def chunk_loss_only(hidden: Tensor, targets: Tensor, head: FrozenWeight) -> Tensor:
    """The summed loss where nobody learns."""
    logits = product(head, hidden).float()
    taken = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return ((torch.logsumexp(logits, dim=1) - taken) * (targets >= 0)).sum()
