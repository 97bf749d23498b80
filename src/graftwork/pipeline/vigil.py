"""Watch a running worker for stalls: one alert when it stands still, one when it goes on.

In: the folder of the worker, what the plan expects, an alarm. Out: alerts. Does nothing else about
it: a stalled run may still recover, and whoever is told decides.
"""

from pathlib import Path

from graftwork.process import clock
from graftwork.process.alert import Alarm
from graftwork.process.heartbeat import read_beat
from graftwork.process.judge import Patience, judge
from graftwork.process.state import process_state
from graftwork.records.job import AlertKind, Health

LOOK_SECONDS = 2.0


class Vigil:
    def __init__(
        self,
        folder: Path,
        alarm: Alarm,
        *,
        expected_seconds: float,
        patience: Patience,
    ) -> None:
        self.alarm = alarm
        self.expected_seconds = expected_seconds
        self._folder = folder
        self._patience = patience
        self._stalled_at: float | None = None
        self._looked = float("-inf")

    def look(self, pid: int) -> None:
        """As often as wanted: it looks every other second, and tells each stall once."""
        now = clock.steady()
        if now - self._looked < min(LOOK_SECONDS, self._patience.silent_seconds / 4):
            return
        self._looked = now
        beat = read_beat(self._folder)
        found = judge(
            beat,
            alive=True,
            age=clock.seconds_since(beat.moment) if beat is not None else 0.0,
            expected_seconds=self.expected_seconds,
            process_state=process_state(pid),
            patience=self._patience,
        )
        self.see(found.health, found.reason)

    def see(self, health: Health, reason: str) -> None:
        """A stall begins when it is stuck, and ends only when it works again: slow is not well."""
        if health == "stuck" and self._stalled_at is None:
            self._stalled_at = clock.steady()
            self.alarm.tell(
                "stalled",
                "the run is stuck",
                why=reason,
                fix="`graft status` says more; `graft stop` ends it",
            )
        elif health == "working" and self._stalled_at is not None:
            still = clock.steady() - self._stalled_at
            self._stalled_at = None
            self.alarm.tell("recovered", f"the run goes on after {still:.0f} s", why=reason)

    def tell(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None:
        """Something happened to the run that somebody must know."""
        self.alarm.tell(kind, what, why=why, fix=fix)

    def ended(self) -> None:
        """The worker is gone: what comes next is another one's stall."""
        self._stalled_at = None
