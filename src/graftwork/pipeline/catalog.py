"""The whole catalog as one document: what it knows, who says so, and how old that is.

In: which part, the team's own folder and today's date. Out: plain values for a door to print. Does not
know how they are shown.
"""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.api_prices import list_token_prices
from graftwork.plan.catalog.hardware import list_cpus, list_gpus
from graftwork.plan.catalog.models import CatalogModel, list_models
from graftwork.plan.catalog.prices import age_days, is_stale, list_offers, list_places, list_quoted_offers
from graftwork.records.base import Figure, Record
from graftwork.records.errors import UserMistake

KINDS = ("models", "gpus", "cpus", "prices", "quoted", "places", "api_prices")


def list_catalog(kind: str | None, *, overlay: Path | None, today: date) -> dict[str, Any]:
    """The rows of one kind, or of all, each with its age in days; prices with whether that is too old."""
    if kind is not None and kind not in KINDS:
        raise UserMistake(
            f"the catalog has no part {kind!r}",
            why="it was asked for by that name",
            fix=f"name one of {', '.join(KINDS)}",
            where=kind,
        )
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "models": lambda: [_aged(model, today) | _counted(model) for model in list_models(overlay=overlay)],
        "gpus": lambda: [_aged(gpu, today) for gpu in list_gpus(overlay=overlay)],
        "cpus": lambda: [_aged(cpu, today) for cpu in list_cpus(overlay=overlay)],
        "prices": lambda: [_priced(offer, today) for offer in list_offers(overlay=overlay)],
        "quoted": lambda: [_priced(offer, today) for offer in list_quoted_offers(overlay=overlay)],
        "places": lambda: [_priced(place, today) for place in list_places(overlay=overlay)],
        "api_prices": lambda: [_priced(price, today) for price in list_token_prices(overlay=overlay)],
    }
    return {name: make() for name, make in parts.items() if kind in {None, name}}


def _aged(row: Record, today: date) -> dict[str, Any]:
    body = row.model_dump(mode="json")
    return {**body, "age_days": age_days(body["dated"], today=today)}


def _priced(row: Record, today: date) -> dict[str, Any]:
    body = _aged(row, today)
    return {**body, "stale": is_stale(body["dated"], today=today)}


def _counted(model: CatalogModel) -> dict[str, Any]:
    return {"parameters": Figure.exact(total_parameters(model.shape)).model_dump(mode="json")}
