"""The controlling process that tests kill: starts runs at the stand-in and reconciles until all are done.

`python fleet_child.py URL DATABASE FOLDER`; prints `ready` once it begins and `done` at its end.
"""

import secrets
import sys
from contextlib import suppress
from pathlib import Path

from graftwork.fleet.control import Controller, Safety
from graftwork.fleet.place import make_label
from graftwork.fleet.places.runpod import RunPodClient, RunPodPlace, RunPodSettings
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import GraftError
from graftwork.records.fleet import JobOrder, JobPoll
from graftwork.store.database import open_database
from graftwork.store.fleet import FleetLedger

RUNS = 3
CAPS = CapSettings(job_usd=2.0, month_usd=20.0)
SAFETY = Safety(boot_seconds=600, reconcile_seconds=300, settle_seconds=240)
WORK_SECONDS = 900


class ApiPlace(RunPodPlace):
    """Knows the end of a job by the pod's time alone: there is no SSH in this test."""

    def poll(self, job):
        pod = self._client.find(f"/v2/pods/{job.id}")
        if pod is None:
            return JobPoll(phase="gone")
        up = (pod["runtime"] or {}).get("uptime")
        phase = "starting" if up is None else "ended" if up > WORK_SECONDS else "running"
        done = phase == "ended"
        return JobPoll(phase=phase, exit_code=0 if done else None, message="done" if done else "")


def main(url, database, folder):
    client = RunPodClient("rpa_stand1nkey", base_url=url, wait=lambda _seconds: None)
    settings = RunPodSettings(public_key=str(Path(folder) / "key.pub"))
    place = ApiPlace(settings, state=Path(folder), client=client)
    ledger = FleetLedger(open_database(Path(database)), project="kills")
    controller = Controller(place, ledger, SAFETY)
    print("ready", flush=True)
    while True:
        jobs = ledger.list()
        left = {f"run{number}" for number in range(RUNS)} - {
            job.run_id for job in jobs if job.state == "done"
        }
        if not left and not any(job.is_open for job in jobs):
            break
        for run in sorted(left - {job.run_id for job in jobs if job.is_open}):
            with suppress(GraftError):
                controller.start(order(ledger, run, place), caps=CAPS, now=client.get("/clock")["now"])
        with suppress(GraftError):
            controller.reconcile(now=client.get("/clock")["now"])
    print("done", flush=True)


def order(ledger, run, place):
    job_id = secrets.token_hex(6)
    offer = place.offer()[0]
    values = {"bundle": "", "seconds": 1800.0, "usd_per_hour": offer.usd_per_hour, "gpu": offer.gpu}
    return JobOrder(job_id=job_id, label=make_label(ledger.key, job_id), run_id=run, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
