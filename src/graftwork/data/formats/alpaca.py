"""Alpaca rows: `instruction`, perhaps with an `input`, and the `output`; `system` and `history` if logged.

`history` holds the rounds before: pairs of what was asked and answered.
"""

from typing import Any

from graftwork.data.formats.completion import take_prompt
from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import (
    BadRow,
    first_of,
    open_json,
    take_list,
    take_optional_text,
    take_text,
)
from graftwork.data.formats.turns import Turn, to_messages
from graftwork.records.interaction import Interaction, Origin

ALPACA_EXPECTS = "instruction and output"


def fits_alpaca(row: dict[str, Any]) -> bool:
    return row.get("instruction") is not None and ("output" in row or "response" in row)


def read_alpaca(row: dict[str, Any], origin: Origin) -> Interaction:
    said = "output" if "output" in row else "response"
    *system, asked = take_prompt(
        row["instruction"], "instruction", system=first_of(row, "system", "system_prompt")
    )
    added = take_optional_text(row.get("input"), "input")
    question = Turn("user", f"{asked.content}\n\n{added}") if added else asked
    turns = [*system, *_take_history(row.get("history")), question]
    return Interaction(
        messages=to_messages(turns, tools=row.get("tools")),
        reply="" if row.get(said) is None else take_text(row[said], said),
        **take_facts(row, origin),
    )


def _take_history(value: Any) -> list[Turn]:
    turns: list[Turn] = []
    for place, pair in enumerate(take_list(open_json(value), "history")):
        key = f"history[{place}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"`{key}` must be a pair of question and answer")
        turns.append(Turn("user", take_text(pair[0], key)))
        turns.append(Turn("assistant", take_text(pair[1], key)))
    return turns
