import pytest
from store_samples import WHEN

from graftwork.records.base import Figure
from graftwork.records.plan import Residual
from graftwork.store.database import Database
from graftwork.store.runs import ResidualStore


def speed(actual: float) -> Residual:
    return Residual(name="tokens_per_second", planned=Figure.about(100, down=0.5, up=2), actual=actual)


@pytest.fixture
def residuals(database: Database) -> ResidualStore:
    return ResidualStore(database)


def test_residuals_come_back_newest_run_first(residuals: ResidualStore):
    residuals.add("run-1", device="cpu", base="small", found=[speed(90)], when=WHEN)
    residuals.add("run-2", device="cpu", base="small", found=[speed(120)], when=WHEN)
    assert residuals.recent(device="cpu", base="small") == (speed(120), speed(90))
    assert residuals.recent(device="cpu", base="small", runs=1) == (speed(120),)


def test_another_machine_or_base_is_not_learned_from(residuals: ResidualStore):
    residuals.add("run-1", device="cpu", base="small", found=[speed(90)], when=WHEN)
    assert residuals.recent(device="gpu", base="small") == ()
    assert residuals.recent(device="cpu", base="large") == ()


def test_a_run_that_is_recorded_twice_counts_once(residuals: ResidualStore):
    for actual in (90, 95):
        residuals.add("run-1", device="cpu", base="small", found=[speed(actual)], when=WHEN)
    assert residuals.recent(device="cpu", base="small") == (speed(95),)


def test_past_runs_of_all_machines_are_listed_newest_first(residuals: ResidualStore):
    residuals.add("run-1", device="cpu", base="small", found=[speed(90)], when=WHEN)
    residuals.add("run-2", device="gpu", base="large", found=[speed(120)], when=WHEN)
    past = residuals.past(runs=5)
    assert [(run.run_id, run.device) for run in past] == [("run-2", "gpu"), ("run-1", "cpu")]
    assert past[0].residuals == (speed(120),)
    assert len(residuals.past(runs=1)) == 1
