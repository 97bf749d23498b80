"""Trackers: where the metrics of a run go besides its own folder. One file each, named in graft.yaml.

A tracker has PACKAGE (what must be installed) and `open_run(run_id, settings, folder)`, which returns an
object with `log(step, metrics)` and `close()`. None uses the network unless the user's environment names a
server. To add a built-in one, write such a file and add its name to BUILT_IN_TRACKERS in the training
settings. Another package adds one with an entry point in the group `graftwork.trackers` that names such a
module or object.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graftwork.process.extensions import load_extension
from graftwork.records.errors import EnvironmentLacks, pip_install
from graftwork.train.settings import BUILT_IN_TRACKERS

PROJECT = "graftwork"
"""The project that runs are filed under, unless the user's environment names another."""


class TrackedRun(Protocol):
    """One run in one tracker."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class ClientRun:
    """The run of a library whose own run has `log` and `finish`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker(Protocol):
    PACKAGE: str
    """The package that must be importable."""

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path, /) -> TrackedRun:
        """Open the run of this id, or continue it if it exists. Files of the tracker go to `folder`."""


def load_tracker(name: str) -> Tracker:
    """The built-in tracker of this name, or the one that an installed package adds."""
    found: Any = (
        importlib.import_module(f"{__name__}.{name}")
        if name in BUILT_IN_TRACKERS
        else load_extension("graftwork.trackers", name, attributes=("PACKAGE", "open_run"))
    )
    tracker: Tracker = found
    return tracker


def require_installed(names: Sequence[str]) -> None:
    """Check before anything is loaded, not after an hour of training."""
    for name in names:
        package = load_tracker(name).PACKAGE
        if importlib.util.find_spec(package) is None:
            raise EnvironmentLacks(
                f"the tracker {name} is not installed",
                why="`train.run.trackers` names it",
                fix=f"{pip_install(name) if name in BUILT_IN_TRACKERS else f'pip install {package}'}, "
                "or remove it from the list",
            )
