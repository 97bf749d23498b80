"""The store of API keys, on both databases."""

import pytest

from graftwork.serve.keys import ApiKey, digest_secret
from graftwork.store.api_keys import ApiKeyStore
from graftwork.store.database import Database


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
