"""What every place offers: `Place`, what a provider's says of itself, and the names that jobs have there.

Input: the order for a job, whose bundle is a folder here. Output: the job at the place, which any process can
poll, stop and fetch later. A place keeps no state here: the ledger does. Limits on cost are the work of
`fleet/control.py`.

To add a cloud to Graftwork:

1. A file in `places/` with its settings, its `Login`, which `graft doctor` checks, and a `CloudPlace`. If
   machines are rented and reached over SSH, subclass `RentedPlace` (`places/rented.py`); if the provider
   takes folders of files, its jobs start with `far_start.py`.
2. A line in `CLOUDS` in `places/__init__.py`, and its section in `FleetSettings` (`settings.py`).
3. With `far_start.py`: where its secrets come from in `load_secrets`, and a `Carrier` if results leave the
   machine in a way of their own.
4. Its machines and prices in `plan/catalog/data/prices.csv` and its terms in `places.csv`, with source and
   date.
5. A case in `tests/contract/cloud_cases.py` and a page in `docs/places/`.

A place in an installed package needs only the class, named under the entry point `graftwork.places`.
"""

import re
from abc import ABC
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

LABEL = re.compile(r"graft-(?P<ledger>[0-9a-f]{8})-(?P<job>[0-9a-f]{12})")
"""Name of a job at a provider. Matched as a whole: accounts are shared with other people."""


class Place(Protocol):
    name: str
    paid: bool
    """Whether jobs cost money while they exist."""

    def offer(self) -> tuple[Offer, ...]:
        """The machines that are available now, with their prices."""

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        """Start the job. If a job with the same label already exists, it is returned instead.

        Raises `Refused` if nothing was started for certain. After any other error it may have been.
        """

    def poll(self, job: PlacedJob) -> JobPoll:
        """Return the current state of the job, with its last heartbeat."""

    def log(self, job: PlacedJob) -> str:
        """The output of the job so far."""

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        """Fetch the files of the run into a folder here, including those of an unfinished run."""

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """Ask the job to stop at its next safe point; or end it and whatever bills for it, `at_once`."""

    def list(self) -> tuple[PlacedJob, ...]:
        """The jobs with a label of ours that run, or cost money, at this place."""


class Login(NamedTuple):
    """An account: the variables that hold it, all of a group together, and the file that it may be in."""

    name: str
    groups: tuple[tuple[str, ...], ...]
    file: str | None
    purpose: str
    url: str = ""
    """URL where it is used."""
    url_variable: str = ""
    """Variable that names another address."""
    mark: str = ""
    """Text that the file must contain, if it is shared with other logins."""


class CloudPlace(ABC):
    """A provider's place. Its class declares what settings, catalog and `graft doctor` need to know."""

    name: str
    login: Login | None = None
    section: str = ""
    """Key below `fleet` in graft.yaml; defaults to the name."""
    example: str = "{}"
    """The shortest section."""
    catalog: str = ""
    """Name in the catalog of prices; defaults to the name."""

    @classmethod
    def open(cls, settings: Any, *, state: Path, prices: Iterable[Offer]) -> "Place":
        """The place with its section of graft.yaml; `state` is a folder for what it must remember."""
        del state, prices
        place: Place = cls(settings)  # type: ignore[call-arg, assignment]
        return place


@runtime_checkable
class KeepsForJobs(Protocol):
    """A place that stores something for a job besides the job itself: its secrets."""

    def forget(self, label: str) -> None:
        """Delete what is stored for this label. It may not exist: a create call can fail unseen."""


@runtime_checkable
class HasHosts(Protocol):
    """A place with several machines, some of which may not answer."""

    unreached: frozenset[str]
    """Hosts that did not answer the last `list`: what they run is unknown."""


class Refused(EnvironmentFailure):
    """The place did not accept the job, and nothing of it exists there."""


class NotThere(Refused):
    """The place has no such job or file, or does not show it to this account."""


class PlaceUnreachable(EnvironmentFailure):
    """The place does not answer; the request may have been carried out."""


def make_label(key: str, job_id: str) -> str:
    """`key` names the ledger: jobs of another project are not ours."""
    return f"graft-{key}-{job_id}"


def unknown_job(place_name: str, label: str) -> GraftError:
    return EnvironmentFailure(
        f"{place_name} does not have the job {label}",
        why="it ended, was removed there, or never arrived",
        fix="`graft fleet list` shows the jobs, `graft fleet reconcile` compares them with the places",
    )
