"""Which files the logs of a project are, and what is in them, as the first two steps need it."""

from graftwork.data.ingest.files import STANDARD_INPUT
from graftwork.data.ingest.read import find_files
from graftwork.files.digest import file_digest
from graftwork.files.whole import explain_os_error
from graftwork.pipeline.workplace import Workplace
from graftwork.records.errors import UserMistake


def log_hashes(work: Workplace) -> dict[str, str]:
    """Every log file that `data.logs` names, with the hash of its bytes."""
    root = work.project.root
    hashes: dict[str, str] = {}
    for name in find_files(work.settings.data.logs, root=root):
        if name == STANDARD_INPUT:
            raise UserMistake(
                "a project's logs cannot come from standard input",
                why="it can be read only once, and a project reads its logs again",
                fix="write it to a file first, or look at it with `graft data audit -`",
                where="data.logs",
            )
        try:
            hashes[name] = file_digest(root / name)
        except OSError as error:
            raise explain_os_error(error, root / name) from error
    return hashes
