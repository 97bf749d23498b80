"""Secrets of many kinds, planted in settings, logs, addresses and environment, are written nowhere.

The quick tests look at what each part makes of them; the slow one runs the whole product over them and reads
every file, every word and every list of arguments that it leaves.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hostile_server import HostileServer, Script, reply
from planted import Planted, forms_of, plant

from graftwork.data.audit.row_checks import redact_row
from graftwork.project.load import load_settings
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Interaction, Message, Origin
from graftwork.serve.captures import ServedExchange, make_capture
from graftwork.text.redact import Redactor, hold_private, publishable

PLANTED = plant()
EACH = pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.kind)
GRAFT = [sys.executable, "-m", "graftwork.cli.main"]


def test_about_forty_kinds_and_more_are_planted():
    assert len({planted.kind for planted in PLANTED}) == len(PLANTED) >= 40
    for planted in PLANTED:
        assert planted.secret in planted.text


def found_in(data: bytes, secret: str) -> bool:
    return any(form in data for form in forms_of(secret))


def test_every_form_of_a_secret_is_searched_for():
    import base64

    secret = "a-Secret/with+signs=0123456789"
    assert found_in(base64.b64encode(b"x" + secret.encode() + b"yz"), secret)
    assert found_in(base64.urlsafe_b64encode(b"xy" + secret.encode() + b"z"), secret)
    assert found_in(b"?key=a-Secret%2Fwith%2Bsigns%3D0123456789", secret)
    assert found_in(secret.encode().hex().encode(), secret)
    assert not found_in(b"a-Secret", secret)


AROUND = (
    "{}",
    "Where do I put this?\n{}\nThank you — it is urgent.",
    "The log says: “{}”, then it stops.",
    "{} {}",
)


@EACH
def test_a_secret_in_a_text_is_replaced(planted):
    for around in AROUND:
        text = around.replace("{}", planted.text)
        assert planted.secret not in Redactor().redact(text).text
        assert hold_private([text])


@EACH
def test_a_secret_in_the_arguments_of_a_tool_call_is_replaced(planted):
    """JSON in JSON: quotes are escaped, and the end of a line is a backslash and an n."""
    escaped = json.dumps(planted.secret)[1:-1]
    for before in ("", "first\n", "\t"):
        text = json.dumps({"arguments": json.dumps({"command": before + planted.text})})
        redacted = Redactor().redact(text).text
        for form in (planted.secret, escaped, json.dumps(escaped)[1:-1]):
            assert form not in redacted


@EACH
def test_a_secret_in_a_logged_row_does_not_reach_the_dataset(planted):
    row = Interaction(
        id="r1",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content=planted.text),),
        reply=f"I will use it: {planted.text}",
        extra={"note": planted.text, "deep": [{"more": planted.text}]},
    )
    written = redact_row(row).row.model_dump_json().encode()
    assert not found_in(written, planted.secret)


@EACH
def test_a_secret_in_an_exchange_does_not_reach_the_captures(planted):
    request = {"messages": [{"role": "user", "content": planted.text}], "metadata": {"note": [planted.text]}}
    exchange = ServedExchange(
        "e1", 0.0, planted.text, "m", "r", request, planted.text, "stop", 1, 1, None, 1.0
    )
    assert not found_in(make_capture(exchange).model_dump_json().encode(), planted.secret)


@pytest.mark.parametrize(
    "name", ["password", "api_key", "client_secret", "X-Api-Key", "db_passwd", "Authorization"]
)
def test_values_under_a_secret_name_do_not_reach_the_captures(name):
    request = {
        "messages": [],
        "tools": [{"headers": {name: "Zk7pQ2mw9xT4"}, "list": {name: ["Zk7pQ2mw9xT4"]}}],
    }
    exchange = ServedExchange("e1", 0.0, None, "m", "r", request, "", "stop", 1, 1, None, 1.0)
    assert "Zk7pQ2mw9xT4" not in make_capture(exchange).model_dump_json()


HARMLESS = (
    "The commit da39a3ee5e6b4b0d3255bfef95601890afd80709 near AKIAIOSFODNN7EXAMPLE is a commit.",
    "It took 15 tokens; max_tokens 512, --max-tokens 2048, --tokenizer Qwen/Qwen2.5-7B-Instruct-1M.",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 is the digest.",
    "See https://example.org/a/very-long-path-with-many-words-in-it-2024/page?sort=signature&page=2",
    "pip install --index-url https://host.example/simple package-with-a-long-name==1.2.3",
    "The function find_all_the_secret_tokens_in_a_text_v2 returns key_error_handler_2.",
    "secret_santa_participants_list_for_the_year_2024 and key-value-store-configuration-2",
    "login page, password field: type your own; mysql -p asks for it, and mysql -pool 5 does not.",
    "uuid 123e4567-e89b-12d3-a456-426614174000, request-id req-2c1e7f0a-1111-4222-8333-444455556666",
    "dapi is short; hvs. and dp.pt. and ya29. are marks; 1//2 is a half.",
    "Contact git@github.com:owner/repository-with-a-long-name.git or ssh://git@host.example/x.git",
)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_that_only_looks_like_a_secret_is_kept(text):
    redacted = Redactor().redact_secrets(text)
    assert redacted.replace("<REDACTED:aws_access_key:1>", "AKIAIOSFODNN7EXAMPLE") == text


@EACH
def test_a_secret_in_any_text_of_the_settings_is_not_published(planted):
    settings = ProjectSettings.model_validate(
        {
            "project": "p",
            "data": {"system_prompt": planted.text, "system_prompts": {"coder": planted.text}},
            "evaluate": {"checks": [{"name": "c", "contains": planted.text}]},
            "train": {"run": {"alerts": {"command": planted.text, "webhook": f"https://h/{planted.text}"}}},
        }
    )
    assert not found_in(json.dumps(publishable(settings)).encode(), planted.secret)
    run = settings.train.run
    assert not found_in(f"{run!r} {run}".encode(), planted.secret)


@EACH
def test_a_secret_in_the_wrong_place_is_not_repeated_by_the_error(planted, tmp_path):
    settings = {"project": "p", "data": {"logs": ["x"]}, "serve": {"port": planted.text}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(GraftError) as caught:
        load_settings(tmp_path / "graft.yaml")
    assert not found_in(json.dumps(caught.value.as_json()).encode(), planted.secret)


RAISES = {
    "worker": (
        "from graftwork.text.redact import hide_in_tracebacks\nhide_in_tracebacks()\nraise ValueError(words)"
    ),
    "thread": (
        "import threading\nfrom graftwork.text.redact import hide_in_tracebacks\nhide_in_tracebacks()\n"
        "def fail():\n    raise ValueError(words)\n"
        "thread = threading.Thread(target=fail)\nthread.start()\nthread.join()"
    ),
    "command": (
        "from graftwork.cli import main\n"
        "def fail():\n    raise ValueError(words)\n"
        "main._run = fail\nmain.main()"
    ),
}


@pytest.mark.parametrize("where", RAISES)
def test_a_traceback_shows_no_secret(where):
    """Libraries put addresses, headers and whole requests into the words of their errors."""
    words = " | ".join(planted.text for planted in PLANTED)
    known = "a value of no form that is only known by its name"
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys\nwords = sys.stdin.read()\n{RAISES[where]}"],
        input=f"{words} {known}",
        env={**os.environ, "SOME_SERVICE_TOKEN": known},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ValueError" in done.stderr
    shown = (done.stdout + done.stderr).encode()
    assert [planted.kind for planted in PLANTED if found_in(shown, planted.secret)] == []
    assert known.encode() not in shown


# -- the whole product ---------------------------------------------------------------------------------

ENVIRONMENT = {
    "HF_TOKEN": "huggingface",
    "OPENAI_API_KEY": "openai project",
    "WANDB_API_KEY": "wandb",
    "AWS_SECRET_ACCESS_KEY": "aws secret by name",
    "AWS_SESSION_TOKEN": "aws session token",
    "MLFLOW_TRACKING_PASSWORD": "dsn",
    "RUNPOD_API_KEY": "runpod",
    "KAGGLE_KEY": "kaggle",
    "GRAFT_API_KEY": "token in shell",
    "ENDPOINT_KEY": "openrouter",
    "JUDGE_KEY": "anthropic",
}
"""Variables, and the kind whose value each holds."""


@pytest.fixture
def serve() -> Iterator[Callable[[Script], HostileServer]]:
    started: list[HostileServer] = []

    def start(script: Script) -> HostileServer:
        started.append(HostileServer(script))
        return started[-1]

    yield start
    for server in started:
        server.close()


def secret_of(kind: str) -> str:
    return next(planted.secret for planted in PLANTED if planted.kind == kind)


def repeat_the_request(server, connection):
    """An endpoint that answers with all that it was sent, the key too."""
    output = server.requests[-1].decode(errors="replace")
    body = {"choices": [{"message": {"content": f"You sent: {output}"}, "finish_reason": "stop"}]}
    server.write(connection, reply(json.dumps(body).encode()))


def write_logs(path: Path) -> None:
    lines = []
    for number, planted in enumerate(PLANTED):
        messages = [
            {
                "role": "user",
                "content": f"Question {number} about {planted.kind}: what is this? {planted.text}",
            },
            {
                "role": "assistant",
                "content": f"It is a secret of kind {planted.kind}, number {number}: {planted.text}",
            },
        ]
        lines.append(json.dumps({"id": str(number), "session": planted.text, "messages": messages}))
    for number in range(40):
        question = f"Where does plant number {number} stand, and since when?"
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": json.dumps({"answer": f"By gate {number}."})},
        ]
        lines.append(json.dumps({"id": f"p{number}", "messages": messages}))
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")


def make_project(folder: Path, base: Path, *, endpoint: str) -> set[str]:
    """Write the project; the secrets that its settings hold."""
    write_logs(folder / "logs" / "log.jsonl")
    webhook, command = secret_of("slack webhook"), secret_of("token option")
    password = secret_of("postgres url")
    settings = {
        "project": "planted",
        "base": str(base),
        "data": {
            "logs": ["logs/*.jsonl"],
            "test": 0.3,
            "question_similarity": 0.95,
            "system_prompt": f"Be kind. The api_key is {secret_of('api key header')}, tell nobody.",
        },
        "train": {
            "rank": 2,
            "epochs": 1,
            "batch_size": 4,
            "checkpoint_every": 4,
            "threads": 1,
            "max_rows": 24,
            "run": {
                "mirror": f"memory://me:{password}@copies/runs?sig={secret_of('aws signature')}",
                "alerts": {
                    "webhook": f"http://127.0.0.1:9/services/T0/B0/{webhook}",
                    "command": f"true --token {command}",
                },
            },
        },
        "evaluate": {
            "max_new_tokens": 4,
            "latency_cases": 6,
            "max_cases": 12,
            "subjects": [f"{endpoint}#m,key=ENDPOINT_KEY"],
            "judge": {"url": endpoint, "model": "judge", "api_key_env": "JUDGE_KEY", "attempts": 1},
        },
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}]},
        "release": {"store": f"file://{folder}/far"},
        "serve": {"api_key_env": "GRAFT_API_KEY"},
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    return {webhook, command, password, secret_of("aws signature"), secret_of("api key header")}


class Watch:
    """Reads the arguments of every process below this one, as long as it is open."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for process in below(os.getpid()):
                try:
                    self.seen.add(Path(f"/proc/{process}/cmdline").read_bytes())
                except OSError:
                    continue


def below(process: int) -> Iterator[int]:
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in map(int, found):
        yield child
        yield from below(child)


def read_all(folder: Path, *, but: set[Path]) -> Iterator[tuple[str, bytes]]:
    """Every file, archives unpacked."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(path == excluded or excluded in path.parents for excluded in but):
            continue
        data = path.read_bytes()
        yield str(path.relative_to(folder)), data
        if tarfile.is_tarfile(path):
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive.getmembers():
                    inner = archive.extractfile(member)
                    yield f"{path.name}:{member.name}", inner.read() if inner else b""


UNREACHABLE = ("owner/name", "champion-there")
"""What the last word of a command is that asks a server which does not answer."""
COMMANDS = (
    ("data", "audit", "--json"),
    ("run", "--json"),
    ("run",),
    ("status",),
    ("status", "--json"),
    ("logs",),
    ("logs", "--json"),
    ("gate", "--json"),
    ("plan", "lint", "graft.yaml", "--json"),
    ("doctor", "--json"),
    ("data", "show", "--json"),
    ("data", "export", "openai", "--out", "exports/openai"),
    ("data", "export", "huggingface", "--out", "exports/hf", "--name", "o/n"),
    ("eval", "export", "--format", "inspect", "--out", "exports/eval"),
    ("release", "export", "run", "--to", "exports/adapter", "--format", "adapter"),
    ("release", "list", "--json"),
    ("release", "show", "champion", "--json"),
    ("release", "lineage", "champion", "--json"),
    ("release", "export", "champion", "--to", "exports/champion.tar"),
    ("release", "push", "champion"),
    ("release", "push", "champion", "--hub", "owner/name"),
    ("release", "pull", "--from", "ftp://me:{password}@127.0.0.1:9/x", "champion-there"),
    ("eval", "--subject", "{endpoint}#m,key=ENDPOINT_KEY", "--json"),
    ("data", "captures", "--out", "exports/captures.jsonl"),
)


@pytest.mark.slow
def test_nothing_that_the_product_writes_or_prints_holds_a_secret(tmp_path, tiny_base, serve):
    endpoint = serve(repeat_the_request)
    folder = tmp_path / "project"
    in_settings = make_project(folder, tiny_base, endpoint=endpoint.address)
    environment = {name: secret_of(kind) for name, kind in ENVIRONMENT.items()}
    environment["GRAFT_DATABASE_URL"] = ""
    environment["MLFLOW_TRACKING_URI"] = f"http://joe:{secret_of('redis url')}@127.0.0.1:9"
    environment["HF_ENDPOINT"] = f"http://joe:{secret_of('redis url')}@127.0.0.1:9"
    password = secret_of("curl login")
    printed: dict[str, bytes] = {}
    codes: dict[str, int] = {}
    with Watch() as watch:
        for command in COMMANDS:
            words = [word.format(password=password, endpoint=endpoint.address) for word in command]
            done = subprocess.run(
                [*GRAFT, *words, *(() if "lint" in command else ("-C", str(folder)))],
                cwd=folder,
                env={**os.environ, **environment},
                capture_output=True,
                check=False,
                timeout=600,
            )
            name = " ".join(command)
            printed[name], codes[name] = done.stdout + done.stderr, done.returncode
            if command[:2] == ("run", "--json"):
                assert done.returncode == 0, done.stderr.decode()[-3000:]
            assert b"Traceback (most recent call last)" not in printed[name], printed[name].decode()[-3000:]
    secrets = {planted.secret: planted.kind for planted in PLANTED}
    assert len(endpoint.requests) > 2, "the endpoint and the judge were asked"
    # What the user wrote, and what it was asked: the settings and the logs are his own.
    own = {folder / "graft.yaml", folder / "logs"}
    leaks = [
        f"{kind} in {name}"
        for name, data in (*read_all(folder, but=own), *printed.items())
        for secret, kind in secrets.items()
        if found_in(data, secret)
    ]
    # The one that was typed on the command line stands in its own list of arguments.
    typed = {password}
    leaks += [
        f"{kind} in the arguments of {arguments[:200]!r}"
        for arguments in watch.seen
        for secret, kind in secrets.items()
        if secret not in typed and found_in(arguments, secret)
    ]
    assert "\n".join(leaks) == ""
    assert len(watch.seen) > 10
    assert in_settings <= set(secrets)
    # An audit that finds secrets says so by its exit code.
    failed = {name for name, code in codes.items() if code != 0 and name != "data audit --json"}
    assert failed == {" ".join(command) for command in COMMANDS if command[-1] in UNREACHABLE}


def test_all_planted_secrets_differ():
    secrets = [planted.secret for planted in PLANTED]
    assert len(set(secrets)) == len(secrets)
    assert all(isinstance(planted, Planted) and len(planted.secret) >= 12 for planted in PLANTED)
