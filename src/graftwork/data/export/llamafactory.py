"""LLaMA-Factory: ShareGPT files and `dataset_info.json`.

Rules followed (the README of its data folder and its converter):
- a file is a JSON array; `conversations` holds turns with `from` and `value`; the system prompt stands
  apart under `system`, and the functions that may be called under `tools`, as a string of JSON;
- human and observation stand in odd places, gpt and function_call in even ones; a conversation that
  does not alternate is skipped in silence there, so it is left out by name here. Answers of several
  tools in a row become one observation, joined the way its own converter joins them;
- the value of a function_call is JSON: the call, or a list of calls. A turn that also says something
  stays text;
- preference pairs are marked by `ranking` and hold `chosen` and `rejected` turns;
- earlier replies are trained on too unless `mask_history` is set, which the settings beside do.
"""

import re
from collections.abc import Sequence
from typing import Any

import orjson
import yaml

from graftwork.data.export.record import ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.data.export.turns import take_calls_apart, take_tools_apart, write_json
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message

NAME = re.compile(r"[A-Za-z0-9_-]+")
BETWEEN_ANSWERS = "\n</tool_response>\n<tool_response>\n"
ODD, EVEN = ("human", "observation"), ("gpt", "function_call")


def check_options(options: ExportOptions) -> None:
    if options.name is not None and not NAME.fullmatch(options.name):
        raise UserMistake(
            f"{options.name!r} cannot name a dataset of LLaMA-Factory",
            why="names are joined by commas in its settings",
            fix="use letters, digits, - and _ in --name",
        )


def add_row(sink: Sink, split: Split, row: Row) -> None:
    conversation = take_tools_apart(row.messages)
    system, turns = _to_turns(conversation.messages)
    functions = list(conversation.functions)
    about = {"system": system, "tools": write_json(functions) if functions else ""}
    broken = _find_break(turns)
    if broken is not None:
        sink.leave_out(row, why=broken)
    elif row.rejected is None:
        sink.add_item(f"{split}.json", {"conversations": [*turns, _to_reply(row.reply)], **about})
    else:
        pair = {"chosen": _to_reply(row.reply), "rejected": _to_reply(row.rejected)}
        sink.add_item(f"{split}_preference.json", {"conversations": turns, **about, **pair})


def finish(sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
    sink.close_arrays()
    name = options.name or f"graftwork_{dataset.content_hash[:8]}"
    known = {f"{name}_{file.removesuffix('.json')}": file for file in sink.rows}
    described = {dataset_name: _describe(file) for dataset_name, file in known.items()}
    write_atomic(
        sink.folder / "dataset_info.json", orjson.dumps(described, option=orjson.OPT_INDENT_2) + b"\n"
    )
    for file, stage, ending in (("sft.yaml", "sft", ""), ("dpo.yaml", "dpo", "_preference")):
        settings: dict[str, Any] = {"stage": stage, "dataset_dir": "."}
        for split, key in (("train", "dataset"), ("validation", "eval_dataset")):
            if f"{name}_{split}{ending}" in known:
                settings[key] = f"{name}_{split}{ending}"
        if len(settings) > 2:
            settings |= {"mask_history": True, "train_on_prompt": False}
            write_atomic(sink.folder / file, yaml.safe_dump(settings, sort_keys=False))
    return ()


def _describe(file: str) -> dict[str, Any]:
    is_pair = file.endswith("_preference.json")
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    return {
        "file_name": file,
        "formatting": "sharegpt",
        **({"ranking": True} if is_pair else {}),
        "columns": columns | ({"chosen": "chosen", "rejected": "rejected"} if is_pair else {}),
        "tags": {
            "role_tag": "from",
            "content_tag": "value",
            "user_tag": "human",
            "assistant_tag": "gpt",
            "observation_tag": "observation",
            "function_tag": "function_call",
            "system_tag": "system",
        },
    }


def _to_turns(messages: Sequence[Message]) -> tuple[str, list[dict[str, str]]]:
    """The system prompt at the head apart from the rest."""
    has_system = bool(messages) and messages[0].role == "system"
    turns: list[dict[str, str]] = []
    for message in messages[1:] if has_system else messages:
        if message.role == "assistant":
            turns.append(_to_reply(message.content))
        elif message.role == "tool" and turns and turns[-1]["from"] == "observation":
            turns[-1]["value"] += BETWEEN_ANSWERS + message.content
        else:
            tag = {"tool": "observation", "user": "human"}.get(message.role, message.role)
            turns.append({"from": tag, "value": message.content})
    return messages[0].content if has_system else "", turns


def _to_reply(content: str) -> dict[str, str]:
    turn = take_calls_apart(content)
    if not turn.calls or turn.text:
        return {"from": "gpt", "value": content}
    calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
    return {"from": "function_call", "value": write_json(calls if len(calls) > 1 else calls[0])}


def _find_break(turns: Sequence[dict[str, str]]) -> str | None:
    if any(turn["from"] == "system" for turn in turns):
        return "a system prompt stands in the middle of the conversation"
    if len(turns) % 2 == 0 or any(turn["from"] not in (ODD, EVEN)[at % 2] for at, turn in enumerate(turns)):
        return "the turns do not alternate"
    return None
