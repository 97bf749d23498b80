"""Secrets of many kinds, made up each time: none was ever valid, and none is in this file.

A kind has a value that must be found nowhere, and the words that it is met in. Values are drawn from the
alphabet and the length of the real ones, from a fixed seed.
"""

import base64
import json
import string
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple
from urllib.parse import quote

LOWER_HEX = "0123456789abcdef"
LETTERS = string.ascii_letters
WORD = LETTERS + string.digits
URL_SAFE = WORD + "-_"
BASE64 = WORD + "+/"
UPPER = string.ascii_uppercase + string.digits


class Planted(NamedTuple):
    kind: str
    secret: str
    """What must not be found."""
    text: str
    """Words as they stand in logs, with the secret in them."""


Draw = Callable[[str, int], str]


def plant(seed: int = 7) -> list[Planted]:
    """All kinds, each with a value of its own."""
    chance = Random(seed)

    def draw(alphabet: str, length: int) -> str:
        return "".join(chance.choice(alphabet) for _ in range(length))

    return list(_plant(draw))


def _plant(draw: Draw) -> Iterator[Planted]:
    yield from _of_models(draw)
    yield from _of_clouds(draw)
    yield from _of_code(draw)
    yield from _of_messages(draw)
    yield from _of_services(draw)
    yield from _of_keys(draw)
    yield from _of_addresses(draw)
    yield from _by_context(draw)


def _in(kind: str, secret: str, text: str) -> Planted:
    return Planted(kind, secret, text.replace("@@", secret))


def _of_models(draw: Draw) -> Iterator[Planted]:
    """Model providers."""
    yield _in("openai", "sk-" + draw(WORD, 48), "I use @@ for the API.")
    yield _in("openai project", "sk-proj-" + draw(URL_SAFE, 74), "Set OPENAI_API_KEY=@@ first.")
    yield _in("anthropic", "sk-ant-api03-" + draw(URL_SAFE, 93) + "AA", 'client = Anthropic(api_key="@@")')
    yield _in("openrouter", "sk-or-v1-" + draw(LOWER_HEX, 64), "the key @@ does not work")
    yield _in("groq", "gsk_" + draw(WORD, 52), "Groq answers 401 for @@")
    yield _in("replicate", "r8_" + draw(WORD, 37), "replicate login with @@ please")
    yield _in("perplexity", "pplx-" + draw(WORD, 48), "try @@ instead")
    yield _in("xai", "xai-" + draw(WORD, 80), "grok wants @@ here")
    yield _in("huggingface", "hf_" + draw(LETTERS, 34), "huggingface-cli login --token @@")
    yield _in("wandb", draw(LOWER_HEX, 40), "WANDB_API_KEY=@@ python train.py")
    yield _in("kaggle", draw(LOWER_HEX, 32), 'kaggle.json holds {"username":"joe","key":"@@"}')
    yield _in("runpod", "rpa_" + draw(UPPER, 40), "runpodctl config --apiKey @@")
    yield _in("google model key", "AIza" + draw(URL_SAFE, 35), "genai.configure with @@")


def _of_clouds(draw: Draw) -> Iterator[Planted]:
    account = "AKIA" + draw(UPPER[:26] + "234567", 16)
    yield _in("aws key id", account, "The access key @@ was created.")
    secret = draw(BASE64, 40)
    yield _in("aws secret by name", secret, "aws_secret_access_key = @@")
    secret = draw(BASE64, 40)
    yield _in("aws secret next to its id", secret, f"credentials: {account} / @@ (rotate monthly)")
    secret = draw(BASE64, 40)
    yield _in("aws secret in csv", secret, f"Access key ID,Secret access key\n{account},@@\n")
    yield _in(
        "aws session token", "IQoJb3JpZ2luX2Vj" + draw(BASE64, 300) + "==", "export AWS_SESSION_TOKEN=@@"
    )
    yield _in("google oauth secret", "GOCSPX-" + draw(URL_SAFE, 28), "the OAuth client has @@ set")
    yield _in("google access token", "ya29." + draw(URL_SAFE, 160), "curl with ya29 token: @@ expired")
    yield _in("google refresh token", "1//0" + draw(URL_SAFE, 97), "refresh with @@ again")
    yield _in(
        "azure storage",
        draw(BASE64, 86) + "==",
        "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=@@;",
    )
    yield _in(
        "azure client secret", draw(WORD, 3) + "8Q~" + draw(URL_SAFE, 34), "app registration value @@ expires"
    )
    sig = quote(draw(BASE64, 43) + "=", safe="")
    yield _in("azure sas", sig, "https://x.blob.core.windows.net/c/f?sv=2022-11-02&sp=r&sig=@@")
    yield _in("digitalocean", "dop_v1_" + draw(LOWER_HEX, 64), "doctl auth init -t @@")
    yield _in("databricks", "dapi" + draw(LOWER_HEX, 32), "databricks host x, @@ as the token")
    yield _in("vault", "hvs." + draw(URL_SAFE, 95), "vault login @@")
    yield _in(
        "terraform", draw(WORD, 14) + ".atlasv1." + draw(URL_SAFE, 67), "credentials app.terraform.io @@"
    )
    yield _in("doppler", "dp.pt." + draw(WORD, 43), "doppler run with @@")


def _of_code(draw: Draw) -> Iterator[Planted]:
    """Forges and package indexes."""
    yield _in("github classic", "ghp_" + draw(WORD, 36), "git clone https://@@@github.com/o/r")
    yield _in("github fine-grained", "github_pat_" + draw(WORD, 22) + "_" + draw(WORD, 59), "gh auth with @@")
    yield _in("gitlab", "glpat-" + draw(URL_SAFE, 20), "PRIVATE-TOKEN: @@")
    yield _in("gitlab runner", "glrt-" + draw(URL_SAFE, 20), "register the runner with @@")
    yield _in("bitbucket", "ATBB" + draw(WORD, 32), "bitbucket app: @@")
    yield _in("atlassian", "ATATT3x" + draw(URL_SAFE, 180), "jira login @@")
    yield _in("npm", "npm_" + draw(WORD, 36), "//registry.npmjs.org/:_authToken=@@")
    yield _in("pypi", "pypi-AgEIcHlwaS5vcmc" + draw(URL_SAFE, 150), "twine upload -p @@")
    yield _in("docker", "dckr_pat_" + draw(URL_SAFE, 27), "docker login -u me -p @@")
    yield _in("rubygems", "rubygems_" + draw(LOWER_HEX, 48), "gem push with @@")
    yield _in("crates.io", "cio" + draw(WORD, 32), "cargo login @@")


def _of_messages(draw: Draw) -> Iterator[Planted]:
    yield _in(
        "slack bot", f"xoxb-{draw('123456789', 12)}-{draw('123456789', 12)}-" + draw(WORD, 24), "bot @@"
    )
    yield _in(
        "slack app", f"xapp-1-A{draw(UPPER, 10)}-{draw('123456789', 13)}-" + draw(LOWER_HEX, 64), "socket @@"
    )
    yield _in(
        "slack webhook",
        draw(WORD, 24),
        f"https://hooks.slack.com/services/T{draw(UPPER, 8)}/B{draw(UPPER, 8)}/@@",
    )
    yield _in("discord bot", f"M{draw(WORD, 23)}.{draw(URL_SAFE, 6)}.{draw(URL_SAFE, 38)}", "bot.run('@@')")
    yield _in(
        "discord webhook", draw(URL_SAFE, 68), f"https://discord.com/api/webhooks/{draw('123456789', 18)}/@@"
    )
    yield _in(
        "telegram bot",
        f"{draw('123456789', 10)}:AA{draw(URL_SAFE, 33)}",
        "https://api.telegram.org/bot@@/getMe",
    )
    yield _in(
        "teams webhook",
        draw(LOWER_HEX, 32),
        "https://acme.webhook.office.com/webhookb2/8d0f@x/IncomingWebhook/@@/c1",
    )
    yield _in("twilio", "SK" + draw(LOWER_HEX, 32), "twilio @@ for SMS")
    yield _in("sendgrid", f"SG.{draw(URL_SAFE, 22)}.{draw(URL_SAFE, 43)}", "mail via @@")
    yield _in("mailgun", "key-" + draw(LOWER_HEX, 32), "mailgun with @@")
    yield _in("mailchimp", draw(LOWER_HEX, 32) + "-us12", "mailchimp with @@")


def _of_services(draw: Draw) -> Iterator[Planted]:
    yield _in("stripe", "sk_live_" + draw(WORD, 24), "stripe.api_key = '@@'")
    yield _in("stripe webhook", "whsec_" + draw(WORD, 32), "endpoint secret @@")
    yield _in("shopify", "shpat_" + draw(LOWER_HEX, 32), "shop with @@")
    yield _in("square", "sq0csp-" + draw(URL_SAFE, 43), "square app @@")
    yield _in("new relic", "NRAK-" + draw(UPPER, 27), "newrelic @@")
    yield _in("grafana", "glsa_" + draw(WORD, 32) + "_" + draw(LOWER_HEX, 8), "grafana @@")
    yield _in("datadog", draw(LOWER_HEX, 32), "DD_API_KEY=@@ agent run")
    yield _in("sentry", draw(LOWER_HEX, 32), "sentry dsn https://@@@o12345.ingest.sentry.io/67890")
    yield _in("linear", "lin_api_" + draw(WORD, 40), "linear @@")
    yield _in("notion", "ntn_" + draw(WORD, 46), "notion @@")
    yield _in("airtable", "pat" + draw(WORD, 14) + "." + draw(LOWER_HEX, 64), "airtable @@")
    yield _in("figma", "figd_" + draw(URL_SAFE, 40), "figma @@")
    yield _in("postman", f"PMAK-{draw(LOWER_HEX, 24)}-{draw(LOWER_HEX, 34)}", "postman @@")


def _of_keys(draw: Draw) -> Iterator[Planted]:
    body = "\n".join(draw(BASE64, 64) for _ in range(6))
    for name in ("RSA PRIVATE KEY", "OPENSSH PRIVATE KEY", "EC PRIVATE KEY", "PRIVATE KEY"):
        inner = "\n".join(draw(BASE64, 64) for _ in range(4))
        yield Planted(
            name.lower(), inner[70:120], f"here:\n-----BEGIN {name}-----\n{inner}\n-----END {name}-----\n"
        )
    block = f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{body}\n-----END PGP PRIVATE KEY BLOCK-----"
    yield Planted("pgp private key", body[70:120], block)
    escaped = json.dumps(f"-----BEGIN PRIVATE KEY-----\n{draw(BASE64, 64)}\n-----END PRIVATE KEY-----\n")
    yield Planted(
        "service account", escaped[40:80], f'{{"type": "service_account", "private_key": {escaped}}}'
    )
    yield _in("age", "AGE-SECRET-KEY-1" + draw(UPPER, 58), "decrypt with @@")
    yield _in(
        "minisign", "RWRTY0Iy" + draw(BASE64, 204), "untrusted comment: minisign encrypted secret key\n@@"
    )
    head = base64.urlsafe_b64encode(b'{"alg":"HS256"}').decode().rstrip("=")
    claims = base64.urlsafe_b64encode(json.dumps({"sub": draw(WORD, 12)}).encode()).decode().rstrip("=")
    yield _in("jwt", f"{head}.{claims}.{draw(URL_SAFE, 43)}", "id_token was @@")


def _of_addresses(draw: Draw) -> Iterator[Planted]:
    yield _in("postgres url", draw(WORD, 16), "postgresql://app:@@@db.internal:5432/prod")
    yield _in("redis url", draw(WORD, 20), "redis://:@@@cache:6379/0")
    yield _in("token as user", draw(WORD, 32), "https://@@:x-oauth-basic@git.example/x.git")
    yield _in(
        "password in query", draw(WORD, 14), "postgresql://db/prod?user=app&password=@@&sslmode=require"
    )
    yield _in("access token in query", draw(WORD, 40), "GET https://graph.example/me?access_token=@@")
    yield _in("api key in query", draw(LOWER_HEX, 32), "https://api.example/v1/geo?api_key=@@&q=x")
    yield _in(
        "aws signature",
        draw(LOWER_HEX, 64),
        "https://b.s3.amazonaws.com/f?X-Amz-Expires=60&X-Amz-Signature=@@",
    )


def _by_context(draw: Draw) -> Iterator[Planted]:
    """Values without a form of their own: what precedes them decides."""
    yield _in("bearer header", draw(URL_SAFE, 43), "curl -H 'Authorization: Bearer @@' https://api.example")
    login = base64.b64encode(f"joe:{draw(WORD, 12)}".encode()).decode()
    yield _in("basic header", login, "Authorization: Basic @@")
    yield _in("api key header", draw(WORD, 32), "X-Api-Key: @@")
    yield _in("cookie", draw(WORD, 40), "Cookie: sessionid=@@; theme=dark")
    yield _in("password in yaml", draw(WORD, 14), "database:\n  user: app\n  password: @@\n")
    yield _in("secret in json", draw(WORD, 40), '{"client_id": "abc", "client_secret": "@@"}')
    yield _in("secret in words", draw(WORD, 24), "By the way, the secret is @@ until Friday.")
    yield _in("token in shell", draw(URL_SAFE, 40), "export SERVICE_TOKEN=@@")
    yield _in("curl login", draw(WORD, 14), "curl -u joe:@@ https://host/x")
    yield _in("mysql login", draw(WORD, 14), "mysql -u root -p@@ shop")
    yield _in("sshpass", draw(WORD, 14), "sshpass -p @@ ssh root@host")
    yield _in("netrc", draw(WORD, 16), "machine api.example login joe password @@")
    yield _in("dsn", draw(WORD, 14), "host=db port=5432 user=app password=@@ dbname=prod")
    yield _in("django secret", draw(LETTERS + string.digits, 50), "SECRET_KEY = '@@'")
    yield _in("token option", draw(WORD, 32), "notify --token @@ --to me")


def forms_of(secret: str) -> Iterator[bytes]:
    """The secret as it may be written: as it is, escaped, in base64 at any offset, in hexadecimal."""
    raw = secret.encode()
    yield raw
    yield quote(secret, safe="").encode()
    yield json.dumps(secret)[1:-1].encode()
    yield raw.hex().encode()
    for offset in range(3):
        # What stands around it changes the first and the last characters.
        inner = base64.b64encode(b"\0" * offset + raw)
        yield inner[4 if offset else 0 : len(inner) - 4]
        yield base64.urlsafe_b64encode(b"\0" * offset + raw)[4 if offset else 0 : len(inner) - 4]
