"""Dies once, halfway, without warning, if that was asked for: so that everybody sees what it costs."""

import os
import signal
from pathlib import Path

from graftwork.files.whole import write_whole
from graftwork.train.attend.attendant import TrainingCallback
from graftwork.train.files import REHEARSED


class CrashRehearsal(TrainingCallback):
    name = "rehearsal"

    def __init__(self, folder: Path, *, checkpoint_every: int) -> None:
        self._marker = folder / REHEARSED
        self._every = checkpoint_every

    def before_step(self, number: int, steps: int) -> None:
        if self._marker.exists():
            return
        # A few steps behind a checkpoint, so that there are steps to do again.
        halfway = max(steps // 2 // self._every, 1) * self._every + min(3, self._every - 1) + 1
        if number == min(halfway, steps):
            write_whole(self._marker, f"killed before step {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)
