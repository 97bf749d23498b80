"""Where the figures of a run can go besides its own folder, one file a tracker, named in graft.yaml.

Every file has PACKAGE (what must be installed) and `open_run(run_id, settings, folder)`, which gives
a handle with `log(step, figures)` and `close()`. None reaches for the network unless the user's own
environment names a server. To add one: write such a file, and add its name to `Tracker` in the
training settings.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graftwork.records.errors import EnvironmentLacks, pip_install

PROJECT = "graftwork"
"""What a run is filed under, unless the user's environment says otherwise."""


class OpenRun(Protocol):
    """One run in one tracker."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """What every file of this folder offers."""

    PACKAGE: str

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path) -> OpenRun:
        """The run of this id, gone on with if it is there already. Files of its own go to `folder`."""


def load_tracker(name: str) -> Tracker:
    module: Any = importlib.import_module(f"graftwork.train.trackers.{name}")
    tracker: Tracker = module
    return tracker


def require_installed(names: Sequence[str]) -> None:
    """Said before anything is loaded, not after an hour of training."""
    for name in names:
        package = load_tracker(name).PACKAGE
        if importlib.util.find_spec(package) is None:
            raise EnvironmentLacks(
                f"the tracker {name} is not installed",
                why="`train.run.trackers` names it",
                fix=f"{pip_install(name)}, or take it off the list",
            )
