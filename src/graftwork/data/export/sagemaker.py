"""SageMaker: a folder a channel, and the part of the training job that names the channels.

Rules followed (the API reference of CreateTrainingJob: Channel and S3DataSource):
- a channel has a name of at most 64 letters, digits, `.`, `-` and `_`, and a prefix in S3 under which
  all its files lie; in a container they appear under /opt/ml/input/data/CHANNEL;
- `S3DataType`, `S3Uri` and `S3DataDistributionType` say where and how; without compression in File
  mode.
The lines hold `prompt` and `completion` as lists of messages, which trainers that know conversations
(TRL among them) read as they are, training on the completion alone; preference pairs hold `prompt`,
`chosen` and `rejected`, in a channel of their own.
"""

import re

import orjson

from graftwork.data.export.record import ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.data.export.turns import prompt_and_completion, prompt_and_pair
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake

PLACEHOLDER = "s3://YOUR-BUCKET/YOUR-PREFIX"
S3_URI = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s?#]*)?")


def check_options(options: ExportOptions) -> None:
    if options.name is not None and not S3_URI.fullmatch(options.name):
        raise UserMistake(
            f"{options.name!r} is no place in S3",
            why="channels.json names the place that the folders will be copied to",
            fix="give --name s3://BUCKET/PREFIX, or leave it out and fill it in later",
        )


def add_row(sink: Sink, split: Split, row: Row) -> None:
    channel = split if row.rejected is None else f"{split}_preference"
    turns = prompt_and_completion(row) if row.rejected is None else prompt_and_pair(row)
    sink.add_line(f"{channel}/{channel}.jsonl", {"id": row.id, **turns, "weight": row.weight})


def finish(sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
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
