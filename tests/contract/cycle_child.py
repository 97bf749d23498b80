"""The coordinator that tests kill: `python cycle_child.py DATABASE FOLDER PLACE CYCLES STEP_SECONDS LEASE`.

Its steps append to `FOLDER/journal` when they begin. Their effect happens once, as the real steps do: a file
in `FOLDER/effects` that is named by the step. Prints `ready`, then `done`.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from graftwork.cycle import state as state_changes
from graftwork.cycle.coordinator import ClaimKeeper, Coordinator, CycleStepResult
from graftwork.cycle.decide import CycleFacts
from graftwork.cycle.settings import CYCLE_STEPS, CycleSettings
from graftwork.cycle.state import Holder, enqueue
from graftwork.store.cycles import CycleTable
from graftwork.store.database import open_database

state_changes.FIRST_PAUSE_SECONDS = 0.01


class Steps:
    def __init__(self, folder: Path, place: str, seconds: float) -> None:
        self._folder, self._place, self._seconds = folder, place, seconds
        (folder / "effects").mkdir(exist_ok=True)

    def measure_facts(self):
        return CycleFacts()

    def do(self, step, cycle):
        key = f"{cycle.number:03d}-{step}"
        self._note(key)
        threading.Event().wait(self._seconds * Random(key).uniform(0.2, 1.8))
        summary = {"gate": {"decision": "deploy"}, "release": {"id": f"release-{cycle.number}"}}.get(step, {})
        # The file alone: a line about it could be missing after a kill between the two.
        with suppress(FileExistsError), (self._folder / "effects" / key).open("x") as file:
            file.write(str(os.getpid()))
        return CycleStepResult(summary)

    def find_missing(self, cycle, place):
        return ""

    def abandon(self, cycle):
        pass

    def watch(self, state):
        return {}, ()

    def send(self, notice):
        return ""

    def _note(self, key):
        with (self._folder / "journal").open("a") as file:
            file.write(f"{key} {self._place} {os.getpid()}\n")


def request(state, cycles):
    """The next cycle, unless it is open or waits already."""
    number = state.cycle.number if state.cycle is not None else 0
    if state.open_cycle is not None or state.queue or number >= cycles:
        return state
    return enqueue(state, ("main",), cause="by hand")


def main(database, folder, place, cycles, seconds, lease):
    store = CycleTable(open_database(database), project="kills")
    coordinator = Coordinator(
        store=store,
        runner=Steps(Path(folder), place, float(seconds)),
        settings=CycleSettings(deliver=["here"]),
        steps=CYCLE_STEPS,
        models=("main",),
        holder=Holder(f"{place} {os.getpid()}", place),
        lease_seconds=int(lease),
    )
    coordinator.keep_claim = ClaimKeeper(coordinator).keep
    print("ready", flush=True)
    while True:
        state = store.read()
        ended = state.cycle is not None and not state.cycle.is_open
        if ended and state.cycle.number >= int(cycles):
            break
        store.change(lambda state: request(state, int(cycles)))
        coordinator.tick()
        time.sleep(0.002)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
