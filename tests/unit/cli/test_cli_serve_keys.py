"""`graft serve keys`: the secret is shown once, and lists never hold it."""

import json
import stat
from datetime import UTC, datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.records.errors import UserError
from graftwork.serve.keys import digest_secret
from graftwork.serve.project import parse_expiry


@pytest.fixture
def graft(tmp_path):
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p", "data": {"logs": ["x.jsonl"]}}))

    def run(*arguments):
        done = CliRunner().invoke(app, ["serve", "keys", *arguments, "-C", str(tmp_path)])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return run


def test_a_secret_is_shown_once_and_only_its_hash_is_stored(graft, tmp_path):
    made = json.loads(
        graft("create", "ci", "--model", "champion", "--expires", "30d", "--tokens-per-day", "9", "--json")
    )
    secret = made["secret"]
    assert made["scopes"] == ["models", "feedback"]
    assert made["models"] == ["champion"]
    assert made["budget"]["tokens_per_day"] == 9
    listed = graft("list") + graft("list", "--json")
    assert secret not in listed
    assert digest_secret(secret) not in listed
    for file in (tmp_path / ".graft").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_a_secret_can_go_to_a_private_file_instead_of_the_terminal(graft, tmp_path):
    out = graft("create", "ci", "--out", str(tmp_path / "key"))
    secret = (tmp_path / "key").read_text().strip()
    assert secret.startswith("sk-graft-")
    assert secret not in out
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_revoked_key_stays_in_the_list_and_frees_its_name(graft):
    graft("create", "ci", "--scope", "metrics")
    with pytest.raises(UserError, match="already"):
        graft("create", "ci")
    assert json.loads(graft("revoke", "ci", "--json"))["state"] == "revoked"
    graft("create", "ci")
    states = [(key["name"], key["state"]) for key in json.loads(graft("list", "--json"))["keys"]]
    assert states == [("ci", "revoked"), ("ci", "valid")]
    with pytest.raises(UserError, match="no valid key"):
        graft("revoke", "nobody")


@pytest.mark.parametrize(
    "options",
    [("--scope", "everything"), ("--expires", "soon"), ("--expires", "2020-01-01"), ("--expires", "0d")],
)
def test_a_mistake_in_an_option_is_named(graft, options):
    with pytest.raises(UserError) as refused:
        graft("create", "ci", *options)
    assert refused.value.fix


def test_a_name_cannot_forge_labels(graft):
    with pytest.raises(UserError):
        graft("create", 'a"} 1\nx{y="')


NOW = datetime(2026, 11, 1, tzinfo=UTC)


def test_expiry_is_a_span_or_a_time_in_utc():
    assert parse_expiry("12h", now=NOW) == "2026-11-01T12:00:00+00:00"
    assert parse_expiry("2026-12-31", now=NOW) == "2026-12-31T00:00:00+00:00"
    assert parse_expiry("2026-12-31T18:00+02:00", now=NOW) == "2026-12-31T16:00:00+00:00"


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{1,6}[mhdwx]", fullmatch=True))
def test_any_text_is_an_expiry_or_a_clear_mistake(text):
    try:
        found = parse_expiry(text, now=NOW)
    except UserError:
        return
    assert datetime.fromisoformat(found) > NOW
