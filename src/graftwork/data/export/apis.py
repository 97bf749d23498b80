"""Exports for training services: OpenAI fine-tuning and SageMaker."""

import re
from collections.abc import Sequence
from typing import Any

import orjson

from graftwork.data.export.sink import (
    Conversation,
    ExportOptions,
    Sink,
    plain,
    prompt_and_completion,
    prompt_and_pair,
    split_calls,
    split_tools,
    write_json,
)
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message

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
            before = _to_messages(conversation.messages)
            names = _CallNames(before)
            reply = _to_assistant(row.reply, names)
            if row.rejected is None:
                tools = _list_tools(conversation, [*before, reply])
                sink.add_line(f"{split}.jsonl", {"messages": _weigh([*before, reply]), **tools})
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


class _CallNames:
    """Ids of calls, in order."""

    def __init__(self, messages: Sequence[dict[str, Any]] = ()) -> None:
        self._made = sum(len(message.get("tool_calls", ())) for message in messages)

    def next(self) -> str:
        self._made += 1
        return f"call_{self._made}"


def _to_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    names, made, open_calls = _CallNames(), list[dict[str, Any]](), list[str]()
    for message in messages:
        if message.role == "tool":
            if not open_calls:
                raise UnansweredCall("a tool answers without a call")
            made.append({**plain(message), "tool_call_id": open_calls.pop(0)})
            continue
        if open_calls:
            raise UnansweredCall("a tool was called and did not answer")
        is_assistant = message.role == "assistant"
        turn: dict[str, Any] = _to_assistant(message.content, names) if is_assistant else {**plain(message)}
        open_calls = [call["id"] for call in turn.get("tool_calls", ())]
        made.append(turn)
    if open_calls:
        raise UnansweredCall("a tool was called and did not answer")
    return made


def _to_assistant(content: str, names: _CallNames) -> dict[str, Any]:
    turn = split_calls(content)
    if not turn.calls or not all(FUNCTION_NAME.fullmatch(call.name) for call in turn.calls):
        return {"role": "assistant", "content": content}
    made: dict[str, Any] = {"role": "assistant"}
    if turn.text:
        made["content"] = turn.text
    made["tool_calls"] = [
        {
            "id": names.next(),
            "type": "function",
            "function": {"name": call.name, "arguments": write_json(call.arguments)},
        }
        for call in turn.calls
    ]
    return made


def _weigh(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    earlier = [message for message in messages[:-1] if message["role"] == "assistant"]
    for message in earlier:
        message["weight"] = 0
    if earlier:
        messages[-1]["weight"] = 1
    return messages


def _list_tools(conversation: Conversation, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """List the functions that the log describes, and by name alone those that are called without a
    definition.
    """
    known = {function["name"]: function for function in conversation.functions}
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            known.setdefault(name, {"name": name, "parameters": {"type": "object", "properties": {}}})
    if not known:
        return {}
    return {"tools": [{"type": "function", "function": function} for function in known.values()]}


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
    (TRL among them) read as they are, training on the completion alone; preference pairs hold `prompt`,
    `chosen` and `rejected`, in a channel of their own.
    """

    def check_options(self, options: ExportOptions) -> None:
        if options.name is not None and not S3_URI.fullmatch(options.name):
            raise UserMistake(
                f"{options.name!r} is no place in S3",
                why="channels.json names the place that the folders will be copied to",
                fix="give --name s3://BUCKET/PREFIX, or leave it out and fill it in later",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        channel = split if row.rejected is None else f"{split}_preference"
        turns = prompt_and_completion(row) if row.rejected is None else prompt_and_pair(row)
        sink.add_line(f"{channel}/{channel}.jsonl", {"id": row.id, **turns, "weight": row.weight})

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        del dataset
        place = (options.name or PLACEHOLDER).rstrip("/")
        channels = [
            {
                "ChannelName": name.partition("/")[0],
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"{place}/{name.partition('/')[0]}/",
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
        return (f"copy it before the job starts: aws s3 sync . {place}",)
