"""A real Ray of several nodes on this machine, with authentication: each node is a raylet of its own."""

import importlib.util
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from free_ports import free_port

MEMORY = 80 * 2**20
TOKEN = secrets.token_hex(32)
"""One for all clusters of a process: Ray reads it once."""


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: make test-ray")


@contextmanager
def ray_token(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a cluster and of its clients, with a token of its own."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    chosen = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        # On a busy machine a node takes long to start and to answer: it must not count as dead for that.
        "RAY_raylet_start_wait_time_s": "480",
        "RAY_health_check_initial_delay_ms": "60000",
        "RAY_health_check_timeout_ms": "60000",
    }
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield chosen
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def agent_ports() -> dict[str, int]:
    """Ports for the agents of a node. Without them it waits for its agents for seconds only, and aborts."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    return {name: free_port() for name in (*names, "runtime_env_agent_port")}


@contextmanager
def running_ray(folder: Path, *, nodes: int = 1, dashboard: bool = False):
    """A cluster with a head without cores and `nodes` nodes of one core; a `ray.cluster_utils.Cluster`."""
    require_ray()
    with ray_token(folder):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": dashboard}
        if dashboard:
            head |= {"num_cpus": 2, "dashboard_port": 0}
        cluster = Cluster(initialize_head=True, head_node_args={**head, **agent_ports()})
        try:
            for _ in range(nodes):
                cluster.add_node(num_cpus=1, object_store_memory=MEMORY, **agent_ports())
            cluster.wait_for_nodes(480)
            yield cluster
        finally:
            cluster.shutdown()
