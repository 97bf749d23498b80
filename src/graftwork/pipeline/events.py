"""What happened in a run, in the order of time: steps, words, checkpoints, looks, vitals, alerts, output.

In: a run's folder. Out: events, those since the last call at each call. Reads the files that worker
and supervisor append to; none of them needs to know of another. Changes nothing.
"""

import time
from pathlib import Path
from typing import Any, Literal

from graftwork.files.journal import Journal
from graftwork.fleet.local import LOG_FILE
from graftwork.process.alert import ALERTS_FILE
from graftwork.process.vitals import VITALS_FILE
from graftwork.records.base import Record
from graftwork.train.run_folder import EVALUATIONS, MESSAGES, SAVED, STEPS

Kind = Literal["step", "word", "checkpoint", "look", "vital", "alert", "output"]

JOURNALS: dict[str, Kind] = {
    STEPS: "step",
    EVALUATIONS: "look",
    SAVED: "checkpoint",
    MESSAGES: "word",
    ALERTS_FILE: "alert",
    VITALS_FILE: "vital",
}


class Event(Record):
    """One thing that happened, at a time in seconds since 1970."""

    at: float
    kind: Kind
    body: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**self.body, "at": self.at, "kind": self.kind}


class Events:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._latest = dict.fromkeys(JOURNALS, 0.0)
        self._step_times: dict[int, float] = {}

    def new(self) -> list[Event]:
        """What was not told before, by time; what says no time comes right behind its predecessor."""
        found = [event for name in JOURNALS for event in self._of_journal(name)]
        found += self._of_output()
        return sorted(found, key=lambda event: event.at)

    def _of_journal(self, name: str) -> list[Event]:
        found = []
        for line, offset in Journal(self._folder / name).follow(self._offsets.get(name, 0)):
            self._offsets[name] = offset
            if not isinstance(line, dict):
                continue
            body = line["look"] if name == EVALUATIONS and "look" in line else line
            at = float(body.get("at") or self._step_times.get(body.get("step", -1)) or self._latest[name])
            self._latest[name] = at
            if name == STEPS:
                self._step_times[int(body["step"])] = at
            kind = JOURNALS[name]
            # An alert has a kind of its own.
            inside = {"alert": body["kind"], **body} if kind == "alert" else body
            found.append(Event(at=at, kind=kind, body=inside))
        return found

    def _of_output(self) -> list[Event]:
        """The worker's own output has no times: its lines came when the file was last written."""
        path = self._folder / LOG_FILE
        if not path.exists():
            return []
        first = LOG_FILE not in self._offsets
        start = self._offsets.get(LOG_FILE, 0)
        with path.open("rb") as handle:
            handle.seek(start)
            text = handle.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[LOG_FILE] = start + len(whole)
        at = path.stat().st_mtime if first else time.time()
        lines = whole.decode(errors="replace").splitlines()
        return [Event(at=at, kind="output", body={"text": line}) for line in lines if line.strip()]
