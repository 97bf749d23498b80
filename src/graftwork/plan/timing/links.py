"""Seconds that cards spend on telling each other their gradients. Pure."""


def link_seconds(bytes: float, *, cards: int, gb_s: float) -> float:
    """A ring all-reduce: every card sends and receives 2 (n - 1) / n of the bytes, one way at `gb_s`."""
    if cards < 2:
        return 0.0
    return 2 * (cards - 1) / cards * bytes / (gb_s * 1e9)
