"""Tables of runs, steps, evaluations, residuals and API keys."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from new_database import on_both_databases
from store_samples import WHEN

from graftwork.records.base import Figure
from graftwork.records.errors import Busy, UserError
from graftwork.records.plan import Residual
from graftwork.serve.keys import ApiKey, digest_secret
from graftwork.store.api_keys import ApiKeyStore
from graftwork.store.database import Database, open_database
from graftwork.store.runs import EvaluationLog, ResidualStore, RunEntry, RunStore, StepEntry, StepLedger

LATER = "2025-03-01T13:00:00Z"


@pytest.fixture
def runs(database: Database) -> RunStore:
    return RunStore(database, project="one")


def test_a_new_run_is_planned(runs: RunStore):
    made = runs.create("run-1", folder="runs/run-1", plan={"steps": 3}, when=WHEN)
    assert made == RunEntry(
        id="run-1",
        state="planned",
        folder="runs/run-1",
        created_at=WHEN,
        updated_at=WHEN,
        plan={"steps": 3},
    )
    assert runs.get("run-1") == made


def test_an_unknown_run_is_none(runs: RunStore):
    assert runs.get("run-1") is None


@on_both_databases
def test_an_id_is_used_once(runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    with pytest.raises(Busy, match="run-1 already exists"):
        runs.create("run-1", folder="b", plan={}, when=WHEN)
    kept = runs.get("run-1")
    assert kept is not None
    assert kept.folder == "a"


@on_both_databases
def test_an_error_goes_with_its_state_and_an_outcome_stays(runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    failed = runs.update("run-1", state="failed", when=LATER, error={"what": "the disk is full"})
    assert (failed.state, failed.error, failed.updated_at) == ("failed", {"what": "the disk is full"}, LATER)
    resumed = runs.update("run-1", state="running", when=LATER)
    assert (resumed.state, resumed.error) == ("running", None)
    runs.update("run-1", state="done", when=LATER, outcome={"steps": 3})
    again = runs.update("run-1", state="done", when=LATER)
    assert again.outcome == {"steps": 3}
    assert runs.get("run-1") == again


def test_a_run_that_nobody_entered_cannot_change(runs: RunStore):
    with pytest.raises(UserError, match="no run"):
        runs.update("run-9", state="done", when=WHEN)


def test_the_newest_run_comes_first_whatever_the_clock_shows(runs: RunStore):
    for name, when in (("a", LATER), ("b", WHEN), ("c", WHEN)):
        runs.create(name, folder=name, plan={}, when=when)
    runs.update("a", state="done", when=LATER)
    assert [run.id for run in runs.list()] == ["c", "b", "a"]
    assert [run.id for run in runs.list(limit=1)] == ["c"]


def test_projects_may_use_the_same_run_id(database: Database, runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    other = RunStore(database, project="two")
    assert other.list() == ()
    other.create("run-1", folder="b", plan={}, when=WHEN)
    other.update("run-1", state="done", when=WHEN)
    mine = runs.get("run-1")
    assert mine is not None
    assert mine.state == "planned"


@pytest.fixture
def ledger(database: Database) -> StepLedger:
    return StepLedger(database, project="one")


def test_a_step_that_never_ended_is_unknown(ledger: StepLedger):
    assert ledger.get("audit") is None


@on_both_databases
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


@on_both_databases
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


def test_each_evaluation_counts_even_by_the_same_subject(database: Database):
    looks = EvaluationLog(database)
    assert looks.count("cases") == 0
    assert [looks.log("cases", subject="adapter", when=WHEN) for _ in range(3)] == [1, 2, 3]
    assert looks.count("cases") == 3


def test_every_test_set_has_its_own_count(database: Database):
    looks = EvaluationLog(database)
    looks.log("one", subject="adapter", when=WHEN)
    assert looks.log("two", subject="adapter", when=WHEN) == 1


@on_both_databases
def test_concurrent_evaluations_are_all_counted(database: Database):
    looks = EvaluationLog(database)
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda n: looks.log("cases", subject=f"s{n}", when=WHEN), range(24)))
    assert sorted(numbers) == list(range(1, 25))


def test_the_same_candidate_again_is_an_evaluation_and_no_further_candidate(database: Database):
    looks = EvaluationLog(database)
    for subject in ("one", "two", "one", "one"):
        looks.log("cases", subject=subject, when=WHEN)
    looks.log("other cases", subject="three", when=WHEN)
    assert (looks.count("cases"), looks.candidates("cases")) == (4, 2)
    assert looks.candidates("never looked at") == 0


def test_a_set_that_grew_or_was_renamed_is_no_fresh_one(database: Database):
    looks = EvaluationLog(database)
    first, grown = [f"q{n}" for n in range(20)], [f"q{n}" for n in range(60)]
    looks.log("set", subject="one", when="2026-01-01", questions=first)
    looks.log("set", subject="two", when="2026-01-02", questions=first)
    assert (looks.position("set", subject="one"), looks.position("set", subject="two")) == (1, 2)
    looks.log("renamed", subject="two", when="2026-01-03", questions=first)
    assert looks.position("renamed", subject="two") == 2
    looks.log("grown", subject="two", when="2026-01-04", questions=grown)
    assert looks.position("grown", subject="two") == 3
    looks.log("fresh", subject="two", when="2026-01-05", questions=[f"n{n}" for n in range(60)])
    assert looks.position("fresh", subject="two") == 1
    assert looks.position("never looked at", subject="two") == 1


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


@on_both_databases
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


@pytest.fixture
def keys(database: Database) -> ApiKeyStore:
    return ApiKeyStore(database, project="one")


def key(name: str, **more: object) -> ApiKey:
    given = {"id": f"id-{name}", "name": name, "digest": digest_secret(name), "created_at": "2026-01-01"}
    return ApiKey.model_validate({**given, **more})


def test_keys_come_back_as_they_went_in(keys: ApiKeyStore):
    full = key(
        "a",
        scopes=("admin",),
        models=("champion", "tagger/champion"),
        budget={"tokens_per_day": 7},
        expires_at="2027-01-01T00:00:00+00:00",
    )
    assert keys.add(full)
    assert keys.add(key("b"))
    assert keys.list() == (full, key("b"))


@on_both_databases
def test_a_name_is_free_again_when_its_key_is_revoked(keys: ApiKeyStore):
    assert keys.add(key("a"))
    again = key("a", id="other", digest=digest_secret("another"))
    assert not keys.add(again)
    assert keys.revoke("id-a", at="2026-02-01")
    assert not keys.revoke("id-a", at="2026-03-01")
    assert not keys.revoke("nobody", at="2026-03-01")
    assert keys.add(again)
    assert [(k.id, k.revoked_at) for k in keys.list()] == [("id-a", "2026-02-01"), ("other", None)]


def test_the_list_is_read_again_only_after_a_change(keys: ApiKeyStore, database: Database):
    other = ApiKeyStore(database, project="one")
    assert keys.list() == ()
    other.add(key("a"))
    first = keys.list()
    assert keys.list() is first
    other.revoke("id-a", at="2026-02-01")
    assert keys.list()[0].revoked_at == "2026-02-01"


def test_projects_do_not_see_each_others_keys(keys: ApiKeyStore, database: Database):
    keys.add(key("a"))
    other = ApiKeyStore(database, project="two")
    assert other.list() == ()
    assert other.add(key("a", digest=digest_secret("else")))
    assert not other.revoke("nobody", at="2026-02-01")


def test_no_secret_is_in_the_database(keys: ApiKeyStore, database: Database):
    keys.add(key("a", digest=digest_secret("sk-graft-very-secret")))
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM api_keys").all()
    assert "very-secret" not in str(rows)
