"""Groups of answers to one prompt: their advantages, which carry a signal, which prompts come next. Pure."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

MOST_UNCERTAIN = 0.25
"""p(1 − p) at p = ½: the weight of a prompt that was never asked."""
SOLVED = 0.999
"""A reward from which an answer counts as solved."""


def group_advantages(
    rewards: Sequence[float | None], *, scale: Literal["none", "group"] = "none"
) -> list[float | None]:
    """Each reward less the mean of its group; None for answers without a reward, which do not count.

    `group` divides by the deviation of a sample (n − 1), as TRL does.
    """
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = fmean(known)
    divisor = stdev(known) + 1e-4 if scale == "group" else 1.0
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]


def is_dead(rewards: Sequence[float | None]) -> bool:
    """Whether all answers got the same: such a group says nothing."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) < 2 or max(known) - min(known) < 1e-9


@dataclass
class PromptRecord:
    """How often a prompt was answered, and solved."""

    answers: int = 0
    solved: float = 0.0

    @property
    def weight(self) -> float:
        """p(1 − p) of the share solved, smoothed so that no prompt is given up for ever."""
        if not self.answers:
            return MOST_UNCERTAIN
        share = (self.solved + 0.5) / (self.answers + 1)
        return share * (1 - share)


def choose_prompts(
    prompts: Sequence[str], history: Mapping[str, PromptRecord], *, count: int, seed: int, batch: int
) -> list[str]:
    """`count` different prompts, drawn by their weights; the draw depends on seed, batch and prompt alone."""
    empty = PromptRecord()

    def key(prompt: str) -> float:
        weight = history.get(prompt, empty).weight
        return math.log(weight) - math.log(-math.log(uniform(seed, batch, prompt)))

    return sorted(prompts, key=key, reverse=True)[:count]


def pass_rates(groups: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """The share of answers solved (pass@1), and of groups with a solved answer (pass@k)."""
    solved = [[reward is not None and reward >= SOLVED for reward in group] for group in groups]
    answers = [is_solved for group in solved for is_solved in group]
    if not answers:
        return 0.0, 0.0
    return fmean(answers), fmean([any(group) for group in solved])


def uniform(*parts: object) -> float:
    """A number strictly between 0 and 1 that depends on the parts alone."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return (int.from_bytes(digest[:6]) + 0.5) / 2**48


def seed_of(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:6])
