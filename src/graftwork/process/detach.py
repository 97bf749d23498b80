"""Start a command that outlives the terminal: a session of its own, its output in a file.

In: the words of the command and a log file. Out: the process, deaf to the terminal's hang-up. Does not
wait for it.
"""

import os
import subprocess
from pathlib import Path

from graftwork.files.private import append_to, make_folder
from graftwork.files.whole import explain_os_error


def start_detached(words: list[str], *, log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start it in `folder`; what it says goes to the end of `log`."""
    try:
        make_folder(log.parent)
        with append_to(log) as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # No terminal is this session's: none can hang up on it.
                start_new_session=True,
            )
    except OSError as error:
        raise explain_os_error(error, log) from error
