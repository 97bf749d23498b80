"""Exports a dataset in the format of a training tool (Axolotl, LLaMA-Factory), a training service (OpenAI
fine-tuning, SageMaker) or a dataset hub (Hugging Face, Kaggle).

Input: a dataset folder, the name of a format, a target folder. Output: the files, all or none, and
`graftwork.json`, which names the dataset and every file. Rows pass one by one; they were redacted when the
dataset was prepared. Existing files are replaced only if they belong to an earlier export, or with `force`,
which leaves files of other names as they are.
"""

import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import yaml
from pydantic import ValidationError

from graftwork.data.audit.corpus_findings import say_together
from graftwork.data.export.sink import (
    EXPORT_FILE,
    Conversation,
    ExportedFile,
    ExportOptions,
    ExportRecord,
    Sink,
    TableSize,
    assistant,
    plain,
    prompt_and_replies,
    split_calls,
    split_tools,
    write_json,
)
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.files.disk import atomic_folder, explain_os_error, file_digest, sync_folder, write_atomic
from graftwork.process.extensions import extension_names, load_extension
from graftwork.records.dataset import SPLITS, Dataset, Row, Split
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message

if TYPE_CHECKING:
    import pyarrow as pa


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
        _write_part(sink, dataset, file="axolotl.yaml", ending=".jsonl", form=_SUPERVISED)
        _write_part(sink, dataset, file="axolotl-dpo.yaml", ending=".preference.jsonl", form=_PREFERENCE)
        return ("run axolotl in this folder, or put the folder before the paths in the configuration",)


_READS = {"ds_type": "json", "split": "train"}
_SUPERVISED = {
    **_READS,
    "type": "chat_template",
    "chat_template": "tokenizer_default",
    "field_messages": "messages",
    "message_property_mappings": FIELDS,
    "roles_to_train": [],
    "train_on_eos": "turn",
    "message_field_training": TRAIN_FLAG,
}
_PREFERENCE = {
    **_READS,
    "type": "chat_template.default",
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "message_property_mappings": FIELDS,
    "roles": {role: [role] for role in ("system", "user", "assistant", "tool")},
}


class _Plain(yaml.SafeDumper):
    """YAML without anchors, so that single entries can be copied."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _write_part(sink: Sink, dataset: Dataset, *, file: str, ending: str, form: dict[str, Any]) -> None:
    """Write a configuration: the training split under `datasets`, the validation split under
    `test_datasets`.
    """
    file_names = {split: f"{split}{ending}" for split in ("train", "validation")}
    written_files = {split: name for split, name in file_names.items() if name in sink.rows}
    if not written_files:
        return
    part: dict[str, Any] = {"chat_template": "tokenizer_default"}
    if form is _PREFERENCE:
        part["rl"] = "dpo"
    for split, key in (("train", "datasets"), ("validation", "test_datasets")):
        if split in written_files:
            part[key] = [{"path": f"./{written_files[split]}", **form}]
    head = f"# Made of the dataset {dataset.content_hash[:12]}, which was rendered for {dataset.base}.\n"
    text = yaml.dump(part, Dumper=_Plain, sort_keys=False, allow_unicode=True)
    write_atomic(sink.folder / file, head + text)


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
            raise UserError(
                f"{options.name!r} is not a valid name for a LLaMA-Factory dataset",
                why="its settings separate names with commas",
                fix="use letters, digits, - and _ in --name",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        conversation = split_tools(row.messages)
        system, turns = _to_turns(conversation.messages)
        functions = list(conversation.functions)
        fields = {"system": system, "tools": write_json(functions) if functions else ""}
        alternate = len(turns) % 2 and all(
            turn["from"] in (ODD, EVEN)[index % 2] for index, turn in enumerate(turns)
        )
        if any(turn["from"] == "system" for turn in turns):
            sink.leave_out(row, why="a system prompt is in the middle of the conversation")
        elif not alternate:
            sink.leave_out(row, why="the turns do not alternate")
        elif row.rejected is None:
            sink.add_item(f"{split}.json", {"conversations": [*turns, _to_reply(row.reply)], **fields})
        else:
            pair = {"chosen": _to_reply(row.reply), "rejected": _to_reply(row.rejected)}
            sink.add_item(f"{split}_preference.json", {"conversations": turns, **fields, **pair})

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        sink.close_arrays()
        name = options.name or f"graftwork_{dataset.content_hash[:8]}"
        files_by_name = {f"{name}_{file.removesuffix('.json')}": file for file in sink.rows}
        described = {
            known_name: {
                "file_name": file,
                **(_DESCRIBED_PAIRS if file.endswith("_preference.json") else _DESCRIBED),
            }
            for known_name, file in files_by_name.items()
        }
        write_atomic(
            sink.folder / "dataset_info.json", orjson.dumps(described, option=orjson.OPT_INDENT_2) + b"\n"
        )
        for file, stage, ending in (("sft.yaml", "sft", ""), ("dpo.yaml", "dpo", "_preference")):
            settings: dict[str, Any] = {"stage": stage, "dataset_dir": "."}
            for split, key in (("train", "dataset"), ("validation", "eval_dataset")):
                if f"{name}_{split}{ending}" in files_by_name:
                    settings[key] = f"{name}_{split}{ending}"
            if len(settings) > 2:
                settings |= {"mask_history": True, "train_on_prompt": False}
                write_atomic(sink.folder / file, yaml.safe_dump(settings, sort_keys=False))
        return ()


_COLUMNS = {"messages": "conversations", "system": "system", "tools": "tools"}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_DESCRIBED: dict[str, Any] = {"formatting": "sharegpt", "columns": _COLUMNS, "tags": _TAGS}
_DESCRIBED_PAIRS: dict[str, Any] = {
    "formatting": "sharegpt",
    "ranking": True,
    "columns": {**_COLUMNS, "chosen": "chosen", "rejected": "rejected"},
    "tags": _TAGS,
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


FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FEWEST_EXAMPLES = 10


class UnansweredCall(ValueError):
    """Tool calls and results do not match."""


class OpenAI:
    """OpenAI fine-tuning files.

    Rules (the fine-tuning guides and the API reference, FineTuneChatRequestInput and
    FineTunePreferenceRequestInput):
    - one JSON object per line, `messages` with the roles system, user, assistant and tool;
    - the last message is the assistant's; every assistant message is trained on unless its `weight` is 0,
      and a weight is 0 or 1, so earlier turns get 0 and the last one 1;
    - an assistant message has content, or `tool_calls` with an id, the type `function`, a name of at most
      64 letters, digits, `_` and `-`, and the arguments as a string of JSON;
    - each call is answered by a message of the role tool with its id, before any other message;
    - functions that may be called are listed under `tools`, and not in the system prompt;
    - preference pairs: `input` with the messages, `preferred_output` and `non_preferred_output` with one
      assistant message each, in a file of their own;
    - a job needs at least ten examples.
    """

    def check_options(self, options: ExportOptions) -> None:
        del options

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        try:
            conversation = split_tools(row.messages)
            names = map("call_{}".format, count(1))
            before = _to_messages(conversation.messages, names)
            reply = _to_assistant(row.reply, names)
            if row.rejected is None:
                tools = _list_tools(conversation, [*before, reply])
                earlier = [message for message in before if message["role"] == "assistant"]
                for message in earlier:
                    message["weight"] = 0
                if earlier:
                    reply["weight"] = 1
                sink.add_line(f"{split}.jsonl", {"messages": [*before, reply], **tools})
            else:
                pair = [reply, _to_assistant(row.rejected, names)]
                request = {"messages": before, **_list_tools(conversation, [*before, *pair])}
                line = {"input": request, "preferred_output": pair[:1], "non_preferred_output": pair[1:]}
                sink.add_line(f"{split}.preference.jsonl", line)
        except UnansweredCall as error:
            sink.leave_out(row, why=str(error))

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        del dataset, options
        return tuple(
            f"{name} has {rows} rows, and OpenAI asks for {FEWEST_EXAMPLES} at least"
            for name, rows in sink.rows.items()
            if name.startswith("train.") and rows < FEWEST_EXAMPLES
        )


def _to_messages(messages: Sequence[Message], names: Iterator[str]) -> list[dict[str, Any]]:
    converted, open_calls = list[dict[str, Any]](), list[str]()
    for message in messages:
        if message.role == "tool":
            if not open_calls:
                raise UnansweredCall("a tool replies without a call")
            converted.append({**plain(message), "tool_call_id": open_calls.pop(0)})
            continue
        if open_calls:
            raise UnansweredCall("a tool was called and did not reply")
        is_assistant = message.role == "assistant"
        turn: dict[str, Any] = _to_assistant(message.content, names) if is_assistant else {**plain(message)}
        open_calls = [call["id"] for call in turn.get("tool_calls", ())]
        converted.append(turn)
    if open_calls:
        raise UnansweredCall("a tool was called and did not reply")
    return converted


def _to_assistant(content: str, names: Iterator[str]) -> dict[str, Any]:
    """`names` are the ids of calls."""
    turn = split_calls(content)
    if not turn.calls or not all(FUNCTION_NAME.fullmatch(call.name) for call in turn.calls):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant"}
    if turn.text:
        message["content"] = turn.text
    message["tool_calls"] = [
        {
            "id": next(names),
            "type": "function",
            "function": {"name": call.name, "arguments": write_json(call.arguments)},
        }
        for call in turn.calls
    ]
    return message


def _list_tools(conversation: Conversation, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """List the functions that the log describes, and by name alone those that are called without a
    definition.
    """
    functions = {function["name"]: function for function in conversation.functions}
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            functions.setdefault(name, {"name": name, "parameters": {"type": "object", "properties": {}}})
    if not functions:
        return {}
    return {"tools": [{"type": "function", "function": function} for function in functions.values()]}


PLACEHOLDER = "s3://YOUR-BUCKET/YOUR-PREFIX"
S3_URI = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s?#]*)?")


class SageMaker:
    """A folder a channel, and the part of the training job that names the channels.

    Rules (the API reference of CreateTrainingJob: Channel and S3DataSource):
    - a channel has a name of at most 64 letters, digits, `.`, `-` and `_`, and a prefix in S3 under which
      all its files are; in a container they appear under /opt/ml/input/data/CHANNEL;
    - `S3DataType`, `S3Uri` and `S3DataDistributionType` say where and how; without compression in File
      mode.
    The lines hold `prompt` and `completion` as lists of messages, which trainers that know conversations
    (TRL among them) read as they are, training only on the completion; preference pairs hold `prompt`,
    `chosen` and `rejected`, in a channel of their own.
    """

    def check_options(self, options: ExportOptions) -> None:
        if options.name is not None and not S3_URI.fullmatch(options.name):
            raise UserError(
                f"{options.name!r} is not a location in S3",
                why="channels.json names the location that the folders will be copied to",
                fix="give --name s3://BUCKET/PREFIX, or leave it out and fill it in later",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        channel = split if row.rejected is None else f"{split}_preference"
        turns = prompt_and_replies(row)
        sink.add_line(f"{channel}/{channel}.jsonl", {"id": row.id, **turns, "weight": row.weight})

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        del dataset
        destination = (options.name or PLACEHOLDER).rstrip("/")
        channels = [
            {
                "ChannelName": name.partition("/")[0],
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"{destination}/{name.partition('/')[0]}/",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
                "ContentType": "application/jsonlines",
                "CompressionType": "None",
                "InputMode": "File",
            }
            for name in sink.rows
        ]
        write_atomic(
            sink.folder / "channels.json",
            orjson.dumps({"InputDataConfig": channels}, option=orjson.OPT_INDENT_2) + b"\n",
        )
        return (f"copy it before the job starts: aws s3 sync . {destination}",)


TURNS = {"default": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected")}
ABOUT = {"group": "string", "domain": "string", "stage": "int32", "weight": "float64"}
FOLDERS = {"default": "data", "preference": "preference"}


class HuggingFace:
    """A dataset folder that `load_dataset(folder)` reads, and that can be pushed as it is.

    Rules (the pages on repository structure, manual configuration and dataset cards):
    - Parquet files under `data/`, named by split and number;
    - the YAML block at the head of README.md lists under `configs` which files make which split, and under
      `dataset_info` the features, the rows and the sizes;
    - a configuration called `default` is the one loaded by default.
    The default rows hold `prompt` and `completion` as lists of messages: TRL trains on the completion of
    such rows alone. Preference pairs are in the configuration `preference`, with `prompt`, `chosen` and
    `rejected`.
    """

    def check_options(self, options: ExportOptions) -> None:
        del options

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        config = "default" if row.rejected is None else "preference"
        fields = {name: getattr(row, name) for name in ABOUT}
        record = {"id": row.id, **prompt_and_replies(row), **fields}
        sink.add_record(f"{FOLDERS[config]}/{split}", record, schema=_schema(config))

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        sizes = sink.close_tables()
        configs, infos = [], []
        for config, folder in FOLDERS.items():
            splits = {
                stem.partition("/")[2]: size for stem, size in sizes.items() if stem.startswith(f"{folder}/")
            }
            if splits:
                files = [{"split": split, "path": f"{folder}/{split}-*"} for split in splits]
                configs.append({"config_name": config, "data_files": files})
                infos.append(_describe_config(config, splits))
        head: dict[str, Any] = {"license": options.license} if options.license else {}
        if options.title or options.name:
            head["pretty_name"] = options.title or options.name
        head |= {"task_categories": ["text-generation"], "dataset_info": infos, "configs": configs}
        block = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
        write_atomic(sink.folder / "README.md", f"---\n{block}---\n\n{_card(dataset, sizes, options)}")
        return ()


@cache
def _schema(config: str) -> "pa.Schema":
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"string": pa.string(), "int32": pa.int32(), "float64": pa.float64()}
    return pa.schema(
        [
            ("id", pa.string()),
            *((name, messages) for name in TURNS[config]),
            *((name, types[kind]) for name, kind in ABOUT.items()),
        ]
    )


def _describe_config(config: str, splits: dict[str, TableSize]) -> dict[str, Any]:
    message = [{"name": "role", "dtype": "string"}, {"name": "content", "dtype": "string"}]
    return {
        "config_name": config,
        "features": [
            {"name": "id", "dtype": "string"},
            *({"name": name, "list": [dict(field) for field in message]} for name in TURNS[config]),
            *({"name": name, "dtype": kind} for name, kind in ABOUT.items()),
        ],
        "splits": [
            {"name": split, "num_bytes": size.in_memory, "num_examples": size.rows}
            for split, size in splits.items()
        ],
        "download_size": sum(size.on_disk for size in splits.values()),
        "dataset_size": sum(size.in_memory for size in splits.values()),
    }


_TRAINED = {
    "default": "Trained on is the `completion`; the `prompt` is only read.",
    "preference": "Of the replies to a `prompt`, `chosen` is preferred to `rejected`.",
}
"""What the columns are for."""


def _card(dataset: Dataset, sizes: dict[str, TableSize], options: ExportOptions) -> str:
    redacted = dataset.settings.get("redact", True)
    steps = "filtered, redacted and de-duplicated" if redacted else "filtered and de-duplicated, not redacted"
    rows = "\n".join(f"| {stem} | {size.rows} |" for stem, size in sizes.items())
    folders = {stem.partition("/")[0] for stem in sizes}
    trained = "\n".join(sentence for config, sentence in _TRAINED.items() if FOLDERS[config] in folders)
    return (
        f"# {options.title or options.name or 'Prepared agent logs'}\n\n"
        f"Prepared by Graftwork: {steps}; rows that "
        f"{say_together(str(dataset.settings.get('split_by', 'question')))} are in one split.\n"
        f"Dataset `{dataset.content_hash}`, rendered for `{dataset.base}`.\n\n"
        f"| files | rows |\n|---|---|\n{rows}\n\n"
        f"{trained}\n"
    )


ID = re.compile(r"[A-Za-z0-9_-]+/[a-z0-9]([a-z0-9-]{1,48})[a-z0-9]")
LICENSES = (
    *("CC0-1.0", "CC-BY-3.0", "CC-BY-3.0-IGO", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0"),
    *("CC-BY-NC-SA-3.0-IGO", "CC-BY-NC-SA-4.0", "CC-BY-ND-4.0", "CC-BY-NC-ND-4.0", "PDDL", "ODC-BY-1.0"),
    *("ODbL-1.0", "DbCL-1.0", "CDLA-Permissive-1.0", "CDLA-Sharing-1.0", "apache-2.0", "GPL-2.0", "GPL-3.0"),
    *("LGPL-3.0", "AGPL-3.0", "FDL-1.3", "US-Government-Works", "EU-ODP-Legal-Notice"),
    *("copyright-authors", "other", "unknown"),
)
DEFAULT_LICENSE = "unknown"
# Characters of a title.
FEWEST, MOST = 6, 50


class Kaggle:
    """Files and `dataset-metadata.json`.

    Rules (the dataset metadata page of the Kaggle command line):
    - `id` is OWNER/SLUG, the slug of 3 to 50 characters; the title has 6 to 50, the subtitle 20 to 80;
    - exactly one license, out of a list of names;
    - `resources` describes files by path; folders are skipped on upload unless asked for, so all files are
      side by side.
    The lines hold `prompt` and `completion` as lists of messages; preference pairs hold `prompt`, `chosen`
    and `rejected`, in a file of their own. Uploaded with `kaggle datasets create`, a dataset is private.
    """

    def check_options(self, options: ExportOptions) -> None:
        if options.name is None or not ID.fullmatch(options.name):
            raise UserError(
                "Kaggle needs a name of the form OWNER/slug"
                + (f", but {options.name!r} does not have it" if options.name else ""),
                why="a slug has 3 to 50 lowercase letters, digits and -",
                fix="give --name YOUR-KAGGLE-NAME/some-slug",
            )
        title = _title(options)
        if not FEWEST <= len(title) <= MOST:
            raise UserError(
                f"the title {title!r} has {len(title)} characters",
                why=f"Kaggle accepts titles of {FEWEST} to {MOST} characters",
                fix="give another --title",
            )
        if (options.license or DEFAULT_LICENSE) not in LICENSES:
            raise UserError(
                f"Kaggle does not accept the license {options.license!r}",
                why=f"it accepts {', '.join(LICENSES)}",
                fix="give one of them as --license",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        fields = {name: getattr(row, name) for name in ABOUT}
        ending = "jsonl" if row.rejected is None else "preference.jsonl"
        sink.add_line(f"{split}.{ending}", {"id": row.id, **prompt_and_replies(row), **fields})

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        rows = sum(sink.rows.values())
        metadata = {
            "title": _title(options),
            "subtitle": f"{rows} prepared rows of agent logs for fine-tuning",
            "id": options.name,
            "licenses": [{"name": options.license or DEFAULT_LICENSE}],
            "description": f"Prepared by Graftwork. Dataset {dataset.content_hash}, "
            f"rendered for {dataset.base}.",
            "resources": [
                {"path": name, "description": f"{count} rows"} for name, count in sink.rows.items()
            ],
        }
        write_atomic(
            sink.folder / "dataset-metadata.json", orjson.dumps(metadata, option=orjson.OPT_INDENT_2) + b"\n"
        )
        return ("kaggle datasets create -p FOLDER uploads it as a private dataset",)


def _title(options: ExportOptions) -> str:
    slug = (options.name or "").rpartition("/")[2]
    if options.title:
        return options.title
    title = slug.replace("-", " ").strip().capitalize()
    return title if len(title) >= FEWEST else f"{title} dataset"


def require_empty_or_own(out: Path, *, force: bool) -> None:
    """Refuse a folder with files that are not from an export."""
    if out.exists() and not out.is_dir():
        raise UserError("this is a file, not a folder", fix="specify a folder for --out", where=str(out))
    foreign = [] if force or not out.exists() else sorted(_files(out) - _own_files(out))
    if foreign:
        raise UserError(
            f"the folder contains other files: {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}",
            why="an export replaces existing files, and these are not from an export",
            fix="specify an empty folder, or add --force to write into this one",
            where=str(out),
        )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it replaces `out` when the block succeeds."""
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with atomic_folder(staged) as folder:
            yield folder
        if not out.exists() or not any(out.iterdir()):
            staged.replace(out)
        elif _files(out) <= _own_files(out):
            aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.old")
            out.replace(aside)
            try:
                staged.replace(out)
            except OSError:
                aside.replace(out)
                raise
            shutil.rmtree(aside, ignore_errors=True)
        else:
            # Among other files: one by one, the record of the export last.
            stale = _own_files(out) - _files(staged)
            for name in sorted(_files(staged), key=lambda name: (name == EXPORT_FILE, name)):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).replace(out / name)
            for name in stale:
                (out / name).unlink(missing_ok=True)
        sync_folder(out.parent)
    except OSError as error:
        raise explain_os_error(error, out) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _own_files(folder: Path) -> set[str]:
    """Return the files that an earlier export wrote here; none without its record."""
    try:
        export = ExportRecord.from_json((folder / EXPORT_FILE).read_bytes())
    except (OSError, ValidationError):
        return set()
    return {EXPORT_FILE, *(file.file for file in export.files)}


class Exporter(Protocol):
    """What an export format provides.

    To add one, name such an object in the entry points `graftwork.exporters`.
    """

    def check_options(self, options: ExportOptions, /) -> None:
        """Raise UserError for options that this format cannot use, before anything is written."""

    def add_row(self, sink: Sink, split: Split, row: Row, /) -> None:
        """Write one row to the sink, or call `sink.leave_out` with the reason."""

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions, /) -> tuple[str, ...]:
        """Write the files that describe the others. Return notes for the user."""


REQUIRED = ("check_options", "add_row", "finish")
HOLD_WEIGHTS = ("huggingface", "kaggle", "sagemaker")
EXPORTERS: dict[str, Exporter] = {
    "openai": OpenAI(),
    "huggingface": HuggingFace(),
    "kaggle": Kaggle(),
    "sagemaker": SageMaker(),
    "axolotl": Axolotl(),
    "llamafactory": LlamaFactory(),
}


def load_exporter(name: str) -> Exporter:
    """Return the built-in exporter of this name, or the one that an installed package adds."""
    if name in EXPORTERS:
        return EXPORTERS[name]
    if name not in (added := extension_names("graftwork.exporters")):
        raise UserError(
            f"unknown export format: {name!r}", fix=f"use one of {', '.join((*EXPORTERS, *added))}"
        )
    exporter: Exporter = load_extension("graftwork.exporters", name, attributes=REQUIRED)
    return exporter


def export_dataset(
    source: Path,
    out: Path,
    *,
    format_name: str,
    splits: Sequence[Split] = SPLITS,
    options: ExportOptions | None = None,
    force: bool = False,
) -> ExportRecord:
    """Write the dataset in `source` to the folder `out`."""
    options = options or ExportOptions()
    form = load_exporter(format_name)
    form.check_options(options)
    dataset = read_manifest(source)
    if not any(dataset.splits[split].rows for split in splits if split in dataset.splits):
        row_counts = ", ".join(f"{name} {summary.rows}" for name, summary in dataset.splits.items())
        raise UserError(
            f"there is nothing to export in {', '.join(splits)}",
            why=f"the dataset {dataset.content_hash[:12]} contains {row_counts} rows",
            fix="use another --split, or prepare a dataset with rows in it",
        )
    require_empty_or_own(out, force=force)
    with staged_folder(out.absolute()) as folder:
        with Sink(folder) as sink:
            counts: dict[Split, int] = {}
            pairs = weighted = 0
            for split in dict.fromkeys(splits):
                first = sink.added
                for row in iterate_rows(source, split):
                    before = sink.added
                    form.add_row(sink, split, row)
                    pairs += sink.added - before if row.rejected is not None else 0
                    weighted += row.weight != 1.0
                counts[split] = sink.added - first
            notes = form.finish(sink, dataset, options)
            if weighted and format_name not in HOLD_WEIGHTS:
                rows = f"{weighted} rows have a weight other than 1"
                notes = (*notes, f"{rows}, which {format_name} cannot store")
        files = tuple(
            ExportedFile(
                file=path.relative_to(folder).as_posix(),
                rows=sink.rows.get(path.relative_to(folder).as_posix()),
                sha256=file_digest(path),
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
        export = ExportRecord(
            format=format_name,
            dataset=dataset.content_hash,
            base=dataset.base,
            template_fingerprint=dataset.template_fingerprint,
            splits=counts,
            rows=sink.added,
            preference_rows=pairs,
            files=files,
            left_out=sink.left_out(),
            notes=notes,
        )
        write_atomic(folder / EXPORT_FILE, export.to_json() + "\n")
    return export
