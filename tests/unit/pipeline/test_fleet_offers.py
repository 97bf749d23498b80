"""Offers of places: one that cannot be quoted does not hide the others."""

from types import SimpleNamespace

from graftwork.pipeline import fleet_reports
from graftwork.pipeline.fleet_jobs import RunQuote
from graftwork.records.errors import UserMistake

PLAN = SimpleNamespace(minutes=SimpleNamespace(high=60.0))


def test_a_card_that_is_too_expensive_does_not_hide_the_other_cards_of_its_place(monkeypatch):
    offers = tuple(SimpleNamespace(gpu=card) for card in ("H200", "RTX 4090"))

    def quote(_work, _plan, request, _place):
        if request.gpu == "H200":
            raise UserMistake("$5.00 is not enough")
        return RunQuote(place=request.place, gpu=request.gpu, planned_hours=1.0, seconds=60.0)

    planned = SimpleNamespace(get=lambda *_names: PLAN)
    monkeypatch.setattr(fleet_reports, "run_pipeline", lambda *_words, **_options: planned)
    monkeypatch.setattr(fleet_reports, "open_place", lambda *_words: SimpleNamespace(offer=lambda: offers))
    monkeypatch.setattr(fleet_reports, "quote_run", quote)
    found = fleet_reports.list_offers(None, only="runpod")
    assert [offered.gpu for offered in found.quotes] == ["RTX 4090"]
    assert found.notes == ("runpod, H200: $5.00 is not enough",)
