"""Weights & Biases: offline in the run's folder, unless WANDB_MODE says otherwise.

`wandb sync` sends an offline run later. WANDB_PROJECT names another project.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.train.trackers import PROJECT

PACKAGE = "wandb"


class WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def open_run(run_id: str, settings: Mapping[str, Any], folder: Path) -> WandbRun:
    # No error reports to the library's makers.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        id=run_id,
        name=run_id,
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE") or "offline",
        resume="allow",
        config=dict(settings),
        # The run's metrics, and nothing about the machine.
        settings=wandb.Settings(
            console="off", silent=True, disable_git=True, x_disable_meta=True, x_disable_stats=True
        ),
    )
    return WandbRun(run)
