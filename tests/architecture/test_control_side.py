"""The control side runs on macOS too: no Linux-only call, path or module outside of workers."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "graftwork"
CONTROL = (
    "records",
    "files",
    "plan",
    "costmodel",
    "registry",
    "views",
    "store",
    "project",
    "pipeline",
    "api",
)
CONTROL_TOO = ("cli", "fleet", "text", "data")
ON_A_PROJECT = re.compile(r"^from graftwork\.(project|store|pipeline)\b", re.M)
WORKERS = {
    "fleet/bootstrap.py": "runs at the place",
    "fleet/far_side.py": "runs on a host",
    "fleet/runner.py": "runs at the place",
    "fleet/simulated_hosts.py": "simulated hosts need namespaces",
    "data/ingest/parquet_child.py": "a worker with a limit on its memory",
    "data/ingest/files.py": "names of pipes that a shell passes; not opened",
}
LINUX_CALLS = {
    "sched_getaffinity",
    "sched_setaffinity",
    "memfd_create",
    "pidfd_open",
    "pidfd_send_signal",
    "setns",
    "unshare",
    "epoll",
    "prctl",
    "posix_fallocate",
    "posix_fadvise",
    "sendfile",
    "splice",
    "eventfd",
    "getrandom",
    "timerfd_create",
}
LINUX_PATHS = ("/proc", "/sys/", "/dev/shm", "/run/user")
LINUX_MODULES = {"spwd", "ossaudiodev", "pyroute2", "systemd", "prctl"}


def control_files():
    for package in (*CONTROL, *CONTROL_TOO):
        for path in sorted((SOURCE / package).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            if name not in WORKERS and not name.startswith(tuple(f"{worker[:-3]}/" for worker in WORKERS)):
                yield name
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        opens_a_project = ON_A_PROJECT.search(path.read_text()) is not None
        if opens_a_project and name.split("/")[0] not in (*CONTROL, *CONTROL_TOO):
            yield name


def linux_only(tree: ast.AST) -> list[str]:
    """Calls, paths and imports that only Linux has; docstrings aside."""
    texts = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LINUX_CALLS:
            found.append(f"line {node.lineno}: {node.attr}")
        elif isinstance(node, ast.Constant) and node not in texts and isinstance(node.value, str):
            if node.value.startswith(LINUX_PATHS):
                found.append(f"line {node.lineno}: {node.value}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in LINUX_MODULES]
    return found


@pytest.mark.parametrize("name", list(control_files()))
def test_the_control_side_calls_nothing_that_only_linux_has(name):
    assert linux_only(ast.parse((SOURCE / name).read_text())) == []


def test_shared_code_asks_before_it_calls_what_only_linux_has():
    """In `process`, `model` and `engines`, whose functions run on both sides, a call needs a guard."""
    wrong = []
    for package in ("process", "model", "engines"):
        for path in sorted((SOURCE / package).rglob("*.py")):
            if "sandbox" in path.parts:
                continue
            text = path.read_text()
            guarded = "sys.platform" in text or "hasattr(os," in text
            calls = [line for line in linux_only(ast.parse(text)) if line.split(": ")[1] in LINUX_CALLS]
            wrong += [f"{path.relative_to(SOURCE)} {line}" for line in calls if not guarded]
    assert wrong == []


def test_the_check_sees_what_it_looks_for():
    text = 'import os\nos.sched_getaffinity(0)\nopen("/proc/cpuinfo")\nimport pyroute2\n'
    assert len(linux_only(ast.parse(text))) == 3
    assert linux_only(ast.parse('"""/proc is not used."""\n')) == []
