"""Is everything there that the work needs? The checks in their order.

In: a project, or none, and optional checks: the network, a dry run. Out: checks, each with
what it found and how to fix it. Shows no secret, changes nothing that stays.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from graftwork.pipeline.doctor.machine import DoctorCheck, check_gpus, check_machine, check_software
from graftwork.pipeline.doctor.project import (
    check_base,
    check_credentials,
    check_network,
    check_project,
    planned_disk_gib,
)
from graftwork.pipeline.reporter import Reporter
from graftwork.project.load import ProjectFolder

ACCOUNT_OF = {"s3": "AWS", "gs": "Google Cloud"}


def examine(
    project: ProjectFolder | None, *, network: bool = False, dry_run: Reporter | None = None
) -> Iterator[DoctorCheck]:
    """Yield each check as it is made. With `dry_run`, train ten steps and report them."""
    yield from _of("software", check_software(needed=project is not None))
    folder = project.state if project else Path()
    planned = planned_disk_gib(project) if project else None
    yield from _of("machine", check_machine(folder, disk_gib=planned))
    yield from _of("cards", check_gpus())
    accounts = check_credentials(
        os.environ, home=Path.home(), project=project.root if project else None, wanted=_wanted(project)
    )
    yield from _of("accounts", accounts)
    yield from _of("project", iter([check_base(project)]))
    if project is not None:
        yield from _of("project", check_project(project))
    if network:
        yield from _of("network", check_network(project))
    if project is not None and dry_run is not None:
        from graftwork.pipeline.doctor.dry_run import check_dry_run

        yield from _of("dry run", check_dry_run(project, dry_run))


def _wanted(project: ProjectFolder | None) -> frozenset[str]:
    """Accounts that the settings cannot do without."""
    if project is None:
        return frozenset()
    run = project.settings.train.run
    found = {ACCOUNT_OF.get((run.mirror or "").partition("://")[0], "")}
    if "wandb" in run.trackers and os.environ.get("WANDB_MODE", "offline") == "online":
        found.add("Weights & Biases")
    return frozenset(found - {""})


def _of(group: str, checks: Iterator[DoctorCheck]) -> Iterator[DoctorCheck]:
    for check in checks:
        yield check.model_copy(update={"group": group})
