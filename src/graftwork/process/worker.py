"""How a child process begins and ends: `python -m some.worker JOB_FILE`.

In: the job as a file. Out: an exit code of the design and, for an expected failure, `error.json`
in the job's folder, so that the parent can say what happened without parsing a traceback.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TypeVar

from graftwork.files.private import PRIVATE_UMASK, is_private
from graftwork.files.whole import write_whole
from graftwork.process import lock
from graftwork.process.exhausted import explain_exhaustion, is_exhaustion
from graftwork.process.parent import stop_with_parent
from graftwork.records.base import Record
from graftwork.records.errors import EXIT_DONE, EXIT_INTERRUPTED, EnvironmentLacks, GraftError, pip_install

ERROR_FILE = "error.json"

J = TypeVar("J", bound=Record)

stop_asked = threading.Event()
"""Set by SIGTERM: the worker ends at its next safe point and asks to be resumed."""


def run_worker(
    kind: type[J],
    folder_of: Callable[[J], Path],
    work: Callable[[J], None],
    *,
    first: bool = True,
    writes_elsewhere: bool = False,
) -> int:
    """Read the job, hold its folder, work; turn expected errors into `error.json`.

    Of several processes that do one job together, the `first` holds the folder for all. Whatever a worker
    and its libraries write is as private as its folder, unless it writes for the user elsewhere.
    """
    job = kind.from_json(Path(sys.argv[1]).read_bytes())
    folder = folder_of(job)
    if is_private(folder) and not writes_elsewhere:
        os.umask(PRIVATE_UMASK)
    signal.signal(signal.SIGTERM, _ask_to_stop)
    stop_with_parent()
    try:
        with lock.hold(folder) if first else nullcontext():
            if first:
                (folder / ERROR_FILE).unlink(missing_ok=True)
            try:
                work(job)
            except ModuleNotFoundError as missing:
                return _leave(folder, _lacks(missing))
            except GraftError as error:
                return _leave(folder, error)
            except Exception as error:
                if not is_exhaustion(error):
                    raise
                # The log gets the whole story, whoever watches the figures.
                sys.excepthook(*sys.exc_info())
                return _leave(folder, explain_exhaustion(error))
    except GraftError as error:
        print(json.dumps(error.as_json()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _leave(folder: Path, error: GraftError) -> int:
    """Say what is wrong where the parent looks for it."""
    write_whole(folder / ERROR_FILE, json.dumps(error.as_json()))
    return error.exit_code


def _lacks(missing: ModuleNotFoundError) -> GraftError:
    return EnvironmentLacks(
        f"the package {missing.name} is not installed",
        why="models run only where it is",
        fix=f"{pip_install('train')}; the extra `serve` in its place serves too",
    )


def _ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
    stop_asked.set()
