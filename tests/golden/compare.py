"""Compares a JSON value with the one stored under a path, and shows a difference line by line."""

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

MOST_LINES = 120


def check(path: Path, value: Any, update: bool) -> None:
    """Fail with a diff if `value` is not what `path` holds; with `update`, store it there instead."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.is_file():
        pytest.fail(f"{path} is missing: store it with --update-golden", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text == expected:
        return
    lines = list(
        difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"stored {path.name}", "now", "", "", 2, ""
        )
    )
    rest = [f"… and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    message = "\n".join([*lines[:MOST_LINES], *rest])
    pytest.fail(f"{message}\nIf this change is wanted: run the test with --update-golden", pytrace=False)
