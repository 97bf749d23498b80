"""Asks the running endpoint of a project to read its settings and aliases again."""

import os
import time
from pathlib import Path

from pydantic import ValidationError

from graftwork.process.worker import lock_holder
from graftwork.records.errors import UserMistake, WorkerFailed
from graftwork.serve.reload import RESULT_FILE, ReloadResult
from graftwork.serve.reloader import RELOAD_SIGNAL, gateway_folder

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


def reload_endpoint(serving: Path) -> ReloadResult:
    """What the endpoint changed. Raises where none runs, or where it refuses the settings."""
    folder = gateway_folder(serving)
    process = lock_holder(folder)
    if process is None or process <= 0:
        raise UserMistake(
            "no endpoint of this project runs here",
            why="there is nothing to reload",
            fix="`graft serve` starts it with the settings as they are now",
            where=str(folder),
        )
    before = _read(folder)
    number = before.number if before is not None else 0
    os.kill(process, RELOAD_SIGNAL)
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline and lock_holder(folder) == process:
        result = _read(folder)
        if result is not None and result.number > number:
            return _require_success(result)
        time.sleep(_POLL_SECONDS)
    raise WorkerFailed(
        "the endpoint did not reload",
        why=f"process {process} gave no answer for {_WAIT_SECONDS:.0f} s, or has ended",
        fix="look at its output; `graft status` shows whether it answers",
    )


def _read(folder: Path) -> ReloadResult | None:
    try:
        return ReloadResult.from_json((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _require_success(result: ReloadResult) -> ReloadResult:
    if result.error is None:
        return result
    raise UserMistake(
        f"the endpoint goes on with its old settings: {result.error}",
        why="settings that are not valid change nothing",
        fix="correct graft.yaml and reload again",
    )
