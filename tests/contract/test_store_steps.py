from collections.abc import Mapping
from dataclasses import replace

import pytest
from store_samples import WHEN

from graftwork.store.database import Database, open_database
from graftwork.store.runs import StepEntry, StepLedger


@pytest.fixture
def ledger(database: Database) -> StepLedger:
    return StepLedger(database, project="one")


def test_a_step_that_never_ended_is_unknown(ledger: StepLedger):
    assert ledger.get("audit") is None


def test_a_step_record_is_stored_in_full(ledger: StepLedger):
    output = {"rows": 3, "folder": "data/é", "nested": {"list": [1, None, "\u0000"]}}
    ledger.put("prepare", fingerprint="f1", output=output, finished_at=WHEN, seconds=1.25)
    assert ledger.get("prepare") == StepEntry("prepare", "f1", output, WHEN, 1.25)


def test_the_last_time_replaces_the_time_before(ledger: StepLedger):
    ledger.put("train", fingerprint="old", output={}, finished_at=WHEN, seconds=1)
    ledger.put("train", fingerprint="new", output={"a": 1}, finished_at=WHEN, seconds=2)
    entry = ledger.get("train")
    assert entry is not None
    assert entry.fingerprint == "new"


def test_a_forgotten_step_is_unknown_and_the_others_stay(ledger: StepLedger):
    for step in ("audit", "train"):
        ledger.put(step, fingerprint="f", output={}, finished_at=WHEN, seconds=1)
    ledger.forget("train")
    ledger.forget("never done")
    assert ledger.get("train") is None
    assert ledger.get("audit") is not None


def test_projects_in_one_database_do_not_see_each_other(database: Database, ledger: StepLedger):
    ledger.put("train", fingerprint="f", output={}, finished_at=WHEN, seconds=1)
    other = StepLedger(database, project="two")
    assert other.get("train") is None
    other.forget("train")
    assert ledger.get("train") is not None


def test_the_next_process_remembers(database: Database, database_url: str, ledger: StepLedger):
    ledger.put("train", fingerprint="f", output={"a": 1}, finished_at=WHEN, seconds=1)
    again = open_database(database_url)
    assert StepLedger(again, project="one").get("train") == ledger.get("train")
    again.close()


def test_an_entry_is_put_only_if_the_newest_ones_allow_it(database: Database):
    ledger, other = StepLedger(database, project="one"), StepLedger(database, project="two")
    mine = StepEntry("canary/a", "mine", {"n": 1}, WHEN, 0.0)
    seen: list[set[str]] = []

    def allow_alone(entries: Mapping[str, StepEntry]) -> bool:
        seen.append(set(entries))
        return not entries

    other.put("canary/b", fingerprint="x", output={}, finished_at=WHEN, seconds=0.0)
    ledger.put("canar_", fingerprint="x", output={}, finished_at=WHEN, seconds=0.0)
    assert ledger.put_if(mine, allow_alone, among="canary")
    assert not ledger.put_if(replace(mine, step="canary/b"), allow_alone, among="canary")
    assert seen == [set(), {"canary/a"}]
    assert not ledger.put_if(replace(mine, output={"n": 2}), allow_alone)
    assert ledger.put_if(replace(mine, output={"n": 3}), lambda known: known["canary/a"] == mine)
    ledger.forget("canary/a", fingerprint="another")
    assert ledger.get("canary/a") == replace(mine, output={"n": 3})
    ledger.forget("canary/a", fingerprint="mine")
    assert ledger.get("canary/a") is None
