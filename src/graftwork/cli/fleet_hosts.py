"""`graft fleet simulate`: bring up simulated hosts, run a command on the first one, end them."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from graftwork.cli.output import print_json, stderr, stdout
from graftwork.fleet.simulated_hosts import (
    PATH,
    HostNetwork,
    ssh_inside,
    start_ray,
    start_slurm,
    start_sshd,
)


@dataclass(frozen=True)
class HostsRequest:
    hosts: int
    share: tuple[Path, ...]
    ray: bool
    slurm: bool
    netem: str
    kills: tuple[tuple[str, float], ...]
    command: tuple[str, ...]


def simulate_hosts(request: HostsRequest, *, as_json: bool) -> int:
    """Returns the exit code of the command."""
    with HostNetwork(request.hosts, share=request.share) as network:
        environment = _start_services(request, network)
        for name in network.hosts if request.netem else ():
            network.disturb(name, request.netem)
        _print(network, environment, as_json=as_json and not request.command)
        timers = [threading.Timer(seconds, network.kill, (host,)) for host, seconds in request.kills]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            if not request.command:
                stderr.print("Ctrl-C ends the hosts.")
                threading.Event().wait()
            words = network.command("h1", request.command)
            return subprocess.run(
                words, check=False, env={**os.environ, "PATH": PATH, **environment}
            ).returncode
        except KeyboardInterrupt:
            return 0 if not request.command else 130
        finally:
            for timer in timers:
                timer.cancel()


def _start_services(request: HostsRequest, network: HostNetwork) -> dict[str, str]:
    """The environment of a command on the first host."""
    environment = {}
    stderr.print(f"{request.hosts} hosts are up: starting sshd", highlight=False)
    start_sshd(network)
    environment["GRAFT_SSH"] = ssh_inside(network)
    if request.slurm and shutil.which("slurmctld", path=PATH) is None:
        stderr.print("Slurm is not installed (apt install slurm-wlm munge): left out", highlight=False)
    elif request.slurm:
        stderr.print("starting Slurm", highlight=False)
        environment |= start_slurm(network)
    if request.ray and importlib.util.find_spec("ray") is None:
        stderr.print("Ray is not installed (pip install 'graftwork\\[ray]'): left out", highlight=False)
    elif request.ray:
        stderr.print("starting Ray", highlight=False)
        environment |= start_ray(network)
    return environment


def _print(network: HostNetwork, environment: dict[str, str], *, as_json: bool) -> None:
    hosts = [{"name": host.name, "address": host.address, "pid": host.pid} for host in network.hosts.values()]
    if as_json:
        print_json({"hosts": hosts, "environment": environment, "folder": str(network.state)})
        sys.stdout.flush()
        return
    out = stderr
    for host in hosts:
        out.print(f"  {host['name']}  {host['address']}  nsenter -t {host['pid']} -a", highlight=False)
    for name, value in sorted(environment.items()):
        if name.startswith(("GRAFT", "SLURM", "RAY_AUTH")):
            out.print(f"  export {name}='{value}'", highlight=False, soft_wrap=True)
    stdout.file.flush()
