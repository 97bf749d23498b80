"""Picks the quick tests of what changed: the unit tests that import a changed module and do without torch.

In: `pytest --changed REVISION`. Changed are the files that differ from that revision, new ones included. A
test file counts if it changed itself or imports a changed module directly; it does without torch if
neither it nor any module that it loads imports torch at its top, and none of its fixtures is a model.
"""

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "tests" / "unit"
HEAVY = {"torch", "transformers", "safetensors"}
MODELS = {"embedded_base", "tiny_base"}
"""Fixtures that make or convert a model."""


class Changed:
    """A plugin that leaves out what is not a quick test of a change."""

    def __init__(self, revision: str) -> None:
        self._changed = _changed_files(revision)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.is_dir():
            return None if UNIT.is_relative_to(collection_path) or UNIT in collection_path.parents else True
        if collection_path.name == "conftest.py":
            return None
        if collection_path.suffix != ".py":
            return True
        direct = _imports(collection_path)
        changed = {collection_path, *map(_path_of, direct)} & self._changed
        return None if changed and not _loads_heavy(collection_path) else True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not MODELS & set(getattr(item, "fixturenames", ()))]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def _changed_files(revision: str) -> set[Path]:
    tracked = ["git", "diff", "--name-only", revision]
    untracked = ["git", "ls-files", "--others", "--exclude-standard"]
    outputs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in (tracked, untracked)
    ]
    return {ROOT / line for line in "".join(outputs).splitlines()}


@cache
def _imports(path: Path, *, at_top: bool = False) -> frozenset[str]:
    """The modules that a file imports, `from package import module` as both."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def _path_of(module: str) -> Path:
    path = ROOT / "src" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _loads_heavy(test_file: Path) -> bool:
    queue, visited = [test_file], {test_file}
    while queue:
        names = _imports(queue.pop(), at_top=True)
        if HEAVY & {name.partition(".")[0] for name in names}:
            return True
        samples = {test_file.parent / f"{name}.py" for name in names if "." not in name}
        loaded = {path for path in {*map(_path_of, names), *samples} if path.is_file()} - visited
        visited |= loaded
        queue += loaded
    return False
