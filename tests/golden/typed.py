"""`graft` commands typed in this process; with `--json`, what they print is read."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graftwork.cli import main as cli


class Typed(NamedTuple):
    exit_code: int
    document: Any
    """What standard output holds: one JSON document, or of `graft logs` one a line."""
    errors: str


def type_json(*words: str, folder: Path) -> Typed:
    """Type `graft WORDS --json` in a folder."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["graft", *words, "--json"])
        # A change of the process that only the end of a real one undoes.
        patch.setattr("sys.excepthook", cli.sys.excepthook)
        patch.setattr("sys.unraisablehook", cli.sys.unraisablehook)
        with pytest.raises(SystemExit) as left:
            cli.main()
    text = out.getvalue()
    try:
        document = json.loads(text)
    except ValueError:
        document = [json.loads(line) for line in text.splitlines()]
    return Typed(int(left.value.code or 0), document, errors.getvalue())
