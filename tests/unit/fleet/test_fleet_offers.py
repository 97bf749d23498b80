"""Offers of places: one that cannot be quoted does not hide the others; each is planned for its machine."""

from types import SimpleNamespace

from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import RunQuote
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.hardware import Offer

HERE = SimpleNamespace(minutes=SimpleNamespace(high=60.0))


class Planner:
    """Plans that only carry the name of their card."""

    here = HERE

    def __init__(self, *_words):
        pass

    def plan(self, offer):
        if offer.gpu == "GTX 1050":
            raise NegativeResult("it does not fit into 4 GiB")
        return offer.gpu

    def knows(self, offer):
        return offer.gpu != "Card X"


def offers(*cards):
    return tuple(
        Offer(place="runpod", gpu=card, usd_per_hour=1.0, source="a list", dated="x") for card in cards
    )


def list_with(monkeypatch, *cards):
    def quote(_work, plan, request, offer):
        if offer.gpu == "H200":
            raise UserError("$5.00 is not enough")
        assert plan == offer.gpu
        return RunQuote(place=request.place, gpu=request.gpu, planned_hours=1.0, seconds=60.0)

    monkeypatch.setattr(fleet_jobs, "run_pipeline", lambda *_words, **_options: None)
    monkeypatch.setattr(fleet_jobs, "PlacePlanner", Planner)
    place = SimpleNamespace(offer=lambda: offers(*cards))
    monkeypatch.setattr(fleet_jobs, "open_place", lambda *_words: place)
    monkeypatch.setattr(fleet_jobs, "quote_run", quote)
    return fleet_jobs.list_offers(None, only="runpod")


def test_a_card_that_is_too_expensive_or_too_small_does_not_hide_the_other_cards_of_its_place(monkeypatch):
    found = list_with(monkeypatch, "H200", "RTX 4090", "GTX 1050")
    assert [offered.gpu for offered in found.quotes] == ["RTX 4090"]
    assert found.notes == (
        "runpod, GTX 1050: it does not fit into 4 GiB",
        "runpod, H200: $5.00 is not enough",
    )


def test_a_card_that_the_catalog_does_not_know_is_quoted_with_a_note(monkeypatch):
    found = list_with(monkeypatch, "Card X")
    assert len(found.quotes) == 1
    assert found.notes == ("runpod, Card X: not in the catalog of GPUs, planned for this machine",)
