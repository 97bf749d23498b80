"""Can the hosts be reached that the settings and the accounts need? Only where the user asks for it.

In: the settings and the environment. Out: the hosts, and a check for each by one TCP connection. Nothing
is sent over it.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from graftwork.pipeline.doctor.check import Check
from graftwork.project.folder import ProjectFolder

PATIENCE_SECONDS = 3.0
OF_SCHEME = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "hf": "huggingface.co"}
OF_ACCOUNT = {
    "HF_TOKEN": "huggingface.co",
    "RUNPOD_API_KEY": "rest.runpod.io",
    "KAGGLE_KEY": "www.kaggle.com",
    "KAGGLE_API_TOKEN": "www.kaggle.com",
    "AWS_ACCESS_KEY_ID": "sts.amazonaws.com",
}


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
    for variable, host in OF_ACCOUNT.items():
        if environment.get(variable):
            need(host, 443, f"the account in {variable}")
    return tuple(found.values())


def look_at_network(project: ProjectFolder | None) -> Iterator[Check]:
    hosts = hosts_needed(project, os.environ)
    if not hosts:
        yield Check(name="network", result="ok", found="nothing in the settings needs it")
    for host in hosts:
        yield _reach(host)


def _reach(host: Host) -> Check:
    name = f"network: {host.name}"
    try:
        with socket.create_connection((host.name, host.port), timeout=PATIENCE_SECONDS):
            return Check(name=name, result="ok", found=f"port {host.port} answers ({host.purpose})")
    except OSError as error:
        proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
        told = "not directly; a proxy is set, which may reach it" if proxy else str(error)
        return Check(
            name=name,
            result="note" if proxy else "missing",
            found=f"port {host.port}: {told} ({host.purpose})",
            fix="" if proxy else "look at the name, the firewall and the proxy",
        )
