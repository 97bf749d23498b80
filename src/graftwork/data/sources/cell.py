"""The cell of a table, which may hold JSON: shared by CSV and Parquet.

In: the name of a column and its text. Out: what stands there. Imports little, for the process that decodes
Parquet loads it too.
"""

from typing import Any

import orjson

from graftwork.text.json_size import has_too_many_values

# A reply may be JSON and must stay the text that it is.
TEXT_COLUMNS = frozenset(
    (
        *("prompt", "completion", "response", "question", "answer", "instruction", "input", "output"),
        *("system", "reply", "text", "content", "chosen", "rejected"),
    )
)
_MARKS_OF_STRUCTURE = {"role", "from", "choices", "body", "status_code"}


def open_cell(name: str, cell: str) -> Any:
    """What stands in a cell: nothing, JSON, or text."""
    if not cell:
        return None
    if cell[0] not in "{[" or cell.rstrip()[-1:] not in ("}", "]") or has_too_many_values(cell):
        return cell
    try:
        value = orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    if name not in TEXT_COLUMNS:
        return value
    parts = value if isinstance(value, list) else [value]
    is_structure = parts and all(isinstance(p, dict) and _MARKS_OF_STRUCTURE & p.keys() for p in parts)
    return value if is_structure else cell
