"""Secrets that are known by what stands before them: the mark of their maker, an option, an address.

In: a text. Out: the spans of the values, left to right, none over another. A token of most services begins
with the service's own mark (`dop_v1_`, `glsa_`) and is a long run of letters and digits. Prose holds no such
run, so the runs are found first, by their bytes, and only there the marks are compared: another mark costs
nothing. To add one: a line in `_MARKED`, or in `_BEFORE` where the mark ends before the run begins.
"""

import re
from collections.abc import Iterator

from graftwork.text.confirm import looks_like_password, looks_random
from graftwork.text.span import Span

_RUN = 24
"""Characters: no mark with its value is shorter, and hardly a name is as long."""
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
    # Watching and working: New Relic, Grafana, Linear, Notion, Figma, Postman, Sentry
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
"""The first three characters of each mark: most runs are passed over by them."""
_MARK = re.compile("|".join(f"(?:{mark})" for mark in _MARKED) + rf"(?!{_URL})")

# What stands before the run of a token whose mark ends with another sign.
_BEFORE = re.compile(
    r"(?:hv[sbr]\.|dp\.(?:pt|st|ct|sa|scim|audit)\.|ya29\.|1//|[A-Za-z0-9]{14}\.atlasv1\.|pat[A-Za-z0-9]{14}\."
    r"|[A-Za-z0-9~_.-]{3}\dQ~)\Z"
)
_LONGEST_BEFORE = 24
_RUN_HERE = re.compile(r"[A-Za-z0-9_.~-]{24,}")

_RUNS = bytes(
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
_MINISIGN = re.compile(r"RWRTY0Iy[A-Za-z0-9+/]{100,}+={0,2}")

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


def find_marked_tokens(text: str) -> Iterator[Span]:
    """Tokens that begin with the mark of a service."""
    done = 0
    for start in _run_starts(text):
        if start < done:
            continue
        span = _token_at(text, start)
        if span is not None and span.start >= done:
            yield span
            done = span.end


def find_aws_secrets(text: str) -> Iterator[Span]:
    """Forty characters near the id of an access key. A commit has forty too, and no capitals."""
    done = 0
    for key in _ACCESS_KEY.finditer(text):
        begin, end = max(done, key.start() - _NEAR), min(len(text), key.end() + _NEAR)
        # Two texts that are searched as one are kept apart by a sign that stands alone on its line.
        begin = max(begin, text.rfind("\n<\n", begin, key.start()))
        other = text.find("\n<\n", key.end(), end)
        for found in _SECRET_KEY.finditer(text, begin, other if other >= 0 else end):
            if _is_mixed(found.group()):
                yield Span(*found.span())
                done = found.end()


def find_minisign_keys(text: str) -> Iterator[Span]:
    for found in _MINISIGN.finditer(text):
        yield Span(*found.span())


def find_webhooks(text: str) -> Iterator[Span]:
    """The part of a webhook's address that lets anybody post there."""
    for found in _WEBHOOK.finditer(text):
        if looks_random(found["value"]):
            yield Span(*found.span("value"))


def find_signatures(text: str) -> Iterator[Span]:
    """What signs an address: whoever has it may fetch what lies there."""
    for found in _SIGNATURE.finditer(text):
        if looks_random(found["value"]):
            yield Span(*found.span("value"))


def find_mysql_passwords(text: str) -> Iterator[Span]:
    """What stands right behind the `-p` of MySQL's programs."""
    yield from _confirmed(_MYSQL, text)


def find_options(text: str) -> Iterator[Span]:
    """The value of `--token ...`, of `sshpass -p ...`, in a .netrc and in kaggle.json."""
    if "--" in text:
        yield from _confirmed(_OPTION, text)
    if " -p" in text:
        yield from _confirmed(_SHORT_OPTION, text)
    if "login" in text:
        yield from _confirmed(_NETRC, text)
    if "username" in text:
        for found in _KAGGLE.finditer(text):
            yield Span(*found.span("value"))


def _confirmed(form: re.Pattern[str], text: str) -> Iterator[Span]:
    for found in form.finditer(text):
        if looks_like_password(found["value"]):
            yield Span(*found.span("value"))


def _run_starts(text: str) -> Iterator[int]:
    """Where a long run of letters, digits, hyphens and underscores begins that may be a token.

    Looked for among bytes, which is many times faster; where a character is several of them, the few places
    that are found are counted again.
    """
    raw = text.encode("utf-8", "surrogatepass")
    runs = raw.translate(_RUNS)
    start = runs.find(_LONG_RUN)
    while start >= 0:
        end = runs.find(b" ", start)
        end = end if end >= 0 else len(runs)
        if raw[start - 1 : start + 1] in _ESCAPED:
            # The n of an escaped line end: logs hold JSON in JSON.
            start += 1
        if (
            raw[start : start + 3] in _MARK_STARTS
            or raw[start - 1 : start] in _SIGNS_BEFORE
            or raw.find(_MARK_AT_END, end - 6, end) >= 0
        ):
            yield start if len(raw) == len(text) else len(raw[:start].decode("utf-8", "surrogatepass"))
        start = runs.find(_LONG_RUN, end)


def _token_at(text: str, start: int) -> Span | None:
    marked = _MARK.match(text, start)
    if marked is not None and looks_random(marked.group()):
        return Span(*marked.span())
    before = _BEFORE.search(text, max(0, start - _LONGEST_BEFORE), start)
    run = _RUN_HERE.match(text, start) if before is not None else None
    if before is None or run is None or not looks_random(run.group()):
        return None
    if before.start() and text[before.start() - 1].isalnum():
        return None
    # A full stop ends the sentence, not the token.
    return Span(before.start(), start + len(run.group().rstrip(".")))


def _is_mixed(value: str) -> bool:
    return looks_random(value) and any(c.isupper() for c in value) and any(c.islower() for c in value)
