"""trackio: a database in the run's folder, or where TRACKIO_DIR, a server or a Space is named."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.train.trackers import PROJECT, ClientRun

PACKAGE = "trackio"


def open_run(run_id: str, settings: Mapping[str, Any], folder: Path) -> ClientRun:
    # Read once, when the package is imported.
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
    import trackio

    run = trackio.init(
        os.environ.get("TRACKIO_PROJECT") or PROJECT,
        name=run_id,
        config=dict(settings),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return ClientRun(run)
