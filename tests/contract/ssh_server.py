"""A real sshd on this machine, with keys of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from free_ports import free_port


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
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {own_key}.pub\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        "MaxSessions 100\n"
    )
    if os.geteuid() == 0:
        # Where sshd gives up its rights; a service file makes it elsewhere.
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [sshd, "-f", str(folder / "config")]
    # Since 9.8 it refuses an address for a while after a failed login: that of all tests.
    forgiving = [*command, "-o", "PerSourcePenalties=no"]
    if subprocess.run([*forgiving, "-t"], check=False, capture_output=True).returncode == 0:
        command = forgiving
    # To a file: it would stop at a pipe that is full, after some hundred connections.
    log = folder / "sshd.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*command, "-D", "-e"], stderr=output)
    try:
        for _ in range(3000):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30):
                break
            if server.poll() is not None:
                pytest.skip(f"sshd does not start here: {log.read_text()[-200:]}")
            time.sleep(0.02)
        # One connection for all commands: agreeing on keys is most of the work of each.
        with tempfile.TemporaryDirectory(prefix="ssh-") as control:
            command = (
                f"ssh -p {port} -i {own_key} -o ControlPath={control}/%C"
                f" -o UserKnownHostsFile={folder}/known_hosts -o StrictHostKeyChecking=accept-new"
            )
            master = subprocess.Popen([*command.split(), "-M", "-N", "127.0.0.1"])
            try:
                while not any(Path(control).iterdir()) and master.poll() is None:
                    time.sleep(0.02)
                yield command
            finally:
                master.terminate()
                master.wait()
    finally:
        server.terminate()
        server.wait()
