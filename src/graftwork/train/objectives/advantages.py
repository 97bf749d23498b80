"""GRPO advantages: each reward of a group of answers to one prompt, less the mean of the group.

Input: rewards. Output: what `policy.py` weighs the tokens of an answer by. Needs no torch.
"""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal


def group_advantages(
    rewards: Sequence[float | None], *, scale: Literal["none", "group"] = "none"
) -> list[float | None]:
    """Each reward less the mean of its group; None for answers without a reward, which do not count.

    `group` divides by the deviation of a sample (n − 1), as TRL does.
    """
    graded = [reward for reward in rewards if reward is not None]
    if len(graded) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = fmean(graded)
    divisor = stdev(graded) + 1e-4 if scale == "group" else 1.0
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]


def is_dead(rewards: Sequence[float | None]) -> bool:
    """Whether all answers got the same reward: such a group has no signal."""
    graded = [reward for reward in rewards if reward is not None]
    return len(graded) < 2 or max(graded) - min(graded) < 1e-9
