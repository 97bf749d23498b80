"""Prices and terms of machines at places, and token prices of model providers.

Input: nothing but the catalog and the team's own rows over it. Output: offers, places, and prices by the name
that a log has for a model, dated. Does not fetch prices; says how old they are. Prices that others quoted are
kept apart from those that plans use.
"""

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from graftwork.plan.catalog import (
    SOURCE,
    ColumnParsers,
    list_rows,
    names,
    normalize,
    number,
    read_table,
    text,
    whole,
    yes,
)
from graftwork.records.hardware import Offer, PlaceTerms
from graftwork.records.interaction import TokenPrice

COLUMNS = ColumnParsers(
    needed={
        "model": text,
        "provider": text,
        "usd_per_million_input": number,
        "usd_per_million_output": number,
        **SOURCE,
    },
    optional={"aliases": names, "usd_per_million_cached": number},
    key=("model",),
)
_ROUTE = re.compile(
    r"^(?:[a-z0-9_-]+[/])+|^(?:[a-z]{2,4}\.)?(?:anthropic|openai|google|meta|mistral)\.", re.I
)
"""Prefixes by which routers and clouds name the provider: `openrouter/openai/`, `us.anthropic.`."""
_VERSION = re.compile(r"(?:-v\d+(?::\d+)?|[@-]?(?:20\d{6}|20\d{2}-\d{2}-\d{2})|-latest|-preview|:\w+)$")
"""Suffixes of a dated snapshot of a model: `-2024-07-18`, `-20241022-v2:0`, `-latest`."""


def list_token_prices(*, overlay: Path | None = None) -> tuple[TokenPrice, ...]:
    return list_rows("api_prices", TokenPrice.model_validate, COLUMNS, overlay=overlay)


def index_prices(prices: tuple[TokenPrice, ...]) -> Mapping[str, TokenPrice]:
    """Index by every normalized name of a price."""
    by_name: dict[str, TokenPrice] = {}
    for price in prices:
        for name in (price.model, *price.aliases):
            by_name.setdefault(normalize(name), price)
    return by_name


def find_token_price(model: str, by_name: Mapping[str, TokenPrice]) -> TokenPrice | None:
    """The price of a model as a log names it: with its provider, its date, or neither. None if unknown."""
    name = _ROUTE.sub("", model.strip())
    while True:
        if (price := by_name.get(normalize(name))) is not None:
            return price
        shorter = _VERSION.sub("", name)
        if shorter == name or not shorter:
            return None
        name = shorter


OFFER_COLUMNS = ColumnParsers(
    needed={"place": text, "gpu": text, "gpus": whole, **SOURCE},
    optional={
        "usd_per_hour": number,
        "spot_usd_per_hour": number,
        "usd_per_month": number,
        "hours_per_month": number,
        "instance": text,
        "region": text,
        "vcpus": number,
        "memory_gib": number,
        "reserved_usd_per_hour": number,
        "reserved_term": text,
    },
    key=("place", "gpu", "gpus"),
)
PLACE_COLUMNS = ColumnParsers(
    needed={"name": text, "title": text, "kind": text, **SOURCE},
    optional={
        "session_hours": number,
        "free_hours_per_week": number,
        "free_hours_per_day": number,
        "spot": yes,
        "preemptions_per_hour": number,
        "storage_usd_gib_month": number,
        "egress_usd_gib": number,
        "setup_minutes": number,
        "smallest_billed_minutes": number,
        "driven_by": text,
        "notes": text,
        "disk_gib": number,
    },
    key=("name",),
)
HOURS_PER_MONTH = 730.0
STALE_AFTER_DAYS = 60
"""Two months, an assumption: what is older must be looked up before money is spent on it."""


def list_offers(*, overlay: Path | None = None) -> tuple[Offer, ...]:
    """The prices that plans use."""
    return _offers("prices", overlay)


def as_commitment(offer: Offer) -> Offer | None:
    """Convert the reserved price of an offer: all hours of a month, paid whether used or not."""
    if not offer.reserved_usd_per_hour:
        return None
    term = f"reserved for {offer.reserved_term}" if offer.reserved_term else "reserved"
    return offer.model_copy(
        update={
            "usd_per_hour": None,
            "spot_usd_per_hour": None,
            "usd_per_month": offer.reserved_usd_per_hour * HOURS_PER_MONTH,
            "hours_per_month": HOURS_PER_MONTH,
            "instance": f"{offer.instance} {term}".strip(),
        }
    )


def list_quoted_offers(*, overlay: Path | None = None) -> tuple[Offer, ...]:
    """Prices that a team's own comparison quoted: shown next to ours, never used."""
    return _offers("quoted_prices", overlay)


def list_places(*, overlay: Path | None = None) -> tuple[PlaceTerms, ...]:
    return list_rows("places", PlaceTerms.model_validate, PLACE_COLUMNS, overlay=overlay)


def age_days(dated: str, *, today: date) -> int:
    """Days since a row was true; never negative."""
    return max((today - date.fromisoformat(dated)).days, 0)


def is_stale(dated: str, *, today: date) -> bool:
    return age_days(dated, today=today) > STALE_AFTER_DAYS


def real_spot(usual: float | None, spot: float | None) -> float | None:
    """A spot price below the usual one. Lists repeat the usual price, or say 0, if there is no spot."""
    if not spot or (usual is not None and spot >= usual):
        return None
    return spot


def _offers(table: str, overlay: Path | None) -> tuple[Offer, ...]:
    offers = []
    for row in read_table(table, OFFER_COLUMNS, overlay=overlay):
        offer = row.build(Offer.model_validate, OFFER_COLUMNS)
        spot = real_spot(offer.usd_per_hour, offer.spot_usd_per_hour)
        if offer.usd_per_hour is None and spot is None and offer.usd_per_month is None:
            raise row.mistake("usd_per_hour", rule="or `spot_usd_per_hour` or `usd_per_month` must be given")
        offers.append(offer.model_copy(update={"spot_usd_per_hour": spot}))
    return tuple(offers)
