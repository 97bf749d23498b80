"""What every place keeps: the tests of `test_place_contract.py` run on each of these."""

import threading
import time
from contextlib import suppress
from pathlib import Path

from graftwork.fleet.place import make_label
from graftwork.records.fleet import JobOrder

PAUSE = threading.Event()


def order(bundle, number=1, **changes):
    job_id = f"{number:012x}"
    values = {"run_id": "run1", "bundle": str(bundle), "seconds": 60.0, **changes}
    return JobOrder(job_id=job_id, label=make_label("0" * 8, job_id), **values)


def processes_with(mark):
    """The folders in /proc of processes with this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent)
    return found


def wait_for(place, job, *phases, seconds=300.0):
    """Poll until the job is in one of these phases."""
    until = time.monotonic() + seconds
    while (found := place.poll(job)).phase not in phases:
        assert time.monotonic() < until, (found, place.log(job))
        PAUSE.wait(0.1)
    return found
