"""The learning rate at a step: up in a line, down in a cosine. Pure."""

import math


def learning_rate(step: int, *, steps: int, highest: float, warmup_share: float) -> float:
    """The rate of step 1 … `steps`. Never zero, so that no step is wasted."""
    warmup = round(steps * warmup_share)
    if step <= warmup:
        return highest * step / (warmup + 1)
    gone = (step - warmup - 1) / max(steps - warmup, 1)
    return highest * 0.5 * (1 + math.cos(math.pi * gone))
