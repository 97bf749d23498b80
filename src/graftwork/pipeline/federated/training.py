"""One round of training at all places at the same time, with retries.

In: the places, where the round starts from. Out: the trained runs, and why the other places are left out. A
place that was trained by an earlier process is not trained again.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from graftwork.fleet.settings import FederatedPlace, FederatedSettings
from graftwork.pipeline.federated.sites import SiteData, SiteRun, Sites
from graftwork.pipeline.reporter import Reporter
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder, UserMistake


class TrainedPlaces(NamedTuple):
    """By the names of the places."""

    runs: dict[str, SiteRun]
    left_out: dict[str, str]


class RoundTraining:
    def __init__(self, sites: Sites, settings: FederatedSettings, reporter: Reporter) -> None:
        self._sites, self._settings, self._reporter = sites, settings, reporter
        self._waiting = list(settings.places)
        self._running: dict[str, SiteRun] = {}
        self._data: dict[str, SiteData] = {}
        self._failures: Counter[str] = Counter()
        self._done = TrainedPlaces({}, {})

    def run(self, number: int, start: Path | None) -> TrainedPlaces:
        """Train until every place is done or was tried often enough."""
        while self._waiting or self._running:
            for site in list(self._waiting):
                self._waiting.remove(site)
                self._start(site, number, start)
            for run in list(self._running.values()):
                self._poll(run)
            if self._waiting or self._running:
                self._wait()
        return self._done

    def _start(self, site: FederatedPlace, number: int, start: Path | None) -> None:
        try:
            self._data[site.label] = self._sites.describe(site)
            _require_own_data(self._data)
            run = self._sites.plan(site, self._data[site.label], start=start, number=number)
            if run.is_trained:
                self._done.runs[site.label] = run
                return
            self._sites.start(run)
        except (Interrupted, StoppedInOrder, UserMistake):
            raise
        except GraftError as error:
            self._fail(site, error.what)
        else:
            self._running[site.label] = run

    def _poll(self, run: SiteRun) -> None:
        try:
            why = self._sites.poll(run)
        except (Interrupted, StoppedInOrder):
            raise
        except GraftError as error:
            why = error.what
        if why is None:
            return
        del self._running[run.site.label]
        if why:
            self._fail(run.site, why)
        else:
            self._done.runs[run.site.label] = run
            self._reporter.info(f"{run.site.label} has finished the round")

    def _fail(self, site: FederatedPlace, why: str) -> None:
        self._failures[site.label] += 1
        if self._failures[site.label] <= self._settings.retries:
            self._reporter.info(f"{site.label}: {why}; trying again")
            self._waiting.append(site)
        else:
            self._reporter.info(f"{site.label} is left out of the round: {why}")
            self._done.left_out[site.label] = why

    def _wait(self) -> None:
        try:
            self._sites.wait()
        except KeyboardInterrupt:
            raise Interrupted(
                "no longer following; the jobs continue at their places",
                fix="the same command resumes; `graft fleet list` shows the jobs",
            ) from None


def _require_own_data(known: dict[str, SiteData]) -> None:
    by_hash: dict[str, str] = {}
    for name, data in known.items():
        other = by_hash.setdefault(data.dataset.content_hash, name)
        if other != name:
            raise UserMistake(
                f"{other} and {name} have the same data",
                why="the same rows would be trained on twice and count twice",
                fix="name each place's own data",
                where="federated.places",
            )
