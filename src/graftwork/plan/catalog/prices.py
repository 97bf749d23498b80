"""What places ask for machines, and under which rules; what providers ask for tokens of their models.

In: nothing but the catalog and the team's own rows over it. Out: offers, places, and prices by the name that
a log has for a model, dated. Does not fetch prices; says how old they are. Prices that others quoted are
kept apart from those that plans use.
"""

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from graftwork.plan.catalog.table import CatalogRow, ColumnParsers, normalise, read_table
from graftwork.records.hardware import Offer, PlaceTerms
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


OFFER_COLUMNS = ColumnParsers(
    needed=("place", "gpu", "gpus", "source", "dated"),
    optional=(
        "usd_per_hour",
        "spot_usd_per_hour",
        "usd_per_month",
        "hours_a_month",
        "instance",
        "region",
        "vcpus",
        "memory_gib",
        "reserved_usd_per_hour",
        "reserved_term",
    ),
    key=("place", "gpu", "gpus"),
)
PLACE_COLUMNS = ColumnParsers(
    needed=("name", "title", "kind", "source", "dated"),
    optional=(
        "session_hours",
        "free_hours_a_week",
        "free_hours_a_day",
        "spot",
        "preemptions_per_hour",
        "storage_usd_gib_month",
        "egress_usd_gib",
        "setup_minutes",
        "smallest_billed_minutes",
        "driven_by",
        "notes",
        "disk_gib",
    ),
    key=("name",),
)
HOURS_A_MONTH = 730.0
STALE_AFTER_DAYS = 60
"""Two months, an assumption: what is older must be looked up before money is spent on it."""


def list_offers(*, overlay: Path | None = None) -> tuple[Offer, ...]:
    """The prices that plans use."""
    return _offers("prices", overlay)


def as_commitment(offer: Offer) -> Offer | None:
    """The reserved price of an offer as what it is: all hours of a month, paid whether used or not."""
    if not offer.reserved_usd_per_hour:
        return None
    term = f"reserved for {offer.reserved_term}" if offer.reserved_term else "reserved"
    return offer.model_copy(
        update={
            "usd_per_hour": None,
            "spot_usd_per_hour": None,
            "usd_per_month": offer.reserved_usd_per_hour * HOURS_A_MONTH,
            "hours_a_month": HOURS_A_MONTH,
            "instance": f"{offer.instance} {term}".strip(),
        }
    )


def list_quoted_offers(*, overlay: Path | None = None) -> tuple[Offer, ...]:
    """Prices that a team's own comparison quoted: shown next to ours, never used."""
    return _offers("quoted_prices", overlay)


def list_places(*, overlay: Path | None = None) -> tuple[PlaceTerms, ...]:
    return tuple(row.build(_place) for row in read_table("places", PLACE_COLUMNS, overlay=overlay))


def age_days(dated: str, *, today: date) -> int:
    """Days since a row was true; never negative."""
    return max((today - date.fromisoformat(dated)).days, 0)


def is_stale(dated: str, *, today: date) -> bool:
    return age_days(dated, today=today) > STALE_AFTER_DAYS


def real_spot(usual: float | None, spot: float | None) -> float | None:
    """A spot price below the usual one. Lists repeat the usual price, or say 0, where there is no spot."""
    if not spot or (usual is not None and spot >= usual):
        return None
    return spot


def _offers(table: str, overlay: Path | None) -> tuple[Offer, ...]:
    return tuple(row.build(_offer) for row in read_table(table, OFFER_COLUMNS, overlay=overlay))


def _offer(row: CatalogRow) -> Offer:
    usual, spot = row.number_or_none("usd_per_hour"), row.number_or_none("spot_usd_per_hour")
    offer = Offer(
        place=row.text("place"),
        gpu=row.text("gpu"),
        gpus=row.whole("gpus"),
        usd_per_hour=usual,
        spot_usd_per_hour=real_spot(usual, spot),
        usd_per_month=row.number_or_none("usd_per_month"),
        hours_a_month=row.number_or_none("hours_a_month"),
        instance=row.text("instance"),
        region=row.text("region"),
        vcpus=row.number_or_none("vcpus"),
        memory_gib=row.number_or_none("memory_gib"),
        reserved_usd_per_hour=row.number_or_none("reserved_usd_per_hour"),
        reserved_term=row.text("reserved_term"),
        source=row.text("source"),
        dated=row.text("dated"),
    )
    if offer.usd_per_hour is None and offer.spot_usd_per_hour is None and offer.usd_per_month is None:
        raise row.mistake("usd_per_hour", rule="or `spot_usd_per_hour` or `usd_per_month` must be given")
    return offer


def _place(row: CatalogRow) -> PlaceTerms:
    known = {column: row.number_or_none(column) for column in PLACE_COLUMNS.optional[:3]}
    amounts = ("storage_usd_gib_month", "egress_usd_gib", "setup_minutes", "smallest_billed_minutes")
    given = {column: row.number(column) for column in amounts if row.text(column)}
    texts = {column: row.text(column) for column in ("driven_by", "notes") if row.text(column)}
    return PlaceTerms.model_validate(
        {
            "name": row.text("name"),
            "title": row.text("title"),
            "kind": row.text("kind"),
            "spot": row.yes("spot") if row.text("spot") else False,
            "preemptions_per_hour": row.number_or_none("preemptions_per_hour"),
            "disk_gib": row.number_or_none("disk_gib"),
            "source": row.text("source"),
            "dated": row.text("dated"),
            **known,
            **given,
            **texts,
        }
    )
