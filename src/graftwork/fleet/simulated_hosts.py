"""Several hosts on one machine: network, mount, host name and process namespaces on a bridge. Linux, root.

Input: how many hosts, folders that they share. Output: hosts h1, h2 … with addresses and a /tmp of their own,
which run sshd and, if asked, nodes of Ray and Slurm; faults of their network; hosts that die. The bridge is
in a namespace too: nothing of the machine's own network changes. All processes of a host end with its first
one, and that ends with this process, even if it is killed. Folders that were left are removed by the next
call.
"""

import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from graftwork.records.errors import EnvironmentFailure, UserError

MOST_HOSTS = 8
PREFIX = "graft-hosts-"
OWNER = "owner.json"
NETWORK = "10.213.7"
"""Used only in the namespaces: the address may be in use outside."""
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "mount")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_SECONDS = 30.0
STORE_BYTES = 80 * 2**20
RAY_AGENTS = {
    "metrics-export": 8071,
    "dashboard-agent-listen": 52365,
    "dashboard-agent-grpc": 8072,
    "runtime-env-agent": 8073,
}
"""Their ports on every host."""

# The first process of a host: it waits for those whose parents are gone.
_INIT = """
import os, subprocess, sys, time
state, name, shared = sys.argv[1], sys.argv[2], sys.argv[3:]
def run(*words): subprocess.run(words, check=True)
kept = [state, *shared]
run("mount", "--make-rprivate", "/")
run("mount", "-t", "proc", "proc", "/proc")
folds = {path: os.open(path, os.O_PATH) for path in kept}
for path, size in (("/tmp", "2g"), ("/run", "64m"), ("/dev/shm", "512m")):
    run("mount", "-t", "tmpfs", "-o", "mode=1777,size=" + size, "tmpfs", path)
for path, descriptor in folds.items():
    os.makedirs(path, exist_ok=True)
    bind = ["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", path]
    subprocess.run(bind, check=True, pass_fds=[descriptor])
run("mount", "--bind", state + "/hosts", "/etc/hosts")
run("hostname", name)
for path in ("/run/sshd", "/run/munge", "/run/slurm"):
    os.makedirs(path, mode=0o755, exist_ok=True)
open(f"{state}/{name}.up", "w").close()
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""


@dataclass(frozen=True)
class SimulatedHost:
    """One host. `pid` is its first process, seen from outside."""

    name: str
    address: str
    pid: int
    parent: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def alive(self) -> bool:
        return self.parent.poll() is None


class HostNetwork:
    """Hosts on a bridge. Use it in a `with` block."""

    def __init__(self, hosts: int = 3, *, share: Iterable[Path] = ()) -> None:
        require_namespaces()
        if not 1 <= hosts <= MOST_HOSTS:
            raise UserError(f"{hosts} hosts cannot be simulated", fix=f"use 1 to {MOST_HOSTS}")
        remove_leftovers()
        # Folders below /tmp with Python and packages: hosts, which have a /tmp of their own, need them too.
        python = [Path(path) for path in (sys.prefix, *sys.path) if path and Path(path).is_absolute()]
        below = {folder for folder in python if folder.is_relative_to("/tmp") and folder.is_dir()}
        outermost = sorted(folder for folder in below if not below & set(folder.parents))
        self._count, self._share = hosts, [*(Path(path).resolve() for path in share), *outermost]
        self.state = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.hosts: dict[str, SimulatedHost] = {}
        self._switch: SimulatedHost | None = None

    def __enter__(self) -> "HostNetwork":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _build(self) -> None:
        names = [f"h{number + 1}" for number in range(self._count)]
        addresses = {name: f"{NETWORK}.{number + 11}" for number, name in enumerate(names)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.state / "hosts").write_text("\n".join(lines) + "\n")
        (self.state / "init.py").write_text(_INIT)
        self._switch = self._start("switch", f"{NETWORK}.1")
        self._outside("ip", "link", "add", "br0", "type", "bridge")
        self._outside("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
        self._outside("ip", "link", "set", "br0", "up")
        for name, address in addresses.items():
            host = self._start(name, address)
            self.hosts[name] = host
            peer = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            self._outside("ip", "link", "add", name, *peer)
            self._outside("ip", "link", "set", name, "master", "br0", "up")
            for command in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "addr", "add", f"{address}/24", "dev", "eth0"),
                ("ip", "link", "set", "eth0", "up"),
            ):
                self.run(name, command)
        owner = {"pid": os.getpid(), "begun": _start_time(os.getpid())}
        (self.state / OWNER).write_text(json.dumps(owner))

    def _start(self, name: str, address: str) -> SimulatedHost:
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
        argv += ["--kill-child=KILL", sys.executable, str(self.state / "init.py"), str(self.state), name]
        parent = self._spawn(name, [*argv, *map(str, self._share)])
        until = time.monotonic() + START_SECONDS
        while not (self.state / f"{name}.up").exists():
            if parent.poll() is not None or time.monotonic() > until:
                parent.kill()
                parent.wait()
                raise EnvironmentFailure(
                    f"the host {name} does not start",
                    why=(self.state / f"{name}.log").read_text().strip()[-300:] or "no output",
                    fix="check whether this machine allows namespaces and mounts",
                )
            threading.Event().wait(0.02)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        return SimulatedHost(name, address, int(children[0]), parent)

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on a host, in this folder."""
        host = self._host(name)
        enter = ["nsenter", "-t", str(host.pid), "--net", "--uts", "--mount", "--pid", f"--wd={Path.cwd()}"]
        return [*enter, *words]

    def run(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end."""
        done = _run(self.command(name, command), environment)
        if done.returncode:
            raise EnvironmentFailure(
                f"{command[0]} failed on {name}",
                why=(done.stderr.strip() or done.stdout.strip())[-400:],
                fix="see the log of the host",
                where=str(self.state),
            )
        return done

    def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host; its output goes to the host's log."""
        return self._spawn(name, self.command(name, command), environment)

    def _spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self.state / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": PATH, **(environment or {})},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Let a host die: all of its processes at once, without notice."""
        _end(self._host(name))

    def cut(self, name: str, *, joined: bool = False) -> None:
        """Pull the network cable of a host, or put it back."""
        self._outside("ip", "link", "set", self._host(name).name, "up" if joined else "down")

    def disturb(self, name: str, fault: str) -> None:
        """Delay or lose packets to a host, as `tc netem` takes it: `delay 50ms loss 1%`."""
        try:
            self._outside(
                "tc", "qdisc", "replace", "dev", self._host(name).name, "root", "netem", *fault.split()
            )
        except EnvironmentFailure as error:
            if "kind is unknown" in error.why:
                raise EnvironmentFailure(
                    "this kernel has no netem",
                    why="the module sch_netem is missing",
                    fix="load it, or leave the fault out; cutting the cable of a host works without it",
                ) from None
            raise

    def close(self) -> None:
        """End all hosts and remove their files."""
        switch = [self._switch] if self._switch is not None else []
        for host in (*self.hosts.values(), *switch):
            _end(host)
        shutil.rmtree(self.state, ignore_errors=True)

    def _outside(self, *words: str) -> None:
        """Run a command in the namespace of the bridge."""
        assert self._switch is not None
        done = _run(["nsenter", "-t", str(self._switch.pid), "--net", *words])
        if done.returncode:
            raise EnvironmentFailure(
                f"{' '.join(words[:3])} failed",
                why=done.stderr.strip()[-300:],
                fix="simulated hosts need root, namespaces and the commands of iproute2",
            )

    def _host(self, name: str) -> SimulatedHost:
        if name not in self.hosts:
            raise UserError(f"there is no host {name}", fix=f"use one of {', '.join(self.hosts)}")
        return self.hosts[name]


def _run(
    words: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, "PATH": PATH, **(environment or {})}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=variables)


def _end(host: SimulatedHost) -> None:
    """Once it has ended, its pid may belong to another process."""
    if host.alive:
        with suppress(ProcessLookupError):
            os.kill(host.pid, signal.SIGKILL)
    host.parent.wait()


def require_namespaces() -> None:
    """Refuse where namespaces cannot be made, and say why."""
    if sys.platform != "linux":
        raise EnvironmentFailure("hosts can be simulated on Linux only", fix="use a virtual machine")
    if os.geteuid() != 0:
        raise EnvironmentFailure(
            "only root can simulate hosts",
            why="it makes network namespaces, a bridge and mounts",
            fix="run the same command with sudo",
        )
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        raise EnvironmentFailure(
            f"{missing[0]} is not installed",
            fix="apt install iproute2 util-linux mount, or as your system has it",
        )
    unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
    tried = _run([*unshare, "ip", "link", "add", "br0", "type", "bridge"])
    if tried.returncode:
        raise EnvironmentFailure(
            "namespaces are not allowed here",
            why=tried.stderr.strip()[-300:] or f"unshare ended with {tried.returncode}",
            fix="run it on a machine, or in a container, that allows them",
        )


def remove_leftovers() -> None:
    """Remove the folders of networks whose process is gone; their hosts died with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            owner = json.loads((folder / OWNER).read_text())
        except (OSError, ValueError):
            try:
                age = time.time() - folder.stat().st_mtime
            except FileNotFoundError:  # its own process has removed it meanwhile
                continue
            # Being built, or never finished.
            if age < 10 * START_SECONDS:
                continue
            owner = {"pid": 0, "begun": ""}
        if not owner["pid"] or _start_time(owner["pid"]) != owner["begun"]:
            shutil.rmtree(folder, ignore_errors=True)


def _start_time(pid: int) -> str:
    """When a process began: its pid alone may belong to another one by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def start_sshd(network: HostNetwork) -> str:
    """Start sshd on every host; returns the command that reaches their addresses, as GRAFT_SSH takes it."""
    program = _require("sshd", "openssh-server")
    _require("ssh-keygen", "openssh-client")
    state = network.state
    for name in ("host_key", "own_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(state / name)]
        subprocess.run(make, check=True)
    (state / "sshd_config").write_text(
        f"Port 22\nHostKey {state}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {state}/own_key.pub\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nSetEnv PATH=" + PATH + "\n"
    )
    for name in network.hosts:
        network.run(name, [program, "-E", str(state / f"{name}.sshd"), "-f", str(state / "sshd_config")])
    first = next(iter(network.hosts.values()))
    return f"nsenter -t {first.pid} --net {ssh_inside(network)}"


def ssh_inside(network: HostNetwork) -> str:
    """The same command for processes that run on a host."""
    known_hosts = f"-o UserKnownHostsFile={network.state}/known_hosts -o StrictHostKeyChecking=accept-new"
    # A shared connection could be that of an earlier network with the same addresses.
    return f"ssh -i {network.state}/own_key {known_hosts} -o ControlPath=none"


def start_ray(network: HostNetwork, *, dashboard: bool = True) -> dict[str, str]:
    """Start a Ray node on every host, the head on the first; returns the environment of its clients."""
    token = network.state / "ray_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        # A node that is cut off is given up after some seconds, not half a minute.
        "RAY_health_check_period_ms": "2000",
        "RAY_health_check_failure_threshold": "5",
        # On a busy machine a node takes longer to start than Ray waits for.
        "RAY_raylet_start_wait_time_s": "300",
    }
    head = next(iter(network.hosts.values()))
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1"]
    ray += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
    # A node whose agents choose their ports aborts where they take more than some seconds to start.
    ray += [f"--{name}-port={port}" for name, port in RAY_AGENTS.items()]
    first = ["--head", "--port=6379", f"--include-dashboard={str(dashboard).lower()}"]
    first += [f"--dashboard-host={head.address}"] if dashboard else []

    def begin(host: SimulatedHost) -> None:
        role_options = first if host is head else [f"--address={head.address}:6379"]
        command = [*ray, *role_options, f"--node-ip-address={host.address}"]
        network.run(host.name, command, environment=environment)

    begin(head)
    workers = [host for host in network.hosts.values() if host is not head]
    if workers:
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(begin, workers))
    return environment


def start_slurm(network: HostNetwork) -> dict[str, str]:
    """Start Slurm without accounting: the controller on the first host, a node on each."""
    for program in ("munged", "slurmctld", "slurmd"):
        _require(program, "slurm-wlm munge")
    state, head = network.state, next(iter(network.hosts.values()))
    state.chmod(0o755)
    key = state / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (state / "slurm").mkdir()
    nodes = "".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs=1 State=UNKNOWN\n"
        for host in network.hosts.values()
    )
    conf = state / "slurm.conf"
    conf.write_text(
        f"ClusterName=simulated\nSlurmctldHost={head.name}({head.address})\nSlurmUser=root\n"
        "AuthType=auth/munge\nAuthInfo=socket=/run/munge/socket\nCryptoType=crypto/munge\n"
        f"StateSaveLocation={state}/slurm\nSlurmdSpoolDir=/run/slurm/%n\n"
        "SlurmctldPidFile=/run/slurm/slurmctld.pid\nSlurmdPidFile=/run/slurm/slurmd.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
        "AccountingStorageType=accounting_storage/none\nReturnToService=2\nSelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\nSlurmdParameters=config_overrides\nKillWait=5\nMpiDefault=none\n"
        "SlurmdTimeout=20\nSchedulerParameters=sched_interval=1,sched_min_interval=0\n"
        f"{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    )
    environment = {"SLURM_CONF": str(conf)}
    munge = ["munged", "--force", f"--key-file={key}", "--socket=/run/munge/socket"]
    munge += [f"--{name}-file=/run/munge/{name}" for name in ("pid", "log", "seed")]
    for host in network.hosts.values():
        network.run(host.name, munge)
    network.start(head.name, ["slurmctld", "-D", "-f", str(conf)], environment=environment)
    for host in network.hosts.values():
        network.start(host.name, ["slurmd", "-D", "-f", str(conf), "-N", host.name], environment=environment)
    until, states = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < until:
        with suppress(EnvironmentFailure):
            sinfo = ["sinfo", "-h", "-N", "-o", "%T"]
            states = network.run(head.name, sinfo, environment=environment).stdout
            if states.split() == ["idle"] * len(network.hosts):
                return environment
        threading.Event().wait(0.3)
    raise EnvironmentFailure(
        "Slurm did not start on the hosts",
        why=states.strip() or "no answer",
        fix="install slurmctld and slurmd, or continue without Slurm",
    )


def _require(program: str, package: str) -> str:
    path = shutil.which(program, path=PATH)
    if path is None:
        raise EnvironmentFailure(f"{program} is not installed", fix=f"apt install {package}")
    return path


def start_services(
    network: HostNetwork, *, ray: bool, slurm: bool, on_info: Callable[[str], None]
) -> dict[str, str]:
    """The environment of a command on the first host."""
    on_info(f"{len(network.hosts)} hosts are up: starting sshd")
    start_sshd(network)
    environment = {"GRAFT_SSH": ssh_inside(network)}
    if slurm and shutil.which("slurmctld", path=PATH) is None:
        on_info("Slurm is not installed (apt install slurm-wlm munge): left out")
    elif slurm:
        on_info("starting Slurm")
        environment |= start_slurm(network)
    if ray and importlib.util.find_spec("ray") is None:
        on_info("Ray is not installed (pip install 'graftwork[ray]'): left out")
    elif ray:
        on_info("starting Ray")
        environment |= start_ray(network)
    return environment


def run_on_first_host(
    network: HostNetwork, command: list[str], environment: dict[str, str], *, kills: list[tuple[str, float]]
) -> int:
    """Run the command, or wait for Ctrl-C if there is none; returns its exit code."""
    timers = [threading.Timer(seconds, network.kill, (host,)) for host, seconds in kills]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        if not command:
            threading.Event().wait()
        argv = network.command("h1", command)
        return subprocess.run(argv, check=False, env={**os.environ, "PATH": PATH, **environment}).returncode
    except KeyboardInterrupt:
        return 130 if command else 0
    finally:
        for timer in timers:
            timer.cancel()
