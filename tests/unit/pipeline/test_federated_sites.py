"""Places of a federation that stop answering while they train."""

from types import SimpleNamespace

import pytest

from graftwork.records.fleet import Reconciled
from graftwork.train.many import federated as sites

RUN = SimpleNamespace(work=None, run_id="run", site=SimpleNamespace(place="ssh:far"))


@pytest.fixture
def poll(monkeypatch):
    """The answer of a poll at a time, with the place up or down."""
    place = sites.FleetSites(SimpleNamespace())
    place._jobs["run"] = "job"
    monkeypatch.setattr(sites, "get_job", lambda *_asked: SimpleNamespace(is_open=True))

    def ask(now, *, down):
        found = Reconciled(unreachable=("ssh:far",) if down else ())
        controller = SimpleNamespace(reconcile=lambda **_asked: found)
        monkeypatch.setattr(sites, "collecting", lambda *_asked: controller)
        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
        monkeypatch.setattr(sites, "time", clock)
        return place.poll(RUN)

    return ask


def test_a_place_that_does_not_answer_for_long_fails_and_may_be_tried_again(poll):
    assert poll(0, down=True) is None
    assert poll(899, down=True) is None
    assert poll(900, down=True) == "ssh:far has not answered for 15 minutes"
    assert poll(901, down=True) is None


def test_a_place_that_answers_in_between_goes_on(poll):
    assert poll(0, down=True) is None
    assert poll(600, down=False) is None
    assert poll(1000, down=True) is None
    assert poll(1899, down=True) is None
