"""One task of a Slurm array: `python -m graftwork.process.cluster.slurm_task FOLDER TASK`.

In: the folder of a map, see `slurm_array.py`. Out: finished pieces, until the command closes the folder or is
gone. A task that Slurm starts again begins with the piece that it had.
"""

import json
import socket
import sys
import time
from pathlib import Path

from graftwork.process.cluster.pieces import describe_failure, require_same_code, work_on
from graftwork.process.cluster.slurm_array import (
    ALIVE,
    CLOSED,
    DONE,
    FAILED,
    ORDER,
    POLL_SECONDS,
    SHARED,
    TAKEN,
    TODO,
    put_back,
)

GONE_SECONDS = 120.0
"""A command that has not touched its file for so long is gone."""


def main(folder: Path, task: str) -> int:
    own = folder / TAKEN / task
    own.mkdir(exist_ok=True)
    put_back(folder, task)
    order = {**json.loads((folder / ORDER).read_text()), "folder": str(folder)}
    node = f"{socket.gethostname()}-{task}"
    try:
        require_same_code(order["stamp"], socket.gethostname())
        shared = (folder / SHARED).read_bytes()
        begun = time.time()
        while not (folder / CLOSED).exists() and not _is_abandoned(folder, begun):
            path = _take(folder, own)
            if path is None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                piece = path.read_bytes()
            except FileNotFoundError:
                # The command took it for lost and put it back.
                continue
            work_on({**order, "piece": path.name, "node": node}, shared, piece)
            # Not renamed: it may have been put back meanwhile.
            (folder / DONE / path.name).touch()
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        if folder.exists():
            raise
    except Exception as error:  # whatever the work raises
        (folder / FAILED / f"{task}.json").write_text(json.dumps(describe_failure(error)))
        return 1
    return 0


def _take(folder: Path, own: Path) -> Path | None:
    """Rename the first piece that no other task takes."""
    for path in sorted((folder / TODO).glob("[0-9]*")):
        try:
            path.replace(own / path.name)
        except FileNotFoundError:
            continue
        if (folder / DONE / path.name).exists():
            (own / path.name).unlink(missing_ok=True)
            continue
        return own / path.name
    return None


def _is_abandoned(folder: Path, begun: float) -> bool:
    alive = folder / ALIVE
    last = alive.stat().st_mtime if alive.exists() else begun
    return time.time() - max(last, begun) > GONE_SECONDS


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
