"""How the run of a job is kept: its vault and mirror, its watch, its deadline, its way to stop.

In: a job and its settings. Out: the parts that the loop is given. Builds them and does nothing else.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from graftwork.process import clock
from graftwork.records.base import HIDDEN, hide_login
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainJob
from graftwork.train.attend.attendant import Attendant
from graftwork.train.attend.deadline import Deadline
from graftwork.train.attend.watch import Watch
from graftwork.train.files import CHECKPOINTS
from graftwork.train.settings import TrainSettings
from graftwork.train.vault import Vault

MIRROR_PATIENCE = 600.0
MIRRORS_VARIABLE = "GRAFT_TRAIN_MIRRORS"
"""Where a worker finds the addresses of mirrors that hold a login: a job's file is kept, and holds none."""


def deadline_of(job: TrainJob, settings: TrainSettings) -> float | None:
    """When the place is gone, by the steady clock: as the job says, or so many minutes from now."""
    if job.deadline is not None:
        said = job.deadline_from or clock.now()
        return clock.steady() - clock.seconds_since(said) + (job.deadline - said.at)
    minutes = settings.run.deadline_minutes
    return clock.steady() + minutes * 60 if minutes is not None else None


def open_vault(job: TrainJob, settings: TrainSettings, *, deadline: float | None) -> Vault:
    """A mirror that cannot work at all is said now, before the hours."""
    mirror, address = None, find_mirror(job, settings, passed=_passed_mirrors())
    if address is not None:
        from graftwork.train.mirror import Mirror

        mirror = Mirror(address, run_id=job.run_id, keep=settings.keep_checkpoints)

    def patience() -> float:
        return MIRROR_PATIENCE if deadline is None else max(deadline - clock.steady() - 1, 0.0)

    return Vault(
        Path(job.folder) / CHECKPOINTS, keep=settings.keep_checkpoints, mirror=mirror, patience=patience
    )


def pass_mirrors(mirrors: Mapping[str, str | None]) -> dict[str, str]:
    """The environment that gives a worker the addresses of its runs' mirrors, by the run's id."""
    secret = {run: url for run, url in mirrors.items() if url is not None and hide_login(url) != url}
    return {MIRRORS_VARIABLE: json.dumps(secret)} if secret else {}


@cache
def _passed_mirrors() -> dict[str, str]:
    """What `pass_mirrors` gave. Taken out of the environment: what this process starts need not have it."""
    passed: dict[str, str] = json.loads(os.environ.pop(MIRRORS_VARIABLE, "{}"))
    return passed


def find_mirror(job: TrainJob, settings: TrainSettings, *, passed: Mapping[str, str]) -> str | None:
    """The mirror's address: from the job, or with its login as it was passed, by the run's id."""
    address = passed.get(job.run_id) or settings.run.mirror
    if address is not None and HIDDEN in address:
        raise EnvironmentLacks(
            "the login of the mirror is not known here",
            why="a job's file holds no secrets: `graft train` passes them to the process that it starts",
            fix="start the run with `graft train`",
            where="train.run.mirror",
        )
    return address or None


def guards(
    settings: TrainSettings, vault: Vault, *, deadline: float | None, on_word: Callable[[str], None]
) -> list[Attendant]:
    """Those who refuse a step or end the run before it is harmed."""
    found: list[Attendant] = [Watch(settings.watch, on_word=on_word)]
    if deadline is not None:
        every, seconds = settings.examine.every, settings.examine.seconds
        found.append(
            Deadline(
                deadline,
                save_seconds=lambda: vault.seconds,
                look_seconds=lambda number: seconds if every and number % every == 0 else 0.0,
            )
        )
    return found


def made_for(job: TrainJob) -> dict[str, str]:
    """What a checkpoint of this job belongs to, besides its settings and the order of its rows."""
    return {
        "dataset": job.plan.dataset_hash,
        "base": job.plan.base_fingerprint,
        "adapter": json.dumps(job.plan.train["adapter"], sort_keys=True),
    }


def pulse_that_stops(move: Callable[..., None], stop_asked: Callable[[], bool]) -> Callable[..., None]:
    """Moves the heart; asked to stop, it gives up the step between two of its parts.

    Only for who works alone: of a crew, the others would wait for ever.
    """
    from graftwork.train.loop import StepGivenUp

    def pulse(*doing: str) -> None:
        move(*doing)
        if stop_asked():
            raise StepGivenUp

    return pulse
