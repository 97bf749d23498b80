"""TensorBoard: event files in the run's folder. `tensorboard --logdir .graft/runs` shows all runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE = "tensorboard"


class TensorboardRun:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        known = any(folder.glob("events.out.tfevents.*"))
        self._writer: Any = SummaryWriter(str(folder))
        if not known:
            lines = [f"    {key}: {value}" for key, value in settings.items()]
            self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        # Kept in memory, the last two minutes would die with the process.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_run(_run_id: str, settings: Mapping[str, Any], folder: Path) -> TensorboardRun:
    return TensorboardRun(folder, settings)
