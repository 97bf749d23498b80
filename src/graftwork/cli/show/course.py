"""How a run goes, in one line: the trend of the loss, speed, gradient, memory, time by the plan."""

import math
from collections.abc import Sequence
from itertools import pairwise

from graftwork.cli.show.tables import safe

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 20
KEPT = 400


class Course:
    """The losses so far, one a step: a bar is told of the same step many times."""

    def __init__(self) -> None:
        self._losses: dict[float, float] = {}

    def see(self, done: float, detail: dict[str, float | str]) -> None:
        if "loss" in detail:
            self._losses[done] = float(detail["loss"])
            if len(self._losses) > KEPT:
                # Every other one of the older half: the trend stays.
                for old in list(self._losses)[: KEPT // 2 : 2]:
                    del self._losses[old]

    @property
    def trend(self) -> str:
        return sparkline([self._losses[step] for step in sorted(self._losses)])


def sparkline(values: Sequence[float], *, width: int = WIDTH) -> str:
    """Values as a row of small bars, each the mean of its part; nothing for fewer than two."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    count = min(width, len(known))
    edges = [round(place * len(known) / count) for place in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return BLOCKS[0] * count
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(round((mean - low) / (high - low) * top), top)] for mean in means)


def tell_detail(detail: dict[str, float | str], course: Course, *, total: float = 0) -> str:
    """What stands below the bar."""
    shown: list[str] = []
    if "loss" in detail:
        shown.append(f"loss {float(detail['loss']):.3f} {course.trend}".rstrip())
    if "tokens_per_second" in detail:
        shown.append(f"{float(detail['tokens_per_second']):,.0f} tokens/s")
    if "gradient_norm" in detail:
        shown.append(f"gradient {float(detail['gradient_norm']):.2g}")
    if "memory_gib" in detail:
        shown.append(f"{float(detail['memory_gib']):.1f} GiB")
    if "step_seconds" in detail and "expected_step_seconds" in detail:
        expected = float(detail["expected_step_seconds"])
        shown.append(
            f"{duration(float(detail['step_seconds']))} a step (plan: {duration(expected)}, "
            f"{duration(expected * total)} in all)"
        )
    shown += [f"{value:,} {name}" for name, value in detail.items() if name.endswith("/s")]
    if "subject" in detail:
        shown.append(safe(str(detail["subject"])))
    return ", ".join(shown)


def duration(seconds: float) -> str:
    if seconds < 60:
        return (
            f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
        )
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
