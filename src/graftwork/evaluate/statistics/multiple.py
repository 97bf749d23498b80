"""Several candidates at once: the more are tried, the likelier one wins by chance.

In: a p for each name. Out: the p of each after Holm's correction. Pure.
"""

from collections.abc import Mapping


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p (Scandinavian Journal of Statistics, 1979), in the order of the names given.

    Those under alpha can all be called differences, with a chance of at most alpha that any one of
    them is none, however the tests hang together.
    """
    ranked = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    so_far = 0.0
    for rank, name in enumerate(ranked):
        so_far = max(so_far, min(1.0, (len(ranked) - rank) * p_values[name]))
        adjusted[name] = so_far
    return {name: adjusted[name] for name in p_values}
