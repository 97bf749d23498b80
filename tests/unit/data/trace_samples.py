"""The trace files that real libraries wrote, and how to read them."""

import json
from pathlib import Path

from graftwork.data.ingest.read import find_format, read_file, read_row
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction, Origin

FOLDER = Path(__file__).parents[2] / "data" / "traces"
HERE = Origin(file="trace.jsonl", line=3)
TOOL_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def read_sample(name, **settings):
    """Every row and fault of a sample."""
    return list(read_file(name, root=FOLDER, settings=DataSettings(**settings)))


def rows_of(name, **settings):
    found = read_sample(name, **settings)
    assert all(isinstance(row, Interaction) for row in found), found
    return found


def by_question(rows):
    found = {}
    for row in rows:
        found.setdefault(row.question, []).append(row)
    return found


def read(row, **settings):
    return list(read_row(row, HERE, settings=DataSettings(**settings)))


def format_of(row):
    return find_format(row)


def load_lines(name):
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
