"""Starting a run elsewhere: mistakes are found before data is prepared and before anything is paid for."""

from types import SimpleNamespace

import pytest

from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import FleetRequest, start_run
from graftwork.fleet.place import Refused
from graftwork.fleet.project import open_place
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.hardware import Offer


@pytest.fixture
def begin(monkeypatch):
    """Start a run at a place; returns what was asked of it."""
    asked = []

    def run(offer, *, mirror=None, gpu=""):
        def ask():
            asked.append("offer")
            return offer()

        place = SimpleNamespace(name="p", offer=ask)
        monkeypatch.setattr(fleet_jobs, "control", lambda *_words: SimpleNamespace(place=place))
        monkeypatch.setattr(fleet_jobs, "run_pipeline", lambda *_words, **_more: asked.append("prepare"))
        run_settings = SimpleNamespace(mirror=mirror)
        settings = SimpleNamespace(
            fleet=SimpleNamespace(mirror=None), train=SimpleNamespace(run=run_settings)
        )
        start_run(SimpleNamespace(settings=settings), FleetRequest("p", gpu=gpu), lambda _quote: True)

    run.asked = asked
    return run


def refuse():
    raise Refused("the key is wrong", fix="set it")


def one_card():
    return (Offer(place="p", gpu="T4", usd_per_hour=0.5, source="a list", dated="2026-11-16"),)


def test_a_wrong_login_is_found_before_the_data_is_prepared(begin):
    with pytest.raises(Refused, match="the key is wrong"):
        begin(refuse)
    assert begin.asked == ["offer"]


def test_a_card_that_is_not_there_is_found_before_the_data_is_prepared(begin):
    with pytest.raises(NegativeResult, match="offers no H9000 now"):
        begin(one_card, gpu="H9000")
    assert begin.asked == ["offer"]


def test_an_address_that_is_no_mirror_is_found_before_the_place_is_asked(begin):
    with pytest.raises(UserError, match="the address of the mirror cannot be used") as caught:
        begin(one_card, mirror="nowhere://bucket")
    assert caught.value.where == "train.run.mirror"
    assert begin.asked == []


def test_an_unknown_place_is_named_with_the_places_that_exist(tmp_path):
    work = SimpleNamespace(
        project=SimpleNamespace(state=tmp_path), settings=SimpleNamespace(fleet=SimpleNamespace())
    )
    with pytest.raises(UserError, match="there is no place 'runpot'") as caught:
        open_place(work, "runpot")
    assert "runpod" in caught.value.why
