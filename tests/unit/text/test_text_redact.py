import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.redact import PERSONAL_KINDS, SECRET_KINDS, Redactor, redact

MIXED = string.ascii_letters + string.digits


def planted(length, alphabet=MIXED):
    """A value that looks random: it holds a letter, a digit and no long repetition."""
    return st.permutations(alphabet).map(lambda signs: ("a1" + "".join(signs) * 2)[:length])


SECRETS = {
    "openai_key": planted(40).map(lambda v: "sk-proj-" + v),
    "aws_access_key": planted(16, string.ascii_uppercase + string.digits).map(lambda v: "AKIA" + v.upper()),
    "github_token": planted(36).map(lambda v: "ghp_" + v),
    "slack_token": planted(30).map(lambda v: "xoxb-" + v),
    "google_key": planted(35).map(lambda v: "AIza" + v),
    "jwt": planted(20).map(lambda v: f"eyJ{v}.eyJ{v}.{v}"),
    "private_key": planted(60).map(
        lambda v: f"-----BEGIN RSA PRIVATE KEY-----\n{v}\n-----END RSA PRIVATE KEY-----"
    ),
}
PROSE = st.text(alphabet=string.ascii_lowercase + " .,\n", max_size=60)


@pytest.mark.parametrize("kind", SECRETS)
@given(data=st.data(), before=PROSE, after=PROSE)
def test_no_planted_secret_is_left(kind, data, before, after):
    secret = data.draw(SECRETS[kind])
    redacted = redact(f"{before} {secret} {after}")
    assert secret not in redacted.text
    assert redacted.counts[kind] == 1
    assert f"<REDACTED:{kind}:1>" in redacted.text


@pytest.mark.parametrize(
    ("kind", "text", "secret"),
    [
        ("aws_secret_key", "aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("password", "password={}", "hunter2!xyz"),
        ("password", '{{"api_key": "{}"}}', "a8f7G6h5J4"),
        ("password", 'inside JSON: "db_password\\": \\"{}\\""', "Tr0ub4dor3x"),
        ("bearer_token", "Authorization: Bearer {}", "abcDEF1234567890xyz"),
        ("url_password", "postgres://app:{}@db.internal/x", "s3cret"),
        ("email", "write to {} soon", "anna.b+x@firma.example"),
        ("phone", "call {} now", "+49 170 1234567"),
        ("phone", "call {} now", "(212) 555-0147"),
        ("iban", "to {}, thanks", "DE89 3704 0044 0532 0130 00"),
        ("credit_card", "card {}.", "4111 1111 1111 1111"),
    ],
)
def test_each_kind_is_found_by_name(kind, text, secret):
    redacted = redact(text.format(secret))
    assert redacted.counts == {kind: 1}
    assert redacted.text == text.format(f"<REDACTED:{kind}:1>")


@pytest.mark.parametrize(
    "text",
    [
        "token = tokenizer.encode(text)",
        "max_tokens: 500, password: str",
        'secret_key = os.environ["KEY"]',
        "the secret is simple: patience",
        "on 2025-10-01 at 12:30:15 from 192.168.100.200",
        "order 1696118400000 and ISBN 9783161484100",
        "git clone git@github.com:team/repo.git",
        "scikit-learn and sk-learn-contrib-projects-here",
        "password: ${DB_PASSWORD} token=$TOKEN",
        "commit 3f2a9c1d4e5b6a7f8091a2b3c4d5e6f708192a3b",
    ],
)
def test_code_and_prose_stay_as_they_are(text):
    assert redact(text).text == text


def test_a_value_keeps_its_number_within_one_redactor():
    redactor = Redactor()
    first = redactor.redact("a@x.example, b@x.example").text
    assert first == "<REDACTED:email:1>, <REDACTED:email:2>"
    assert redactor.redact("b@x.example").text == "<REDACTED:email:2>"


def test_the_redactor_keeps_no_value():
    redactor = Redactor()
    redactor.redact("write to somebody@firm.example")
    assert "somebody" not in repr(vars(redactor))


@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing_more(text):
    once = redact(text).text
    assert redact(once).text == once


def test_kinds_are_either_secret_or_personal():
    assert not SECRET_KINDS & PERSONAL_KINDS
    assert {"email", "phone", "iban", "credit_card"} == set(PERSONAL_KINDS)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "part", ["secret_-", "a@", "1 ", "key", "aws key ", "http://a:", "DE89 AAAA ", "-----BEGIN "]
)
def test_hostile_text_takes_no_long_time(part):
    redact(part * (100_000 // len(part)))
