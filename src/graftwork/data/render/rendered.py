"""The shards of one block on disk, as an earlier run rendered them.

In: their folder. Out: a summary of the shards if they are intact, and the tokens of the conversations in
them: a block that has grown, or of which another row is dropped, is not tokenized again.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow.parquet as pq

from graftwork.files.dataset import encode_messages
from graftwork.files.disk import require_digest
from graftwork.records.dataset import Split
from graftwork.records.errors import Damaged
from graftwork.records.interaction import Message

SUMMARY = "summary.json"


class RenderedShard(NamedTuple):
    """A shard, with the length and the number in the block of each of its rows."""

    model: str
    split: Split
    file: str
    sha256: str
    trained_tokens: int
    lengths: "np.ndarray[Any, np.dtype[np.int32]]"
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"


class RenderedBlock(NamedTuple):
    """The shards of a block, the rows that are in none, and the rows that are there only in part."""

    shards: list[RenderedShard]
    refused: dict[int, str]
    shortened: dict[int, str]


def find_rendered(folder: Path) -> RenderedBlock | None:
    """Return what an earlier run rendered into this folder, if it is complete and intact."""
    try:
        summary = orjson.loads((folder / SUMMARY).read_bytes())
        for shard in summary["shards"]:
            require_digest(folder / shard["file"], shard["sha256"])
    except (FileNotFoundError, Damaged, ValueError, KeyError, TypeError):
        return None
    shards = [
        RenderedShard(
            **{
                **shard,
                "lengths": np.array(shard["lengths"], dtype=np.int32),
                "numbers": np.array(shard["numbers"], dtype=np.int64),
            }
        )
        for shard in summary["shards"]
    ]
    refused, shortened = (
        {int(number): reason for number, reason in summary[name].items()} for name in ("refused", "shortened")
    )
    return RenderedBlock(shards, refused, shortened)


class KnownRow(NamedTuple):
    tokens: Sequence[int]
    trained_from: int


class KnownTokens:
    """The tokens of the conversations in shards by the same renderer."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._known: dict[tuple[str, str], KnownRow] = {}
        for folder in folders:
            found = find_rendered(folder)
            for shard in found.shards if found is not None else ():
                self._read(folder / shard.file)

    def get(self, messages: Sequence[Message], reply: str) -> KnownRow | None:
        return self._known.get((encode_messages(messages), reply))

    def _read(self, path: Path) -> None:
        columns = ["messages", "reply", "tokens", "trained_from"]
        table = pq.read_table(path, columns=columns, use_threads=False).combine_chunks()
        tokens = table.column("tokens").combine_chunks()
        values, spans = tokens.values.to_numpy(), pairwise(tokens.offsets.to_pylist())
        messages, replies, trained = (
            table.column(name).to_pylist() for name in ("messages", "reply", "trained_from")
        )
        for text, reply, (start, stop), begins in zip(messages, replies, spans, trained, strict=True):
            self._known[text, reply] = KnownRow(values[start:stop], begins)
