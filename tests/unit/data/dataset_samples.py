"""Small dataset folders, and a tokenizer of bytes that needs no model."""

import codecs
import json
from pathlib import Path

from graftwork.data.ingest.read import hash_line
from graftwork.files.dataset import (
    DROPS,
    MANIFEST,
    OPTIONAL,
    drops_table,
    encode_optional,
    hash_manifest,
    row_schema,
    write_table,
)
from graftwork.files.disk import file_digest
from graftwork.records.dataset import Dataset, InputFile, Row, Shard, SplitSummary
from graftwork.records.interaction import Message, Origin

CONTROL = {256: "<|user|>", 257: "<|assistant|>", 258: "<|end|>"}


class ByteDecoder:
    """Every byte is a token; three tokens more are control tokens."""

    control_tokens = frozenset(CONTROL)

    def decode_pieces(self, tokens):
        incremental = codecs.getincrementaldecoder("utf-8")("replace")
        return [
            CONTROL[token] if token in CONTROL else incremental.decode(bytes([token])) for token in tokens
        ]


def write_tokenizer(file: Path) -> None:
    """The same tokenizer as a tokenizer.json: the ids of the bytes are the bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL.values()])
    tokenizer.save(str(file))


def _encode_messages(messages):
    return json.dumps([{"role": message.role, "content": message.content} for message in messages])


def rows_table(rows):
    """Rows as a table, the same bytes for the same rows once it is written."""
    import pyarrow as pa

    columns = {
        "id": [row.id for row in rows],
        "file": [row.origin.file for row in rows],
        "line": [row.origin.line for row in rows],
        "input_hash": [row.input_hash for row in rows],
        "messages": [_encode_messages(row.messages) for row in rows],
        "reply": [row.reply for row in rows],
        "tokens": [row.tokens for row in rows],
        "trained_from": [row.trained_from for row in rows],
    }
    for name in ("group", "domain", "session", "stage", "weight", "duration_ms", "rejected", "reward"):
        columns[name] = [getattr(row, name) for row in rows]
    optional = encode_optional({name: [getattr(row, name) for row in rows] for name in OPTIONAL})
    return pa.table(columns | optional, schema=row_schema(optional=tuple(optional)))


def row(
    question, reply="a fine answer", *, line=1, file="log.jsonl", turns=(), rejected=None, raw=b"", **more
):
    """`turns` are (role, content) before the question."""
    messages = [Message(role=role, content=content) for role, content in turns]
    if question is not None:
        messages.append(Message(role="user", content=question))
    prompt = [token for message in messages for token in (256, *message.content.encode(), 258)] + [257]
    values = {"id": f"{file}:{line}", "group": "writer", "input_hash": hash_line(raw) if raw else "", **more}
    return Row(
        origin=Origin(file=file, line=line),
        messages=tuple(messages),
        reply=reply,
        rejected=rejected,
        tokens=(*prompt, *reply.encode(), 258),
        trained_from=len(prompt),
        **values,
    )


def write_dataset(root: Path, *, drops=(), inputs=None, settings=None, shard_rows=2, **splits) -> Path:
    """Shards of `shard_rows` rows, the drops and the manifest, in a folder named by its content."""
    more = {key: splits.pop(key) for key in ("base", "base_fingerprint", "model") if key in splits}
    staged = root / "staged"
    summaries = {split: _write_split(staged, split, rows, shard_rows) for split, rows in splits.items()}
    write_table(staged / DROPS, drops_table(drops))
    files = dict.fromkeys(
        [*(row.origin.file for rows in splits.values() for row in rows), *(d.origin.file for d in drops)]
    )
    dataset = Dataset(
        content_hash="",
        **{"base": "base", "base_fingerprint": "b" * 64, **more},
        template_fingerprint="t" * 64,
        tokenizer_fingerprint="k" * 64,
        inputs=inputs or tuple(InputFile(file=file, sha256="0" * 64, rows=9) for file in files),
        splits={
            split: summaries.get(split, _write_split(staged, split, [], 1))
            for split in ("train", "validation", "test", *splits)
        },
        kept_after={"read": 9},
        drops=Shard(file=DROPS, rows=len(drops), sha256=file_digest(staged / DROPS)),
        redactions={},
        settings=settings or {"seed": 0},
    )
    dataset = dataset.model_copy(update={"content_hash": hash_manifest(dataset)})
    (staged / MANIFEST).write_text(dataset.to_json())
    return staged.rename(root / dataset.content_hash)


def _write_split(folder, split, rows, shard_rows):
    shards = []
    for start in range(0, len(rows), shard_rows):
        part = rows[start : start + shard_rows]
        name = f"{split}-{start}.parquet"
        write_table(folder / name, rows_table(part))
        shards.append(Shard(file=name, rows=len(part), sha256=file_digest(folder / name)))
    return SplitSummary(
        rows=len(rows),
        groups=len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(len(row.tokens) - row.trained_from for row in rows),
        longest=max((len(row.tokens) for row in rows), default=0),
        shards=tuple(shards),
    )
