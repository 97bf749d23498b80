"""Detectors for secrets that regular expressions alone find slowly or unreliably.

Input: a text, or a value. Output: spans of secrets from left to right without overlaps, or whether a value is
one (checksums, randomness, digits). Tokens of most services begin with a prefix (`dop_v1_`, `glsa_`) and are
long runs of letters and digits: the runs are found first, by their bytes, and only there are prefixes
compared. To add one, add a line to `_MARKED`, or to `_BEFORE` where the prefix ends before the run. Time
grows linearly with the text.
"""

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class TextSpan(NamedTuple):
    start: int
    end: int


_EXPRESSION = re.compile(r"\$?\{?[A-Za-z_]\w*(?:[.:\-][A-Za-z_]\w*)+\}?|\$\w+|%\w+%")

_WORDS_FOR_PASSWORD = frozenset(
    ("password", "passwd", "pass", "pwd", "secret", "token", "api_key", "apikey", "api-key", "your_password")
)


def always(_value: str) -> bool:
    return True


def entropy(value: str) -> float:
    """Bits per character, by the frequencies in the value itself."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def looks_random(value: str) -> bool:
    """Whether this is a token and not a word: letters and digits mixed, few repetitions."""
    has_letter = any(c.isalpha() for c in value)
    has_digit = any(c.isdigit() for c in value)
    return has_letter and has_digit and entropy(value) >= 3.0


def looks_generated(value: str) -> bool:
    """Whether a generator made this: capitals, small letters and digits that change all the time.

    Names in camel case and paths consist of words, so few of their neighbors differ in class.
    """
    classes = [2 if c.isdigit() else c.isupper() for c in value if c.isalnum()]
    changes = sum(left_class != right_class for left_class, right_class in pairwise(classes))
    is_mixed = {0, 1} <= set(classes) and classes.count(2) >= 2
    return is_mixed and changes >= 0.42 * len(classes) and entropy(value) >= 3.7


def looks_drawn(value: str) -> bool:
    """Few repetitions, and capitals or digits: enough where the form is certain."""
    return entropy(value) >= 3.0 and not value.islower()


def looks_like_login(value: str) -> bool:
    """Whether this follows `Authorization: Basic`: a name and a password in base64."""
    if looks_random(value):
        return True
    plain = value.rstrip("=")
    try:
        return b":" in base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_")
    except binascii.Error:
        return False


def is_no_word_for_password(value: str) -> bool:
    """Whether this is a password, and not the word for it, a variable or stars."""
    return bool(value.strip("*.xX%")) and value.casefold() not in _WORDS_FOR_PASSWORD


def looks_like_password(value: str) -> bool:
    """Whether this is random enough for `password = ...`, and no expression such as `settings.key_v2`."""
    if _EXPRESSION.fullmatch(value) or "://" in value:
        return False
    kinds = sum(
        (
            any(c.islower() for c in value),
            any(c.isupper() for c in value),
            any(c.isdigit() for c in value),
            any(not c.isalnum() for c in value),
        )
    )
    # Snake case and hyphens make identifiers, not passwords.
    has_mark = any(c.isdigit() or c in "!@#$%^&*+/=?~" for c in value)
    return kinds >= 2 and has_mark and any(c.isalpha() for c in value) and entropy(value) >= 2.5


def passes_luhn(value: str) -> bool:
    digits = [int(c) for c in value if c.isdigit()]
    # Card networks begin with 2 to 6; a timestamp in milliseconds begins with 1, an ISBN with 9.
    if not 13 <= len(digits) <= 19 or digits[0] not in (2, 3, 4, 5, 6) or len(set(digits)) < 2:
        return False
    total = 0
    for index, digit in enumerate(reversed(digits)):
        doubled = digit * 2 if index % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def passes_iban(value: str) -> bool:
    compact = value.replace(" ", "").upper()
    if not 15 <= len(compact) <= 34:
        return False
    turned = compact[4:] + compact[:4]
    return int("".join(str(int(c, 36)) for c in turned)) % 97 == 1


def has_phone_digits(value: str) -> bool:
    digits = [c for c in value if c.isdigit()]
    return 8 <= len(digits) <= 15 and len(set(digits)) > 2


def may_identify(address: str) -> bool:
    """Whether an IP address belongs to somebody: no private, local or reserved one, and no version number."""
    parts = [int(part) for part in address.split(".")]
    first, second = parts[:2]
    is_own = first in (0, 10, 127) or (first, second) in ((192, 168), (169, 254))
    is_own = is_own or (first == 172 and 16 <= second < 32)
    # Public resolvers such as 8.8.8.8 look like versions too.
    return not is_own and first < 224 and max(parts) < 256 and max(parts) >= 20


def has_token_parts(value: str) -> bool:
    """Whether a JSON web token has its parts; the first has `eyJ` and at least eight characters more."""
    return value.find(".") >= 11


def is_no_git_address(value: str) -> bool:
    return not value.casefold().startswith("git@")


QUOTE = r"""\\{0,7}["'`]"""
_COOKIES = re.compile(
    rf"""cookies?(?:{QUOTE})?\s{{0,3}}[:=]\s{{0,3}}(?:{QUOTE})?(?P<pairs>[^\r\n"'`\\()]*+)""",
    re.IGNORECASE | re.ASCII,
)
_PAIR = re.compile(r"""(?<=[;,\s:="'`])(?P<name>[^\s=;,:<>]{1,80})=(?P<value>[^\s;,<>]{8,}+)""")
_ATTRIBUTES = frozenset(("path", "domain", "expires", "max-age", "samesite", "priority", "version"))
_SESSION = re.compile(r"sess|sid|auth|token|csrf|xsrf|jwt", re.IGNORECASE | re.ASCII)

_LOGIN = re.compile(
    rf"""-(?<=[\s"']-)(?:u[ \t]{{0,2}}|-(?:proxy-)?user[ \t=]{{1,2}})(?:{QUOTE})?"""
    r"""[^\s:"'`<>\\$]{0,80}:(?P<value>[^\s"'`<>\\${}]{3,200})"""
)
# A command continues after a line end only if a backslash precedes it.
_COMMAND_END = re.compile(r"(?<![\\\r])\r?\n")
_LONGEST_COMMAND = 600


def find_cookies(text: str) -> Iterator[TextSpan]:
    """Find the values of `Cookie: a=...; b=...` that open a session; preferences stay."""
    for header in _COOKIES.finditer(text):
        for pair in _PAIR.finditer(text, header.start("pairs"), header.end("pairs")):
            name, value = pair["name"], pair["value"]
            confirm = looks_like_password if _SESSION.search(name) else looks_random
            if name.casefold() not in _ATTRIBUTES and confirm(value):
                yield TextSpan(*pair.span("value"))


def find_curl_passwords(text: str) -> Iterator[TextSpan]:
    """Find what follows the colon of `curl -u name:...` and `curl --user name:...`."""
    for login in _LOGIN.finditer(text):
        before = text[max(0, login.start() - _LONGEST_COMMAND) : login.start()]
        command = before.casefold().rfind("curl")
        is_of_curl = command >= 0 and not _COMMAND_END.search(before, command)
        if is_of_curl and is_no_word_for_password(login["value"]):
            yield TextSpan(*login.span("value"))


_RUN = 24
"""Characters: no prefix with its value is shorter, and few identifiers are as long."""
_HEX, _WORD, _URL = "[0-9a-f]", "[A-Za-z0-9]", "[A-Za-z0-9_-]"

_MARKED = (
    # Models: Groq, Replicate, Perplexity, xAI, Nvidia, Together, LangSmith, RunPod
    rf"gsk_{_WORD}{{40,}}",
    rf"r8_{_WORD}{{37}}",
    rf"pplx-{_WORD}{{40,}}",
    rf"xai-{_WORD}{{60,}}",
    rf"nvapi-{_URL}{{50,}}",
    rf"tgp_v1_{_URL}{{40,}}",
    rf"lsv2_(?:pt|sk)_{_HEX}{{32}}_{_HEX}{{10}}",
    r"rpa_[A-Z0-9]{40,}",
    # Clouds: Google, DigitalOcean, Databricks, Supabase, PlanetScale, Fly, Tailscale
    rf"GOCSPX-{_URL}{{28}}",
    rf"do[oprt]_v1_{_HEX}{{64}}",
    rf"dapi{_HEX}{{32}}(?:-\d)?",
    rf"sb[ps]_{_HEX}{{40}}",
    rf"pscale_(?:tkn|pw|oauth)_{_URL}{{32,}}",
    rf"fo1_{_URL}{{43}}",
    rf"tskey-[a-z]+-{_WORD}{{8,}}-{_WORD}{{20,}}",
    # Forges and indexes: GitLab, Bitbucket, Atlassian, Docker, RubyGems, crates.io
    rf"gl(?:rt|dt|soat|ptt|ft|imt|agent)-{_URL}{{20,}}",
    rf"ATBB{_WORD}{{32}}",
    rf"ATATT3x{_URL}{{100,}}",
    rf"dckr_(?:pat|oat)_{_URL}{{27,}}",
    rf"rubygems_{_HEX}{{48}}",
    rf"cio{_WORD}{{32}}",
    # Messages: Slack, Mailgun, Mailchimp
    rf"xapp-\d-{_WORD}{{8,}}-\d{{8,}}-{_HEX}{{64}}",
    rf"xwfp-{_URL}{{40,}}",
    rf"key-{_HEX}{{32}}",
    rf"{_HEX}{{32}}-us\d{{1,2}}",
    # Payment and shops: Stripe, Shopify, Square
    rf"whsec_{_WORD}{{32,}}",
    rf"shp(?:at|ca|pa|ss)_{_HEX}{{32}}",
    rf"sq0(?:csp|atp|idp)-{_URL}{{22,}}",
    # Monitoring and collaboration: New Relic, Grafana, Linear, Notion, Figma, Postman, Sentry
    r"NRAK-[A-Z0-9]{27}",
    rf"glsa_{_WORD}{{32}}_{_HEX}{{8}}",
    rf"lin_api_{_WORD}{{40}}",
    rf"(?:ntn|secret)_{_WORD}{{40,}}",
    rf"figd_{_URL}{{40}}",
    rf"PMAK-{_HEX}{{24}}-{_HEX}{{34}}",
    rf"sntry[su]_{_URL}{{40,}}",
    # Keys: age
    r"AGE-SECRET-KEY-1[A-Z0-9]{58}",
)
_MARK_STARTS = frozenset(
    b"gsk r8_ ppl xai nva tgp lsv rpa GOC doo dop dor dot dap sbp sbs psc fo1 tsk glr gld gls glp glf gli "
    b"gla ATB ATA dck rub cio xap xwf key whs shp sq0 NRA lin ntn sec fig PMA snt AGE".split()
)
"""The first three characters of each prefix rule out most runs."""
_MARK = re.compile("|".join(f"(?:{mark})" for mark in _MARKED) + rf"(?!{_URL})")

# What precedes the run of a token whose prefix ends with another character.
_BEFORE = re.compile(
    r"(?:hv[sbr]\.|dp\.(?:pt|st|ct|sa|scim|audit)\.|ya29\.|1//|[A-Za-z0-9]{14}\.atlasv1\.|pat[A-Za-z0-9]{14}\."
    r"|[A-Za-z0-9~_.-]{3}\dQ~)\Z"
)
_LONGEST_BEFORE = 24
_RUN_HERE = re.compile(r"[A-Za-z0-9_.~-]{24,}")

RUNS = bytes(
    ord("A") if code in b"-_" or (code < 128 and chr(code).isalnum()) else ord(" ") for code in range(256)
)
_LONG_RUN = b"A" * _RUN
_MARK_AT_END = b"-us"
_ESCAPED = frozenset((b"\\n", b"\\r", b"\\t"))
_SIGNS_BEFORE = frozenset((b".", b"/", b"~"))

_ACCESS_KEY = re.compile(
    r"(?:A(?:(?<![A-Za-z0-9]A)|(?<=\\[nrt]A))[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])|<REDACTED:aws_access_key:\d+>)"
)
_SECRET_KEY = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_NEAR = 160
_ENTROPY_WITHOUT_DIGITS = 4.2
"""Bits per character. One secret key in a thousand has no digit; names in camel case stay below this."""
_GENERATED = re.compile(r"(?<![A-Za-z0-9/+_.-])(?P<value>[A-Za-z0-9/+_-]{20,128}={0,2})(?![A-Za-z0-9/+_=-])")
_CONTEXT_NAME = re.compile(
    r"(?<![A-Za-z])(?i:pass(?:wor[dt]|wd|phrase)|kennwort|pwd|secret|token|credentials?"
    r"|(?:api|access|auth|private|signing)[ _-]?key)(?![A-Za-z0-9])"
)
_CONTEXT = 48
"""Characters before a value in which its name must occur: `Secret access key (shown once): ...`."""
# The second form is that of a key without a password.
_MINISIGN = re.compile(r"RW(?:RTY0Iy|QAAEIy)[A-Za-z0-9+/]{100,}+={0,2}")

_WEBHOOK = re.compile(
    r"(?:(?:discord|discordapp)\.com/api/(?:v\d+/)?webhooks/\d+/"
    r"|webhook\.office\.com/\w+/[^\s/\"']{0,120}/IncomingWebhook/"
    r"|hooks\.zapier\.com/hooks/catch/\d+/"
    r"|hooks\.airtable\.com/workflows/v1/genericWebhook/)"
    r"(?P<value>[A-Za-z0-9_/-]{6,400})"
)
_SIGNATURE = re.compile(
    r"(?i)[?&;](?:sig|signature|x-amz-signature|x-goog-signature|x-amz-security-token|hmac)="
    r"(?P<value>[A-Za-z0-9%+/_.~-]{16,2000}={0,2})"
)
_OPTION = re.compile(
    r"""--(?<![\w-]--)[\w-]{0,40}?(?i:token|password|passwd|passphrase|secret|api[_-]?key)[ \t]{1,3}"""
    r"""(?:\\{0,7}["'`])?(?P<value>[^\s"'`,;<>()\[\]{}\\$-][^\s"'`,;<>()\[\]{}\\$]{7,200})"""
)
_MYSQL = re.compile(r"""mysql(?:dump|admin|sh)?\b[^\n|;&]{0,200}?[ \t]-p(?P<value>[^\s"'`<>\\$]{6,200})""")
_SHORT_OPTION = re.compile(
    r"""(?:sshpass|login\b[^\n|;&]{0,200}?)[ \t]{1,3}-p[ \t]{0,3}["'`]?"""
    r"""(?P<value>[^\s"'`<>\\$-][^\s"'`<>\\$]{5,200})"""
)
_NETRC = re.compile(r"login\s{1,8}[^\s<>]{1,80}\s{1,8}password\s{1,8}(?P<value>[^\s<>]{4,200})")
_KAGGLE = re.compile(
    r"""username\\{0,7}["'`]\s{0,3}:\s{0,3}\\{0,7}["'`][^"'`\\]{1,80}\\{0,7}["'`]\s{0,3},\s{0,3}"""
    r"""\\{0,7}["'`]key\\{0,7}["'`]\s{0,3}:\s{0,3}\\{0,7}["'`](?P<value>[0-9a-f]{32})(?![0-9a-f])"""
)


def find_marked_tokens(text: str) -> Iterator[TextSpan]:
    """Find tokens that begin with the prefix of a service."""
    done = 0
    for start in _run_starts(text):
        if start < done:
            continue
        span = _token_at(text, start)
        if span is not None and span.start >= done:
            yield span
            done = span.end


TEXT_GAP = "\n<\n"
"""Stands between texts that are searched as one: no pattern matches across it."""


def find_aws_secrets(text: str) -> Iterator[TextSpan]:
    """Find forty characters near the id of an access key. A commit hash has forty too, but no capitals."""
    done = 0
    for key in _ACCESS_KEY.finditer(text):
        low, end = max(done, key.start() - _NEAR), min(len(text), key.end() + _NEAR)
        low = max(low, text.rfind(TEXT_GAP, low, key.start()))
        gap = text.find(TEXT_GAP, key.end(), end)
        for match in _SECRET_KEY.finditer(text, low, gap if gap >= 0 else end):
            if _is_mixed(match.group()):
                yield TextSpan(*match.span())
                done = match.end()


def has_access_key(text: str) -> bool:
    """Whether the text contains the id of an AWS access key."""
    return ("AKIA" in text or "ASIA" in text) and _ACCESS_KEY.search(text) is not None


def find_secret_keys(text: str) -> Iterator[TextSpan]:
    """Find AWS secret keys by their form alone, for texts that belong to a key id in another text."""
    for match in _SECRET_KEY.finditer(text):
        if _is_mixed(match.group()):
            yield TextSpan(*match.span())


def find_named_secrets(text: str) -> Iterator[TextSpan]:
    """Find generated values shortly after `secret`, `password`, `token` and similar, in prose or tables."""
    for match in _GENERATED.finditer(text):
        if looks_generated(match["value"]):
            before = text[max(0, match.start() - _CONTEXT) : match.start()].rpartition(TEXT_GAP)[2]
            if _CONTEXT_NAME.search(before):
                yield TextSpan(*match.span("value"))


def find_minisign_keys(text: str) -> Iterator[TextSpan]:
    for match in _MINISIGN.finditer(text):
        yield TextSpan(*match.span())


def find_webhooks(text: str) -> Iterator[TextSpan]:
    """Find the part of a webhook's URL that allows posting to it."""
    for match in _WEBHOOK.finditer(text):
        if looks_random(match["value"]):
            yield TextSpan(*match.span("value"))


def find_signatures(text: str) -> Iterator[TextSpan]:
    """Find signatures of URLs, which grant access to what they sign."""
    for match in _SIGNATURE.finditer(text):
        if looks_random(match["value"]):
            yield TextSpan(*match.span("value"))


def find_mysql_passwords(text: str) -> Iterator[TextSpan]:
    """Find what directly follows the `-p` of MySQL's programs."""
    yield from _confirmed(_MYSQL, text)


def find_options(text: str) -> Iterator[TextSpan]:
    """Find the values of `--token ...`, of `sshpass -p ...`, in a .netrc and in kaggle.json."""
    if "--" in text:
        yield from _confirmed(_OPTION, text)
    if " -p" in text:
        yield from _confirmed(_SHORT_OPTION, text)
    if "login" in text:
        yield from _confirmed(_NETRC, text)
    if "username" in text:
        for match in _KAGGLE.finditer(text):
            yield TextSpan(*match.span("value"))


def _confirmed(form: re.Pattern[str], text: str) -> Iterator[TextSpan]:
    for match in form.finditer(text):
        if looks_like_password(match["value"]):
            yield TextSpan(*match.span("value"))


def _run_starts(text: str) -> Iterator[int]:
    """Yield where a long run of letters, digits, hyphens and underscores begins that may be a token.

    Searched in bytes, which is many times faster; positions are converted where characters have several.
    """
    raw = text.encode("utf-8", "surrogatepass")
    runs = raw.translate(RUNS)
    start = runs.find(_LONG_RUN)
    while start >= 0:
        end = runs.find(b" ", start)
        end = end if end >= 0 else len(runs)
        if raw[start - 1 : start + 1] in _ESCAPED:
            # The n of an escaped line end: logs contain JSON in JSON.
            start += 1
        if (
            raw[start : start + 3] in _MARK_STARTS
            or raw[start - 1 : start] in _SIGNS_BEFORE
            or raw.find(_MARK_AT_END, end - 6, end) >= 0
        ):
            yield start if len(raw) == len(text) else len(raw[:start].decode("utf-8", "surrogatepass"))
        start = runs.find(_LONG_RUN, end)


def _token_at(text: str, start: int) -> TextSpan | None:
    marked = _MARK.match(text, start)
    if marked is not None and looks_random(marked.group()):
        return TextSpan(*marked.span())
    before = _BEFORE.search(text, max(0, start - _LONGEST_BEFORE), start)
    run = _RUN_HERE.match(text, start) if before is not None else None
    if before is None or run is None or not looks_random(run.group()):
        return None
    if before.start() and text[before.start() - 1].isalnum():
        return None
    # A full stop ends the sentence, not the token.
    return TextSpan(before.start(), start + len(run.group().rstrip(".")))


def _is_mixed(value: str) -> bool:
    mixed = any(c.isupper() for c in value) and any(c.islower() for c in value)
    return mixed and (looks_random(value) or entropy(value) >= _ENTROPY_WITHOUT_DIGITS)
