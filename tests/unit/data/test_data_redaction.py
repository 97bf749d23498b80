import json

import pytest
from data_rows import make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.audit.row_checks import redact_row
from graftwork.records.interaction import Interaction, Message, Origin

# One value a kind: the text that it stands in, and what must be gone afterwards. None is real.
PLANTED = {
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow{0}\n-----END RSA PRIVATE KEY-----",
    "jwt": "eyJhbGciOi{0}.eyJzdWIiOi{0}.c2lnbmVk{0}",
    "openai_key": "sk-proj-a1B2c3D4e5F6g7{0}",
    "aws_access_key": "AKIAQ1W2E3R4T5{0}",
    "aws_secret_key": "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAM{0}",
    "github_token": "ghp_aB3dE5fG7hJ9kL1mN3pQ5rS7tU9v{0}",
    "gitlab_token": "glpat-aB3dE5fG7hJ9kL1mN3p{0}",
    "slack_token": "xoxb-1a2b3c4d5e6f{0}",
    "google_key": "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O{0}",
    "stripe_key": "sk_live_a1B2c3D4e5F6{0}",
    "huggingface_token": "hf_aB3dE5fG7hJ9kL1mN3pQ5rS7tU9v{0}",
    "bearer_token": "Authorization: Bearer abcDEF1234567{0}",
    "url_password": "postgres://app:s3cret{0}@db.internal/x",
    "password": "password = hunter2!{0}",
    "anthropic_key": "sk-ant-api03-a1B2c3D4e5F6g7{0}",
    "npm_token": "npm_aB3dE5fG7hJ9kL1mN3pQ5rS7tU9v12{0}",
    "pypi_token": "pypi-AgEIcHlwaS5vcmcaB3dE5fG7hJ9kL1mN3pQ5rS7tU9v{0}",
    "sendgrid_key": "SG.aB3dE5fG7hJ9kL1mN3pQ5r.S7tU9vW1xY3zA5x7ZqB3dE5fG7hJ9kL1mN3pQ{0}",
    "twilio_key": "SK0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "telegram_token": "123456789:AAHx1Y2z3Q4w5E6r7T8y9U0i1O2p3{0}",
    "discord_token": "MTIzNDU2Nzg5MDEyMzQ1Njc4.aB3dE5.fG7hJ9kL1mN3pQ5rS7tU9{0}",
    "slack_webhook": "https://hooks.slack.com/services/T01ABCDE/B03HJKLM/aB3dE5fG7hJ9kL1mN3{0}",
    "azure_key": "AccountKey=aB3dE5fG7hJ9kL1mN3pQ5rS7+U9vW1xY3zA5x7Zq/B3dE5fG7hJ9{0}==",
    "basic_auth": "Authorization: Basic YWRtaW46aHVudGVyMiF4{0}",
    "curl_password": "curl -u admin:hunter2{0}",
    "cookie": "Cookie: sessionid=k3j4h5g6f7d8{0}",
    "social_security_number": "123-45-6789",
    "email": "anna.{0}@firma.example",
    "iban": "DE89 3704 0044 0532 0130 00",
    "credit_card": "4111 1111 1111 1111",
    "phone": "+49 170 1234567",
    "ip_address": "203.0.113.77",
}
LENGTHS = {"google_key": 4}
# What stands before the secret, where that is not all of the text.
BEFORE = {
    "slack_webhook": "services/",
    "azure_key": "AccountKey=",
    "curl_password": "admin:",
    "cookie": "id=",
}
BARE = ("aws_secret_key", "basic_auth", "bearer_token", "password", "url_password")
PLACES = (
    *("turn", "system", "reply", "rejected", "tool_arguments", "escaped_twice"),
    *("session", "id", "group", "domain", "model", "status", "split", "finish_reason", "extra", "extra_key"),
)


def plant(kind, mark):
    """The text to plant and the part of it that is secret."""
    text = PLANTED[kind].format(mark[: LENGTHS.get(kind, 6)])
    if kind in BEFORE:
        return text, text.partition(BEFORE[kind])[2]
    secret = text.rsplit("@", 1)[0].split(":")[-1] if kind == "url_password" else text.split(" ")[-1]
    return text, secret if kind in BARE else text


def escape(text):
    return json.dumps(text)[1:-1]


def put(text, places):
    """A row with the text in each of the places."""

    def at(place, otherwise=None):
        return f"see {text} there" if place in places else otherwise

    call = json.dumps({"name": "run", "arguments": json.dumps({"line": text})})
    tool = f"<tool_call>\n{call}\n</tool_call>" if "tool_arguments" in places else "a fine answer"
    twice = escape(escape(escape(text))) if "escaped_twice" in places else "yes"
    return Interaction(
        id=at("id", "row-1"),
        origin=Origin(file="log.jsonl", line=1),
        messages=(
            Message(role="system", content=at("system", "Be brief.")),
            Message(role="user", content=at("turn", "What now?")),
            Message(role="assistant", content=tool),
            Message(role="tool", content=twice),
        ),
        reply=at("reply", "This."),
        extra={
            **({"notes": [{"deep": at("extra")}]} if "extra" in places else {}),
            **({at("extra_key"): 1} if "extra_key" in places else {}),
        },
        **{
            name: at(name)
            for name in (
                "rejected",
                "session",
                "group",
                "domain",
                "model",
                "status",
                "split",
                "finish_reason",
            )
        },
    )


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_value_of_any_kind_is_found_in_any_place(kind):
    text, secret = plant(kind, "x1Y2z3Q4" if kind != "aws_access_key" else "X1Y2Z3Q4")
    for place in PLACES:
        redacted = redact_row(put(text, {place}))
        shown = redacted.row.model_dump_json()
        assert escape(secret) not in shown, place
        assert escape(escape(secret)) not in shown, place
        assert redacted.counts == {kind: 1}, place


# No repetitions: a value of few different signs is rather a word than a secret.
MARK = st.permutations("ABCDEFGHJKLMNPQRSTUVWXYZ23456789").map(lambda signs: "".join(signs[:8]))


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(PLANTED)), min_size=1, max_size=4, unique=True),
    mark=MARK,
    places=st.sets(st.sampled_from(PLACES), min_size=1),
)
def test_no_secret_is_left_and_redacting_again_changes_nothing(kinds, mark, places):
    planted = [plant(kind, mark) for kind in kinds]
    redacted = redact_row(put(" and ".join(text for text, _ in planted), places))
    shown = redacted.row.model_dump_json()
    for _, secret in planted:
        assert escape(secret) not in shown
    assert set(redacted.counts) == set(kinds)
    again = redact_row(redacted.row)
    assert again.row == redacted.row
    assert again.counts == {}


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80), st.none() | st.text(max_size=30))
def test_redacting_any_row_twice_changes_nothing_more(question, reply, session):
    once = redact_row(make_row(question, reply, session=session, extra={"seen": [question]})).row
    assert redact_row(once).row == once


def test_a_row_without_findings_is_returned_as_it_is():
    row = make_row("Which token is meant?", "The key in `settings.key`, see task-9.", session="s1")
    redacted = redact_row(row)
    assert redacted.row is row
    assert redacted.counts == {}


def test_numbers_restart_in_every_row_and_agree_inside_it():
    row = make_row("a@x.example or b@x.example?", "b@x.example", rejected="a@x.example", domain="c@x.example")
    for _ in range(2):
        redacted = redact_row(row)
        assert redacted.row.question == "<REDACTED:email:1> or <REDACTED:email:2>?"
        assert redacted.row.reply == "<REDACTED:email:2>"
        assert redacted.row.rejected == "<REDACTED:email:1>"
        assert redacted.row.domain == "<REDACTED:email:3>"
        assert redacted.counts == {"email": 5}


def test_a_row_comes_out_the_same_whatever_was_redacted_before_it():
    rows = [make_row(f"write to p{n}@x.example", f"call +49 170 123456{n}") for n in range(4)]
    forward = [redact_row(row) for row in rows]
    backward = [redact_row(row) for row in reversed(rows)][::-1]
    assert forward == backward
    assert len({redacted.row.question for redacted in forward}) == 1


def test_placeholders_that_are_in_the_log_stay_and_are_numbered_past():
    row = make_row("new@x.example", "as <REDACTED:email:7> said", extra={"by": "<REDACTED:phone:2>"})
    redacted = redact_row(row)
    assert redacted.row.question == "<REDACTED:email:8>"
    assert redacted.row.reply == "as <REDACTED:email:7> said"
    assert redacted.row.extra == {"by": "<REDACTED:phone:2>"}
    assert redacted.counts == {"email": 1}


def test_sessions_named_after_people_stay_apart_and_together():
    rows = [make_row("Hi", session=name) for name in ("anna@x.example", "ben@x.example", "anna@x.example")]
    anna, ben, again = (redact_row(row).row.session for row in rows)
    assert anna == again != ben
    assert "anna" not in anna
    assert anna.startswith("session-")


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_password_in_tool_arguments_is_found_however_often_it_is_escaped(depth):
    arguments = json.dumps({"user": "ops", "password": "hunter2!x"})
    for _ in range(depth):
        arguments = json.dumps(arguments)
    reply = f'<tool_call>\n{{"name": "login", "arguments": {arguments}}}\n</tool_call>'
    redacted = redact_row(make_row("Log in.", reply))
    assert redacted.row.reply == reply.replace("hunter2!x", "<REDACTED:password:1>")


def test_a_value_is_a_password_by_the_name_of_its_field():
    row = make_row("Hi", extra={"config": {"db_password": "hunter2!x", "api_keys": ["k9!Qw3rtY"], "n": 3}})
    redacted = redact_row(row)
    assert redacted.row.extra == {
        "config": {"db_password": "<REDACTED:password:1>", "api_keys": ["<REDACTED:password:2>"], "n": 3}
    }
    assert redacted.counts == {"password": 2}
    assert redact_row(redacted.row).row == redacted.row


def test_deep_nesting_does_no_harm_and_hides_nothing():
    deep = "anna@x.example"
    for _ in range(5000):
        deep = [deep]
    redacted = redact_row(make_row("Hi").model_copy(update={"extra": {"deep": deep}}))
    value = redacted.row.extra["deep"]
    for _ in range(100):
        if value is None:
            break
        (value,) = value
    assert value is None


def test_the_place_in_the_log_is_kept():
    row = make_row("a@x.example", file="logs/x.jsonl", line=7)
    assert redact_row(row).row.origin == row.origin
