"""What providers ask for the tokens of their models.

In: the catalog and the team's own rows over it. Out: prices by the name that a log has for a model, dated.
Does not fetch prices; says how old they are.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from graftwork.plan.catalog.table import CatalogRow, ColumnParsers, normalise, read_table
from graftwork.records.interaction import TokenPrice

COLUMNS = ColumnParsers(
    needed=("model", "provider", "usd_per_million_input", "usd_per_million_output", "source", "dated"),
    optional=("aliases", "usd_per_million_cached"),
    key=("model",),
)
_ROUTE = re.compile(
    r"^(?:[a-z0-9_-]+[/])+|^(?:[a-z]{2,4}\.)?(?:anthropic|openai|google|meta|mistral)\.", re.I
)
"""How routers and clouds name the provider: `openrouter/openai/`, `us.anthropic.`."""
_VERSION = re.compile(r"(?:-v\d+(?::\d+)?|[@-]?(?:20\d{6}|20\d{2}-\d{2}-\d{2})|-latest|-preview|:\w+)$")
"""How a dated snapshot of a model ends: `-2024-07-18`, `-20241022-v2:0`, `-latest`."""


def list_token_prices(*, overlay: Path | None = None) -> tuple[TokenPrice, ...]:
    return tuple(row.build(_price) for row in read_table("api_prices", COLUMNS, overlay=overlay))


def index_prices(prices: tuple[TokenPrice, ...]) -> Mapping[str, TokenPrice]:
    """By every normalized name that a price has."""
    found: dict[str, TokenPrice] = {}
    for price in prices:
        for name in (price.model, *price.aliases):
            found.setdefault(normalise(name), price)
    return found


def find_token_price(model: str, known: Mapping[str, TokenPrice]) -> TokenPrice | None:
    """The price of a model as a log names it: with its provider, its date, or neither. None if unknown."""
    name = _ROUTE.sub("", model.strip())
    while True:
        if (found := known.get(normalise(name))) is not None:
            return found
        shorter = _VERSION.sub("", name)
        if shorter == name or not shorter:
            return None
        name = shorter


def _price(row: CatalogRow) -> TokenPrice:
    return TokenPrice(
        model=row.text("model"),
        provider=row.text("provider"),
        usd_per_million_input=row.number("usd_per_million_input"),
        usd_per_million_output=row.number("usd_per_million_output"),
        usd_per_million_cached=row.number_or_none("usd_per_million_cached"),
        aliases=row.names("aliases"),
        source=row.text("source"),
        dated=row.text("dated"),
    )
