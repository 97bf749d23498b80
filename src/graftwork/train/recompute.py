"""Blocks that keep only their input and compute the rest again on the way back (gradient checkpointing).

In: a model. Out: the same model; its blocks, wherever a gradient is wanted, keep nothing but what came in.
Losses and gradients stay what they are. torch's own function is called here, and not through the switch of
transformers: that one acts only on models in training mode, where dropout would act too, and ours learn
without. Knows nothing of crews: what gathers a block before it is called or goes back, stands around it.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from graftwork.model.parts import decoder_parts

_CHECKPOINTED = "_graft_recomputes"


def checkpoint_activations(model: Any) -> int:
    """From now on the blocks of this model compute again; how many there are. Twice is as once."""
    blocks = decoder_parts(model).blocks
    for block in blocks:
        if not getattr(block, _CHECKPOINTED, False):
            block.forward = _checkpointed(block, block.forward)
            setattr(block, _CHECKPOINTED, True)
    return len(blocks)


def _checkpointed(block: Any, forward: Any) -> Any:
    def compute(*given: Any, **named: Any) -> Any:
        # Who only reads, keeps nothing; and a cache would be filled a second time.
        filled = any(hasattr(one, "get_seq_length") for one in (*given, *named.values()))
        if filled or not torch.is_grad_enabled():
            return forward(*given, **named)
        # A block in evaluation mode draws nothing by chance: there is no state to be brought back.
        return checkpoint(
            forward, *given, use_reentrant=False, preserve_rng_state=bool(block.training), **named
        )

    return compute
