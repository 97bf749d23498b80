"""Which tool wrote a file, and what it says."""

from pathlib import Path

from graftwork.evaluate.exchange.foreign import ForeignRun, not_as_expected, read_document
from graftwork.evaluate.exchange.inspect_read import is_inspect, read_inspect
from graftwork.evaluate.exchange.lm_eval_read import is_lm_eval, read_lm_eval
from graftwork.records.errors import UserMistake


def read_foreign(path: Path) -> ForeignRun:
    """Told by the ending where that is enough, else by what is in the file."""
    if not path.is_file():
        raise UserMistake(
            f"there is no file {path}",
            why="results of other tools are read from files",
            fix="name the log: logs/….eval, or results_….json of lm-eval",
            where=str(path),
        )
    if path.suffix == ".eval":
        return read_inspect(path)
    if path.suffix == ".jsonl":
        return read_lm_eval(path)
    document = read_document(path)
    if is_inspect(document):
        return read_inspect(path)
    if is_lm_eval(document):
        return read_lm_eval(path)
    raise not_as_expected(
        "neither inspect-ai nor lm-eval wrote this file",
        why="it has neither `eval` and `status` nor `results`",
        where=str(path),
    )
