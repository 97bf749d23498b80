import string
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graftwork.text.patterns import PATTERNS, find_likely
from graftwork.text.redact import SECRET_KINDS, CleanTexts, Redactor, hold_private, redact

MIXED = string.ascii_letters + string.digits


def planted(length, alphabet=MIXED):
    """A value that looks random: it contains a letter, a digit and no long repetition."""
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
SECRETS |= {
    "anthropic_key": planted(60).map(lambda v: "sk-ant-api03-" + v),
    "npm_token": planted(36).map(lambda v: "npm_" + v),
    "pypi_token": planted(90).map(lambda v: "pypi-AgEIcHlwaS5vcmc" + v),
    "sendgrid_key": planted(65).map(lambda v: f"SG.{v[:22]}.{v[22:]}"),
    "twilio_key": planted(32, "0123456789abcdef").map(lambda v: "SK" + v),
    "telegram_token": planted(35).map(lambda v: "123456789:" + v),
    "discord_token": planted(60).map(lambda v: f"MT{v[:22]}.{v[22:28]}.{v[28:]}"),
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
        ("password", 'in JSON in JSON: \\\\\\"password\\\\\\": \\\\\\"{}\\\\\\"', "hunter2!x"),
        ("jwt", "header {}.", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmVkaGVy"),
        ("bearer_token", "Authorization: Bearer {}", "abcDEF1234567890xyz"),
        ("url_password", "postgres://app:{}@db.internal/x", "s3cret"),
        ("npm_token", "without a digit: {}", "npm_GeMOSBeGJObqkndxenorubQmNJceKdYsnlxS"),
        ("telegram_token", "without a digit: {}", "900454036:AAUhnqrBSgfAKpbpO_zyPllvGNABXmuMdXo"),
        ("twilio_key", "the account {} pays", "AC0f1e2d3c4b5a69788796a5b4c3d2e1f0"),
        (
            "telegram_token",
            "https://api.telegram.org/bot{}/getMe",
            "1234567890:AAHq-x1Y2z3Q4w5E6r7T8y9U0i1O2p3A4s5",
        ),
        (
            "slack_webhook",
            "curl https://hooks.slack.com/services/{} -d x",
            "T01ABCDEF2G/B03HJKLM4NP/aB3dE5fG7hJ9kL1mN3pQ5rS7",
        ),
        (
            "azure_key",
            "DefaultEndpointsProtocol=https;AccountName=store;AccountKey={};EndpointSuffix=core.windows.net",
            "aB3dE5fG7hJ9kL1mN3pQ5rS7+U9vW1xY3zA5x7Zq/B3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5x7ZqB3dE5fG==",
        ),
        ("basic_auth", "Authorization: Basic {}", "YWxhZGRpbjpvcGVuc2VzYW1l"),
        ("basic_auth", '{{"authorization": "basic {}"}}', "YWRtaW46aHVudGVyMiF4eXo="),
        ("curl_password", "curl -u admin:{} https://x.example", "hunter2"),
        ("curl_password", "curl -X POST \\\n  --user 'admin:{}' \\\n  https://x.example", "s3cr3t:pw"),
        ("cookie", "Cookie: lang=en; sessionid={}; theme=dark", "k3j4h5g6f7d8s9a0q1w2e3r4t5y6u7i8"),
        ("cookie", "Set-Cookie: sid={}; Path=/; HttpOnly", "s%3AaB3dE5fG7hJ9.kL1mN3pQ5rS7"),
        ("cookie", '-H "Cookie:auth_id={}"', "f00dcafe12"),
        ("password", "Das Passwort ist {}", "Sommer2024!x"),
        ("password", "Kennwort: {}", "Sommer2024!x"),
        ("password", "ihr passwort lautet {} bitte", "hunter2xyz"),
        ("signing_key", "untrusted comment: key\n{}\n", f"RWRTY0Iy{'aB3dE5fG' * 25}=="),
        ("signing_key", "a key without a password: {}", f"RWQAAEIy{'aB3dE5fG' * 25}=="),
        ("ip_address", "logged in from {}.", "203.0.113.77"),
        ("ip_address", "http://{}:8080/login", "93.184.216.34"),
        ("ip_address", '{{"client": "{}"}}', "45.6.7.8"),
        ("social_security_number", "SSN {}.", "123-45-6789"),
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
        "local: 127.0.0.1, 10.20.30.40, 172.20.1.99, 169.254.169.254, 255.255.255.0, 8.8.8.8",
        "Chrome/120.0.99.1, version 4.52.1.3, v2.50.1.77, 1.20.300.4000, 999.99.99.99, 12.34.56.78.90",
        "Das Passwort ist vergessen, das Kennwort ist einfach",
        "order 1696118400000 and ISBN 9783161484100",
        "git clone git@github.com:team/repo.git",
        "scikit-learn and sk-learn-contrib-projects-here",
        "password: ${DB_PASSWORD} token=$TOKEN",
        "commit 3f2a9c1d4e5b6a7f8091a2b3c4d5e6f708192a3b",
        "order 123 456 7890, part (123) 456-7890, 212-155-0147",
        "not given out: 000-12-3456, 666-12-3456, 912-34-5678, 123-00-4567, 123-45-0000, 1123-45-6789",
        "docker run -u 1000:1000 image; rsync -u host:path there; curl -u user:password or -u $USER:$PASS",
        "curl x\ndocker run --user www-data:www-data image",
        "Set-Cookie: theme=dark; Path=/; Expires=Wed, 21 Oct 2025 07:28:00 GMT; Domain=shop4u.example",
        "Cookie: the name=value pairs of a header; cookie = jar.get(name)",
        "Authorization: Basic authentication is old; npm_config_registry and pypi-simple-index",
        "at 12345678:some-name-of-words-that-has-35-sign and more",
        "ACTION and SKETCH 1696118400:done at 12345678:30, see MODULE.version.name",
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


def test_placeholders_that_are_there_already_stay_and_are_numbered_past():
    redacted = redact("<REDACTED:email:3> wrote to a@x.example")
    assert redacted.text == "<REDACTED:email:3> wrote to <REDACTED:email:4>"
    assert redacted.counts == {"email": 1}


@given(kind=st.sampled_from(sorted(SECRET_KINDS | {"email", "iban"})), number=st.integers(1, 999_999_999))
def test_a_placeholder_is_never_taken_for_a_value(kind, number):
    text = f'password: <REDACTED:{kind}:{number}> "token": "<REDACTED:{kind}:{number}>"'
    assert redact(text).text == text


@pytest.mark.parametrize(
    "value", ["a@b.example_", "+49 170 1234567", "(212) 555-0147", "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7"]
)
def test_values_that_hang_together_are_all_found(value):
    once = redact(value * 9).text
    assert value.strip("_") not in once
    assert redact(once).text == once


def test_a_field_named_after_a_secret_holds_one():
    assert Redactor().redact_under("DB_PASSWORD", "hunter2!x").text == "<REDACTED:password:1>"
    assert Redactor().redact_under("max_tokens", "unlimited").text == "unlimited"
    assert Redactor().redact_under("headers.Authorization", "Basic a1b2").text == "<REDACTED:password:1>"
    assert Redactor().redact_under("headers.set-cookie", "a=b; Path=/").text == "<REDACTED:password:1>"
    assert Redactor().redact_under("cookie", "<REDACTED:password:1>").text == "<REDACTED:password:1>"
    assert Redactor().redact_under("note", "to a@x.example").text == "to <REDACTED:email:1>"


# Pieces that nearly make a value: what is built of them comes close to every pattern.
PIECES = st.sampled_from(
    [
        *(
            "password",
            "pwd",
            "api-key",
            "token is ",
            "aws_key",
            "Bearer ",
            ": ",
            "=",
            '"',
            '\\\\"',
            " ",
            "\n",
            "_",
            "-",
        ),
        *(
            "hunter2!x",
            "a.b@c.example",
            "@",
            "git@h.example",
            "://u:",
            "pg://u:p4ss@h",
            "eyJhbGciOi1.",
            "sk-",
        ),
        *(
            "curl ",
            "-u a:",
            "--user ",
            "Cookie: ",
            "sid=",
            ";",
            "Authorization: Basic ",
            "AccountKey=",
            "npm_",
        ),
        *(
            "SG.",
            "pypi-AgE",
            "hooks.slack.com/services/T0AB/B0CD/",
            "12345678:",
            "MTIzNDU2Nzg5MDEyMzQ1Njc4.",
            ".",
        ),
        *(
            "aB3dE5.",
            "x1Y2z3Q4w5E6r7T8y9U0i1O2p3A4s5D6f7G",
            "123-45-6789",
            "SK0f1e2d3c4b5a69788796a5b4c3d2e1f0",
        ),
        *("aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5x7Zq", "ghp_", "hf_", "AIza", "AKIAQ1W2E3R4T5Y6U7I8", "xoxb-"),
        *(
            "+49 170 1234567",
            "(212) 555-0147",
            "4111 1111 1111 1111",
            "DE89 3704 0044 0532 0130 00",
            "12",
            "٣٤",
        ),
        *(
            "-----BEGIN PRIVATE KEY-----",
            "-----END PRIVATE KEY-----",
            "<REDACTED:email:1>",
            "ſ",
            "İ",
            "é",
            "\ud800",
        ),
    ]
)
NEARLY = st.lists(PIECES, max_size=10).map("".join)


@settings(max_examples=300, deadline=None)
@given(NEARLY)
def test_no_pattern_is_left_out_that_would_find_something(text):
    likely = find_likely(text)
    assert [pattern.kind for pattern in PATTERNS if pattern not in likely and any(pattern.find(text))] == []


@settings(max_examples=300, deadline=None)
@given(NEARLY)
def test_redacting_what_is_nearly_a_secret_twice_changes_nothing_more(text):
    once = redact(text).text
    assert redact(once).text == once


@settings(max_examples=300, deadline=None)
@given(st.lists(NEARLY, max_size=4))
@example(["password", "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5x7Zq"])
def test_texts_hold_something_exactly_if_redacting_one_changes_it(texts):
    assert hold_private(texts) == any(redact(text).text != text for text in texts)


HOSTILE = [
    *(
        "secret_-",
        "a@",
        "a@a.b",
        "@a-",
        "1 ",
        "key",
        "aws key ",
        "http://a:",
        "DE89 AAAA ",
        "AA00",
        "-----BEGIN ",
    ),
    *(
        "eyJ-",
        "eyJaaaaaaaa.",
        "eyJaaaaaaaa.eyJ",
        "sk-",
        "ghp_",
        "glpat-",
        "xoxb-",
        "hf_",
        "bearer ",
        "password: ",
    ),
    *(
        "password is ",
        "001 ",
        "+1 ",
        "0049 1",
        "(123) ",
        "1-",
        '\\"',
        "İkey",
        "é1 ",
        "-----BEGIN A PRIVATE KEY-----",
    ),
    *("curl -u a:", "curl ", "curl -u a:bcd ", "cookie: ", "cookie: a=b1;", "a=b1c2d3e4;", "cookie: a=<"),
    *("authorization: basic ", "authorization: basic a1b2c3d4", "accountkey=", "npm_", "pypi-AgE", "SG.a"),
    *("12345678:", "12345678:a", "M.", "MTIzNDU2Nzg5MDEyMzQ1Njc4.aB3dE5.", "123-45-6789", "123-45-", "SKAC"),
    *("hooks.slack.com/services/T", "sk-ant-", "12345678:x1Y2z3Q4w5E6r7T8y9U0i1O2p3A4s5D6f7G"),
]


@pytest.mark.parametrize("part", HOSTILE)
def test_time_grows_with_hostile_text_and_not_faster(part):
    short, long = (part * (size // len(part)) for size in (50_000, 400_000))
    # Eight times the text: eight times as long, or sixty-four times if it grew with the square. What
    # lies between is for the neighbours on the machine, as is whatever takes next to no time.
    tries = ((_seconds(short), _seconds(long)) for _ in range(3))
    assert any(seconds < 24 * max(less, 0.004) for less, seconds in tries)


def _seconds(text):
    began = time.thread_time()
    redact(text)
    return time.thread_time() - began


KEY_ID, SECRET_KEY = "AKIAQ1W2E3R4T5Y6U7I8", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzQ8kLw3Rt0"


@pytest.mark.parametrize(
    "text",
    [
        "Secret access key\n{}", "secret key {}", "Secret Access Key (shown once): {}",
        "| Secret access key | {} |", "<secret>{}</secret>", "our token `{}` expires tomorrow",
    ],
)  # fmt: skip
def test_a_generated_value_after_the_name_of_a_secret_is_redacted(text):
    redacted = redact(text.format(SECRET_KEY))
    assert SECRET_KEY not in redacted.text
    assert sum(redacted.counts.values()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "The token AutoModelForSpeechSeq2SeqWithLanguageHead is a class.",
        "access key: see docs/security/rotating-access-keys-2024.md",
        "token 3f786850e387550fdab836ed7e6dc881de23001b",
        "secret santa list of 2024: Anna, Berta, Carla, Dora, Emil and twenty others",
        "the tokenizer HuggingFaceTB/SmolLM2-135M-Instruct",
    ],
)
def test_names_paths_and_hashes_after_the_name_of_a_secret_stay(text):
    assert redact(text).text == text


def test_a_secret_key_is_redacted_when_its_id_is_in_another_text_of_the_conversation():
    redactor = Redactor()
    redactor.number_past(f"the id is {KEY_ID}")
    assert (
        redactor.redact(f"and this is it: {SECRET_KEY}").text == "and this is it: <REDACTED:aws_secret_key:1>"
    )
    assert Redactor().redact(f"and this is it: {SECRET_KEY}").text.endswith(SECRET_KEY)


def test_a_secret_key_is_redacted_far_from_its_id_and_without_digits():
    key = "wJalrXUtnFEMIxKbMDENGhbPxRfiCYzQskLwTRtO"
    assert key not in redact(f"{KEY_ID} {'is used by the nightly job, ' * 20} {key}").text


@given(st.lists(st.lists(NEARLY, max_size=4), max_size=4))
@example([["the key of AKIAQWERTYUIOPASDFGH", "plain text"], ["plain text", "another text"]])
@example([["<REDACTED:email:3> wrote"], ["<REDACTED:email:3> wrote", "to ann.lee@firm-example.org"]])
def test_remembering_clean_texts_changes_no_redaction(conversations):
    clean = CleanTexts(most=3)
    for texts in [*conversations, *conversations]:
        plain, remembering = Redactor(), Redactor(clean)
        assert [plain.redact(text) for text in texts] == [remembering.redact(text) for text in texts]


def test_a_text_that_was_clean_is_searched_again_next_to_the_id_of_an_access_key():
    secret = "wJalrXUtnFEMIaK7MDENGbPxRfiCYzT4kQ9sLp2v"
    clean = CleanTexts()
    assert Redactor(clean).redact(f"take {secret}").text == f"take {secret}"
    redactor = Redactor(clean)
    redactor.redact("the id is AKIAIOSFODNN7QWERTYU")
    assert secret not in redactor.redact(f"take {secret}").text


def test_what_is_remembered_of_clean_texts_is_bounded_and_keeps_what_comes_again():
    clean = CleanTexts(most=6)
    digests = [bytes([number]) * 32 for number in range(20)]
    clean.add(digests[0])
    for digest in digests[1:]:
        clean.add(digest)
        assert clean.has(digests[0])
        assert len(clean) <= 6
    assert not clean.has(digests[1])
