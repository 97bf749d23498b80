"""Cards as people name them in an option: `2x RTX 5060 Ti 16GB=700`.

In: text. Out: how many, which, for how much. Does not know which cards there are.
"""

import re
from typing import NamedTuple

from graftwork.records.errors import UserMistake

_COUNTED = re.compile(r"^\s*(?P<count>\d+)\s*[xX×]\s*(?P<name>.*\D.*)$")


class PurchaseOption(NamedTuple):
    """A machine that would stand there, and what is paid for it."""

    name: str
    cards: int
    usd: float | None


def read_purchase_option(text: str, *, option: str) -> PurchaseOption:
    """The machine with all its cards, and the price of what must be bought for it."""
    cards, sign, price = text.partition("=")
    counted = _COUNTED.match(cards)
    name = (counted["name"] if counted else cards).strip()
    count = int(counted["count"]) if counted else 1
    if not name or count < 1:
        raise _mistake(text, option)
    if not sign:
        return PurchaseOption(name, count, None)
    try:
        usd = float(price.strip().lstrip("$").replace(",", ""))
    except ValueError:
        usd = -1.0
    if not 0 <= usd < float("inf"):
        raise _mistake(text, option)
    return PurchaseOption(name, count, usd)


def _mistake(text: str, option: str) -> UserMistake:
    return UserMistake(
        f"{option} {text!r} does not name a card",
        why="its memory, speed and price are needed",
        fix=f'write it as {option} "2x RTX 5060 Ti 16GB=700" (how many in all, which, dollars to pay)',
        where=option,
    )
