"""A real sshd on this machine, with keys of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@contextmanager
def running_sshd(folder: Path) -> Iterator[str]:
    """The command that reaches it, as GRAFT_SSH takes it."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd on this machine")
    host_key, own_key = _make_key(folder / "host"), _make_key(folder / "own")
    port = _free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {own_key}.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    if os.geteuid() == 0:
        # Where sshd gives up its rights; a service file makes it elsewhere.
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.PIPE)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if server.poll() is not None:
                pytest.skip(f"sshd does not start here: {server.stderr.read().decode()[-200:]}")
            time.sleep(0.02)
        known = folder / "known_hosts"
        yield f"ssh -p {port} -i {own_key} -o UserKnownHostsFile={known} -o StrictHostKeyChecking=accept-new"
    finally:
        server.terminate()
        server.wait()
