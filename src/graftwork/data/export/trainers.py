"""Exports for training tools: Axolotl and LLaMA-Factory."""

import re
from collections.abc import Sequence
from typing import Any

import orjson
import yaml

from graftwork.data.export.sink import (
    ExportOptions,
    Sink,
    assistant,
    plain,
    split_calls,
    split_tools,
    write_json,
)
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message

TRAIN_FLAG = "train"
FIELDS = {"role": "role", "content": "content"}


class Axolotl:
    """JSONL and the part of the configuration that reads it.

    Rules (Axolotl's pages on conversation datasets and on RLHF):
    - `type: chat_template` reads `messages` with role and content and renders them by the tokenizer's own
      template, so tool calls stay in the text as the model is trained on them;
    - with `roles_to_train: []` and `message_field_training`, a turn is trained on if its own flag says so;
      with `train_on_eos: turn`, so is the token that ends such a turn.
      Only the last turn has the flag: only the reply and its end are trained on;
    - `rl: dpo` with `type: chat_template.default` reads `messages`, `chosen` and `rejected`, in a
      configuration of its own.
    """

    def check_options(self, options: ExportOptions) -> None:
        del options

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        if row.rejected is None:
            turns = [{**plain(message), TRAIN_FLAG: False} for message in row.messages]
            sink.add_line(
                f"{split}.jsonl", {"messages": [*turns, {**assistant(row.reply), TRAIN_FLAG: True}]}
            )
            return
        pair = {"chosen": assistant(row.reply), "rejected": assistant(row.rejected)}
        sink.add_line(
            f"{split}.preference.jsonl", {"messages": [plain(message) for message in row.messages], **pair}
        )

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        del options
        _write_part(sink, dataset, file="axolotl.yaml", ending=".jsonl", reads=_supervised)
        _write_part(sink, dataset, file="axolotl-dpo.yaml", ending=".preference.jsonl", reads=_preference)
        return ("run axolotl in this folder, or put the folder before the paths in the configuration",)


def _supervised(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "ds_type": "json",
        "split": "train",
        "type": "chat_template",
        "chat_template": "tokenizer_default",
        "field_messages": "messages",
        "message_property_mappings": FIELDS,
        "roles_to_train": [],
        "train_on_eos": "turn",
        "message_field_training": TRAIN_FLAG,
    }


def _preference(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "ds_type": "json",
        "split": "train",
        "type": "chat_template.default",
        "field_messages": "messages",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "message_property_mappings": FIELDS,
        "roles": {role: [role] for role in ("system", "user", "assistant", "tool")},
    }


def _write_part(sink: Sink, dataset: Dataset, *, file: str, ending: str, reads: Any) -> None:
    """Write a configuration: the training split under `datasets`, the validation split under
    `test_datasets`.
    """
    known = {split: f"{split}{ending}" for split in ("train", "validation")}
    here = {split: name for split, name in known.items() if name in sink.rows}
    if not here:
        return
    part: dict[str, Any] = {"chat_template": "tokenizer_default"}
    if reads is _preference:
        part["rl"] = "dpo"
    for split, key in (("train", "datasets"), ("validation", "test_datasets")):
        if split in here:
            part[key] = [reads(f"./{here[split]}")]
    head = f"# Made of the dataset {dataset.content_hash[:12]}, which was rendered for {dataset.base}.\n"
    write_atomic(sink.folder / file, head + _dump(part))


def _dump(value: dict[str, Any]) -> str:
    class Plain(yaml.SafeDumper):
        """YAML without anchors, so that single entries can be copied."""

        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    text: str = yaml.dump(value, Dumper=Plain, sort_keys=False, allow_unicode=True)
    return text


NAME = re.compile(r"[A-Za-z0-9_-]+")
BETWEEN_ANSWERS = "\n</tool_response>\n<tool_response>\n"
ODD, EVEN = ("human", "observation"), ("gpt", "function_call")


class LlamaFactory:
    """ShareGPT files and `dataset_info.json`.

    Rules (the README of its data folder and its converter):
    - a file is a JSON array; `conversations` holds turns with `from` and `value`; the system prompt is
      under `system`, and the functions that may be called under `tools`, as a string of JSON;
    - human and observation are in odd places, gpt and function_call in even ones; a conversation that
      does not alternate is skipped in silence there, so it is left out by name here. Answers of several
      tools in a row become one observation, joined the way its own converter joins them;
    - the value of a function_call is JSON: the call, or a list of calls. A turn that also says something
      stays text;
    - preference pairs are marked by `ranking` and hold `chosen` and `rejected` turns;
    - earlier replies are trained on too unless `mask_history` is set, as the written settings do.
    """

    def check_options(self, options: ExportOptions) -> None:
        if options.name is not None and not NAME.fullmatch(options.name):
            raise UserMistake(
                f"{options.name!r} cannot name a dataset of LLaMA-Factory",
                why="names are joined by commas in its settings",
                fix="use letters, digits, - and _ in --name",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        conversation = split_tools(row.messages)
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

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
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
    """Return the leading system prompt separately from the other turns."""
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
    turn = split_calls(content)
    if not turn.calls or turn.text:
        return {"from": "gpt", "value": content}
    calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
    return {"from": "function_call", "value": write_json(calls if len(calls) > 1 else calls[0])}


def _find_break(turns: Sequence[dict[str, str]]) -> str | None:
    if any(turn["from"] == "system" for turn in turns):
        return "a system prompt is in the middle of the conversation"
    if len(turns) % 2 == 0 or any(turn["from"] not in (ODD, EVEN)[at % 2] for at, turn in enumerate(turns)):
        return "the turns do not alternate"
    return None
