"""What a rule notes about one row, and what it knows while it looks.

In: nothing. Out: the nouns that the families of rules share. A note is small, holds no secret and
stands beside its row; it does not say where the row is, for that the corpus knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from graftwork.data.settings import DataSettings

EXCERPT = 140


class Note(NamedTuple):
    """`reason` says how the fault was recognised, in words that many rows share where that is possible.

    `excerpt` comes from the redacted row and has at most `EXCERPT` characters.
    """

    code: str
    reason: str
    excerpt: str


@dataclass(frozen=True)
class Sight:
    """What is known beside the row: the settings, and the base that is to be trained, if any.

    `control_tokens` are the base's own; without them those of the known families are looked for.
    `base_reasons` says whether the base's template writes reasoning. `count_tokens` counts the
    tokens of a text; without it they are estimated.
    """

    settings: DataSettings
    base: str | None = None
    control_tokens: tuple[str, ...] = ()
    base_reasons: bool | None = None
    count_tokens: Callable[[str], int] | None = None


def show_start(text: str) -> str:
    folded = " ".join(text[: 8 * EXCERPT].split())
    return folded if len(folded) <= EXCERPT else f"{folded[: EXCERPT - 1]}…"


def show_end(text: str) -> str:
    folded = " ".join(text[-8 * EXCERPT :].split())
    return folded if len(folded) <= EXCERPT else f"…{folded[-EXCERPT + 1 :]}"


def show_around(text: str, mark: str) -> str:
    """The mark and what stands around it, a third of the excerpt before it."""
    place = text.find(mark)
    start = max(0, place - EXCERPT // 3)
    shown = " ".join(text[start : start + 4 * EXCERPT].split())
    shown = f"…{shown}" if start else shown
    return shown if len(shown) <= EXCERPT else f"{shown[: EXCERPT - 1]}…"
