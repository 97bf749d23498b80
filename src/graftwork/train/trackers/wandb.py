"""Weights & Biases: offline in the run's folder, unless WANDB_MODE says otherwise.

`wandb sync` sends an offline run later. WANDB_PROJECT names another project.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.train.trackers import PROJECT, ClientRun

PACKAGE = "wandb"


def open_run(run_id: str, settings: Mapping[str, Any], folder: Path) -> ClientRun:
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
    return ClientRun(run)
