"""Settings that hold secrets: marked in their type, hidden in everything that is written or printed."""

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from graftwork.project.load import load_settings
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import HIDDEN, hide_login, hide_path, marks_of
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.plan import Plan
from graftwork.records.run import TrainJob
from graftwork.text.redact import publishable
from graftwork.train.checkpoints import find_mirror, pass_mirrors
from graftwork.train.settings import TrainSettings

SOURCE = Path(__file__).parents[3] / "src" / "graftwork"
EXAMPLES = Path(__file__).parents[3] / "examples"
SOUNDS_SECRET = re.compile(
    r"key|token|secret|pass|pwd|credential|auth|login|cookie|header|url|uri|address|webhook|endpoint|dsn"
    r"|command|mirror|store|connection|_env$"
)
PASSWORD = "hunter2hunter2"
SECRETS = {
    "mirror": f"ftp://me:{PASSWORD}@backup.example/copies",
    "webhook": "https://hooks.example/services/T0/B0/ZbQx7PpLw2",
    "command": "notify --token Xk29fjDk20 --to me",
}


def settings_with_secrets() -> ProjectSettings:
    run = {"mirror": SECRETS["mirror"], "alerts": {key: SECRETS[key] for key in ("webhook", "command")}}
    return ProjectSettings.model_validate(
        {
            "project": "p",
            "data": {"logs": ["log.jsonl"], "system_prompt": f"The api_key is {PASSWORD}, be kind."},
            "train": {"run": run},
            "models": {"main": {}, "other": {"train": {"run": run}}},
            "release": {"store": "s3://AKIAQ@bucket/releases?sig=Qm2pXw"},
        }
    )


def fields_of(kind: type[BaseModel], seen: set[type[BaseModel]]) -> list[tuple[type[BaseModel], str, Any]]:
    """Every field of the settings, those of nested settings too."""
    if kind in seen:
        return []
    seen.add(kind)
    found = []
    for name, field in kind.model_fields.items():
        found.append((kind, name, field.annotation))
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += fields_of(part, seen)
    return found


def parts_of(annotation: Any) -> list[Any]:
    return [annotation, *(part for argument in get_args(annotation) for part in parts_of(argument))]


def holds_text(annotation: Any) -> bool:
    return any(part in (str, Any) for part in parts_of(annotation) if part is not NoneType)


@pytest.mark.parametrize(
    ("kind", "name", "annotation"),
    [field for field in fields_of(ProjectSettings, set()) if SOUNDS_SECRET.search(field[1])],
    ids=lambda value: getattr(value, "__name__", value) if isinstance(value, type | str) else "",
)
def test_a_setting_whose_name_suggests_a_secret_is_marked(kind, name, annotation):
    if holds_text(annotation):
        assert name in marks_of(kind), (
            f"{kind.__name__}.{name} may hold a secret: give it a type of records/base.py, or NotSecret"
        )


def test_a_setting_without_a_mark_is_found():
    class Careless(BaseModel):
        api_token: tuple[str, ...] | None = None

    ((kind, name, annotation),) = fields_of(Careless, set())
    assert SOUNDS_SECRET.search(name)
    assert holds_text(annotation)
    assert name not in marks_of(kind)


def test_published_settings_hold_no_secret():
    shown = publishable(settings_with_secrets())
    written = repr(shown)
    for secret in (PASSWORD, "ZbQx7PpLw2", "Xk29fjDk20", "AKIAQ", "Qm2pXw"):
        assert secret not in written, secret
    assert shown["train"]["run"]["mirror"] == f"ftp://{HIDDEN}@backup.example/copies"
    assert shown["train"]["run"]["alerts"] == {
        "command": HIDDEN,
        "webhook": f"https://hooks.example/{HIDDEN}",
    }
    assert shown["release"]["store"] == f"s3://{HIDDEN}@bucket/releases?{HIDDEN}"
    assert shown["data"]["system_prompt"] == "The api_key is <REDACTED:password:1>, be kind."
    assert ProjectSettings.model_validate(shown)


def test_published_settings_are_always_the_same():
    assert publishable(settings_with_secrets()) == publishable(settings_with_secrets())


@pytest.mark.parametrize("folder", sorted(EXAMPLES.iterdir()), ids=lambda folder: folder.name)
def test_settings_without_secrets_are_published_as_they_are(folder):
    if not (folder / "graft.yaml").exists():
        pytest.skip("no project")
    settings = load_settings(folder / "graft.yaml")
    assert publishable(settings) == settings.model_dump(mode="json")


def test_a_record_that_is_printed_shows_no_secret():
    printed = f"{settings_with_secrets()!r} {settings_with_secrets()}"
    for secret in SECRETS.values():
        assert secret not in printed
    assert PASSWORD not in repr(settings_with_secrets().train)


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        (f"train: {{run: {{alerts: {{webhook: [{PASSWORD}]}}}}}}", PASSWORD),
        (f"train: {{run: {{mirror: {{url: {PASSWORD}}}}}}}", PASSWORD),
        (f"release: {{store: 's3://me:{PASSWORD}@bucket/x'}}", PASSWORD),
        ("serve: {api_key_env: hf_abcdefghijABCDEFGHIJ0123456789abcd}", "hf_abcdefghij"),
        ("serve: {api_key_env: d41d8cd98f00b204e9800998ecf8427e}", "d41d8cd9"),
        ("serve: {port: sk-proj-4f9KxQ27vTbN81mZ}", "4f9KxQ27vTbN81mZ"),
        ("release: {signing_key: 'untrusted comment: x\n\n    RWRTY0Iyq2pXw'}", "RWRTY0Iyq2pXw"),
        (f"evaluate: {{judge: {{url: 'https://me:{PASSWORD}@host/v1', model: m}}}}", PASSWORD),
        ("evaluate: {judge: {url: 'http://h', model: m, api_key_env: ghp_abcdefghij0123456789AB}}", "ghp_"),
        ("evaluate: {subjects: ['https://host/v1#m,key=ghp_abcdefghij0123456789ABCD']}", "ghp_"),
    ],
)
def test_a_mistake_in_settings_is_named_without_the_secret(tmp_path, line, secret):
    (tmp_path / "graft.yaml").write_text(f"project: p\ndata: {{logs: [log.jsonl]}}\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_settings(tmp_path / "graft.yaml")
    assert secret not in str(caught.value.as_json())


@pytest.mark.parametrize("name", ["GRAFT_API_KEY", "OPENAI_API_KEY", "KEY2", "judge_key_v2", "_x"])
def test_the_name_of_a_variable_is_taken(name):
    settings = ProjectSettings.model_validate({"project": "p", "data": {}, "serve": {"api_key_env": name}})
    assert settings.serve.api_key_env == name


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://bucket/my folder", "s3://bucket/my folder"),
        ("file:///mnt/backup", "file:///mnt/backup"),
        ("ftp://me:p/a@s?s@host/x", "ftp://…@host/x"),
        ("simplecache::s3://k:s@b/x?v=1#f", "simplecache::s3://…@b/x?…"),
        ("zip://a.zip::https://t@h/x#sig", "zip://a.zip::https://…@h/x#…"),
        ("s3://k:s\n@b", "s3://…@b"),
    ],
)
def test_of_an_address_login_query_and_fragment_are_hidden(address, shown):
    assert hide_login(address) == shown


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://hooks.slack.com/services/T/B/x", "https://hooks.slack.com/…"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/…"),
        ("https://me:secret@host/x", "…"),
        ("https://host?token=secret", "…"),
        ("https://host/a@secret", "…"),
        ("secret", "…"),
    ],
)
def test_of_a_link_only_the_host_is_shown(address, shown):
    assert hide_path(address) == shown


def make_job(settings: TrainSettings) -> TrainJob:
    return TrainJob.model_construct(run_id="r1", plan=Plan.model_construct(), run=publishable(settings.run))


def test_the_worker_gets_the_login_of_its_mirror_from_the_environment_and_not_from_its_file():
    settings = settings_with_secrets().train
    job = make_job(settings)
    assert PASSWORD not in repr(job.run)
    reported = TrainSettings.model_validate({"run": job.run})
    (passed,) = pass_mirrors({"r1": settings.run.mirror, "r2": "file:///plain", "r3": None}).values()
    assert json.loads(passed) == {"r1": settings.run.mirror}
    assert find_mirror(job, reported, passed=json.loads(passed)) == settings.run.mirror
    with pytest.raises(EnvironmentFailure, match="login of the mirror"):
        find_mirror(job, reported, passed={})


@pytest.mark.parametrize("mirror", [None, "file:///mnt/backup", "s3://bucket/runs"])
def test_a_mirror_without_a_login_is_in_the_job(mirror):
    settings = TrainSettings.model_validate({"run": {"mirror": mirror}})
    job = make_job(settings)
    assert pass_mirrors({"r1": mirror}) == {}
    reported = TrainSettings.model_validate({"run": job.run})
    assert find_mirror(job, reported, passed={}) == mirror


def test_settings_are_stored_in_their_published_form_alone():
    """A dump of settings that goes into a record is written down, and sent with it."""
    stored = re.compile(r"\b(?:settings|run)=[\w.\[\]]*settings[\w.\[\]]*\.model_dump\(")
    for path in SOURCE.rglob("*.py"):
        found = stored.search(path.read_text())
        assert found is None, f"{path.relative_to(SOURCE)}: {found[0]} stores secrets: use publishable()"
