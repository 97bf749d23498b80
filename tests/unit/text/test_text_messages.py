"""No secret of the environment is repeated, wherever it stands in what a library said."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.redact import LONGEST, redact_variables

SECRET = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=40)
WORDS = st.text(st.sampled_from("ab \n"), max_size=LONGEST)


@given(secret=SECRET, before=WORDS, after=WORDS)
def test_a_password_is_left_out_as_it_is_and_as_an_address_writes_it(secret, before, after):
    address = f"http://joe:{quote(secret, safe='')}@host:5000/path"
    for output in (secret, quote(secret, safe=""), address):
        reported = redact_variables(
            f"{before} {output} {after}", environment={"WHERE": address}, variables=("WHERE", "OTHER")
        )
        assert secret not in reported
        assert quote(secret, safe="") not in reported


@given(secret=SECRET, before=WORDS)
def test_a_token_is_left_out_from_its_own_variable_and_from_a_query(secret, before):
    environment = {"TOKEN": secret, "WHERE": f"http://host/?write_token={quote(secret, safe='')}"}
    for name in environment:
        output = f"{before} refused {secret}"
        assert secret not in redact_variables(output, environment=environment, variables=(name,))


def test_logins_and_queries_of_unknown_addresses_are_left_out_too():
    output = "no route to https://joe:word@host/a?token=abc,\n then to s3://bucket/key"
    reported = redact_variables(output, environment={}, variables=())
    assert reported == "no route to https://…@host/a?… then to s3://bucket/key"


def test_a_long_message_is_cut_after_its_secrets_are_gone():
    output = "x" * (LONGEST - 3) + "the-secret"
    reported = redact_variables(output, environment={"TOKEN": "the-secret"}, variables=("TOKEN",))
    assert reported == "x" * (LONGEST - 3) + "…"


def test_an_invalid_address_is_hidden_as_a_whole():
    reported = redact_variables(
        "cannot read http://[joe:word", environment={"W": "http://[joe:word"}, variables=("W",)
    )
    assert reported == "cannot read …"


@pytest.mark.parametrize("written", ['p@ss/"word', "p%40ss%2F%22word", 'p@ss/\\"word'])
def test_a_secret_is_hidden_however_it_was_written(written):
    assert "word" not in redact_variables(
        f"refused: {written}", environment={"KEY": 'p@ss/"word'}, variables=["KEY"]
    )
