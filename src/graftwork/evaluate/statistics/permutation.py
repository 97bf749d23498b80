"""The sign-flip test: were both subjects alike, each difference could as well have the other sign.

In: two lists of scores in the same order, and which cluster (session) each pair belongs to. Out: a
two-sided p. Exact where that is feasible, else seeded random flips, or beyond a thousand their normal
limit. Pure. Assumes nothing of how the
scores are distributed. Clusters flip as wholes; for grades of 0 and 1 without clusters this is
McNemar's exact test.
"""

import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist

EXACT_FLIPS = 32
"""So many differences can be flipped in every way: two halves of 2^16 sums each."""
EXACT_STEPS = 2_000_000
"""The work that an exact count of sums on a grid may take."""
FINEST_GRID = 60
"""Averages of up to six repeats lie on a grid of sixtieths."""
RANDOM_FLIPS = 10_000
MANY_FLIPS = 1000
"""From here on the sum of all flips is normal to more digits than random flips would give."""


def paired_permutation(
    a: Sequence[float],
    b: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RANDOM_FLIPS,
) -> float:
    """The chance of as large a mean difference between `a` and `b`, were they alike."""
    sums = sum_clusters([new - old for old, new in zip(a, b, strict=True)], clusters)
    scale = max(map(abs, sums), default=0.0)
    steps = [abs(s) for s in sums if abs(s) > 1e-12 * scale]
    if not steps:
        return 1.0
    observed = abs(math.fsum(sums))
    grid = _on_a_grid(steps)
    if grid is not None:
        return _flip_on_a_grid(grid, round(observed * sum(grid) / math.fsum(steps)))
    reached = observed - 1e-9 * scale
    if len(steps) <= EXACT_FLIPS:
        return _flip_every_way(steps, reached)
    if len(steps) > MANY_FLIPS:
        return 2 * NormalDist().cdf(-observed / math.sqrt(math.fsum(step * step for step in steps)))
    return _flip_at_random(steps, reached, seed=seed, resamples=resamples)


def sum_clusters(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    """One sum a cluster, in the order of their first member."""
    if clusters is None:
        return list(values)
    members: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters, values, strict=True):
        members.setdefault(cluster, []).append(value)
    return [math.fsum(group) for group in members.values()]


def _on_a_grid(steps: Sequence[float]) -> list[int] | None:
    """The steps as whole numbers of a common fraction, if there is a coarse one and it is worth it."""
    for parts in range(1, FINEST_GRID + 1):
        if all(abs(step * parts - round(step * parts)) < 1e-9 for step in steps):
            whole = [round(step * parts) for step in steps]
            return whole if 2 * sum(whole) * len(whole) <= EXACT_STEPS else None
    return None


def _flip_on_a_grid(steps: Sequence[int], observed: int) -> float:
    """Counts the flips that lead to each sum, one step after another."""
    ways = {0: 1}
    for step in steps:
        after: dict[int, int] = {}
        for total, count in ways.items():
            after[total + step] = after.get(total + step, 0) + count
            after[total - step] = after.get(total - step, 0) + count
        ways = after
    far = sum(count for total, count in ways.items() if abs(total) >= observed)
    return far / (1 << len(steps))


def _flip_every_way(steps: Sequence[float], reached: float) -> float:
    """Both halves flipped in every way; the sorted sums of one are walked against those of the other."""
    if reached <= 0:
        return 1.0
    left, right = _all_sums(steps[::2]), _all_sums(steps[1::2])
    far, start = 0, len(right)
    for total in left:
        # The larger the sum of the left half, the smaller a sum of the right half will do.
        while start and total + right[start - 1] >= reached:
            start -= 1
        far += len(right) - start
    # For every flip that reaches so far up, its mirror image reaches as far down.
    return min(1.0, 2 * far / (1 << len(steps)))


def _all_sums(steps: Sequence[float]) -> list[float]:
    sums = [0.0]
    for step in steps:
        sums = sorted([total - step for total in sums] + [total + step for total in sums])
    return sums


def _flip_at_random(steps: Sequence[float], reached: float, *, seed: int, resamples: int) -> float:
    """What was seen counts as one of the flips, so that p is never 0 (Phipson and Smyth, 2010)."""
    # Eight steps at a time: a random byte picks one of their 256 sums.
    tables = [_all_sums(steps[i : i + 8]) for i in range(0, len(steps), 8)]
    tables = [table * (256 // len(table)) for table in tables]
    draw = random.Random(seed)
    far = 0
    for _ in range(resamples):
        total = sum(table[byte] for table, byte in zip(tables, draw.randbytes(len(tables)), strict=True))
        far += abs(total) >= reached
    return (far + 1) / (resamples + 1)
