"""A new project from a log: read it, find out what it is about, write graft.yaml.

In: a folder, the names of logs, the base. Out: the file and the proposal behind it. Writes that file alone.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from graftwork.data.ingest.read import Sample, sample_rows
from graftwork.data.settings import DataSettings
from graftwork.files.whole import write_whole
from graftwork.model.base import find_base, is_ready
from graftwork.model.probe import probe_device
from graftwork.model.template import Template
from graftwork.project.load import PROJECT_FILE, load_settings
from graftwork.project.propose import Proposal, measure_size, propose
from graftwork.project.starter import write_proposal, write_starter
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.interaction import Interaction

USUAL_LOGS = "logs/*.jsonl"
FEWEST_ROWS = 20
"""Fewer say too little of what a log is about."""


class Started(Record):
    """`proposal` is None where no log was named."""

    file: str
    proposal: Proposal | None = None


def start_project(folder: Path, logs: Sequence[str], *, base: str) -> Started:
    """Write graft.yaml into the folder. One that is there already is never overwritten."""
    path = folder / PROJECT_FILE
    if path.exists():
        raise UserMistake(
            f"there is a {PROJECT_FILE} already",
            why="it is yours, and is not overwritten",
            fix="edit it, or name another folder with -C",
            where=str(path),
        )
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("-._") or "project"
    if not logs and any(folder.glob(USUAL_LOGS)):
        logs = [str(folder / USUAL_LOGS)]
    if not logs:
        write_whole(path, write_starter(name=name, logs=USUAL_LOGS))
        load_settings(path)
        return Started(file=str(path))
    rows, found = _read(logs)
    size = measure_size(rows, count=_counter(base, folder))
    proposal = propose(rows, formats=found.formats, size=size)
    text = write_proposal(
        proposal,
        name=name,
        logs=[_as_seen_from(folder, log) for log in logs],
        device=probe_device(),
        base=base,
    )
    write_whole(path, text)
    load_settings(path)
    return Started(file=str(path), proposal=proposal)


def _read(logs: Sequence[str]) -> tuple[list[Interaction], Sample]:
    """The rows that a dataset would be made of, as far as that is known at a first look."""
    found = sample_rows(logs)
    good = DataSettings().keep_status
    kept = [row for row in found.rows if row.reply.strip() and _is_good(row.status, good)]
    if len(kept) < FEWEST_ROWS:
        first = f"; the first fault: {found.faults[0].message}" if found.faults else ""
        raise UserMistake(
            f"{len(kept)} usable rows are too few to find out what the log is about",
            why=f"{len(found.rows)} rows could be read, {len(found.faults)} could not{first}",
            fix=f"name a log of at least {FEWEST_ROWS} rows; `graft data audit` says what is wrong here",
            where=logs[0],
        )
    return kept, found


def _is_good(status: str | None, good: Sequence[str]) -> bool:
    return status is None or status.strip().casefold() in good


def _counter(base: str, folder: Path) -> Callable[[Interaction], tuple[int, int]] | None:
    """Counts tokens by the base's own tokenizer; None where the base is not at hand yet."""
    if not is_ready(base):
        return None
    try:
        template = Template.from_folder(Path(find_base(base, project_folder=folder).folder))
    except GraftError:
        return None

    def count(row: Interaction) -> tuple[int, int]:
        return template.count_tokens(row.messages, row.reply), template.count_text(row.reply) + 1

    return count


def _as_seen_from(folder: Path, log: str) -> str:
    """A log as graft.yaml names it: relative to the project where it lies within, else whole."""
    if log == "-" or "://" in log:
        return log
    whole = Path(log).absolute()
    inside = whole.is_relative_to(folder.absolute())
    return os.path.relpath(whole, folder.absolute()) if inside else str(whole)
