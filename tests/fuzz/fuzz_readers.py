"""Breaks rows and files at random and reads them: no error but our own, and good rows survive.

    python tests/fuzz/fuzz_readers.py [--seconds N] [--seed S]

Runs until it is stopped or the time is over. What fails is printed with its seed, by which it comes
again: each round has a seed of its own.
"""

import argparse
import contextlib
import copy
import csv
import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block
from graftwork.data.settings import DataSettings, Mapping
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Interaction

TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
SEEDS = [
    {"id": "1", "messages": TURNS, "stage": 2, "agent": {"role": "coder"}, "duration_ms": 1, "reward": 0.5},
    {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [CALL]},
    {"messages": [TURNS[0], {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]},
    {"task": {"description": "t"}, "llm": {"config": {"max_tokens": 5}}, "execution": {"output": "o"}},
    {"execution": {"output": "o", "input_messages": TURNS, "status": "success"}, "agent": {"role": "coder"}},
    {"prompt": "q", "completion": "a", "session": "s", "status": "success"},
    {"instruction": "i", "input": "x", "output": "o", "history": [["q", "a"]]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "S"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'}]},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "No."}]},
    {"request": {"messages": TURNS[:1], "max_tokens": 5}, "response": {"choices": [{"message": TURNS[1]}]}},
    {"body": {"input": "q"}, "response": {"output": [{"type": "message", "content": "a"}], "status": "x"}},
    {"custom_id": "c", "body": {"prompt": "q"}, "response": {"status_code": 500, "body": {"error": {}}}},
    {
        "session_id": "s",
        "decisions": [{"situation": "q", "decision": "a", "reward": 1}],
        "code_patterns": [{"task": "t", "code": "c"}],
        "exchanges": [{"prompt": "q", "completion": "a"}],
        "feedback": [{"reviewer": "r", "approved": False}],
        "reward_signals": {"a": 1, "b": 0},
    },
    {
        "id": "c1", "at": "2025", "session": None, "model": "m", "release": "r",
        "request": {"messages": TURNS[:1]},
        "reply": "a", "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 1, "first_token_ms": 1.0,
        "total_ms": 2.0,
    },
]  # fmt: skip
JUNK = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1e308,
        2**70,
        "",
        "x",
        "\0",
        "é\u2028\ufeff",
        "{",
        "[",
        "[1]",
        '{"a": 1}',
        "12.5",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"role": "user"},
        {"type": "image"},
        [{"type": "text"}],
        "x" * 300,
        "<think>",
        float("nan"),
    ),
]
NAMES = ["messages", "prompt", "reply", "chosen", "session", "x"]
BYTES = [
    b"",
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\\",
    b"\\ud800",
    b"\xef\xbb\xbf",
    b":",
]
SETTINGS = [
    DataSettings(),
    DataSettings(reasoning="drop"),
    DataSettings(format="chat"),
    DataSettings(format="session"),
    DataSettings(mapping=Mapping(question="messages.0.content", reply="messages.-1.content", stage="stage")),
    DataSettings(mapping=Mapping(messages="messages", reply="execution", system="agent.role")),
]


class Failed(AssertionError):
    """A promise of the readers does not hold."""


def fuzz_once(folder: Path, seed: int) -> int:
    """One round. Gives the number of rows and faults that were read."""
    dice = random.Random(seed)
    good = [{"id": f"good-{place}", "messages": TURNS} for place in range(dice.randint(1, 4))]
    bad = [break_row(dice) for _ in range(dice.randint(1, 6))]
    rows: list[dict | bytes] = [*good, *bad]
    dice.shuffle(rows)
    check_lines(folder, rows, good, dice=dice)
    check_array(folder, rows, good, dice=dice)
    return check_containers(folder, [row for row in rows if isinstance(row, dict)], dice=dice)


def check_lines(folder: Path, rows: list, good: list, *, dice: random.Random) -> None:
    """Among broken lines every good one is read, at its line, however the blocks fall."""
    lines = [one_line(row) for row in rows]
    data = dice.choice([b"\n", b"\r\n"]).join(lines)
    results = read_all(folder, "log.jsonl", data, dice=dice)
    require_good(results, good, {row["id"]: place for place, row in enumerate(rows, start=1) if row in good})
    if [r.origin.line for r in results] != sorted(r.origin.line for r in results):
        raise Failed("rows are out of order")


def check_array(folder: Path, rows: list, good: list, *, dice: random.Random) -> None:
    lines = [one_line(row) for row in rows]
    data = b"[\n" + b",\n".join([one_line(good[0]), *lines]) + dice.choice([b"\n]", b"", b"\n]\n"])
    results = read_all(folder, "log.json", data, dice=dice)
    require_good(results, good, {})


def check_containers(folder: Path, rows: list[dict], *, dice: random.Random) -> int:
    """Whole files with broken bytes: errors of our own at most."""
    table = io.StringIO()
    names = sorted({key for row in rows for key in row if isinstance(key, str)} - {""}) or ["prompt"]
    writer = csv.writer(table)
    writer.writerow(names)
    writer.writerows([[json.dumps(row.get(name)) for name in names] for row in rows])
    lines = b"\n".join(one_line(row) for row in rows)
    files = {
        "log.csv": table.getvalue().encode(errors="replace"),
        "pretty.json": json.dumps(rows, indent=dice.choice([None, 1, 2])).encode(),
        "log.jsonl.gz": gzip.compress(lines, mtime=0),
        "log.jsonl.zst": zstandard.compress(lines),
        "log.parquet": as_parquet(rows),
        "noise": dice.randbytes(dice.randint(0, 200)),
    }
    found = 0
    for name, data in files.items():
        broken = break_bytes(data, dice) if dice.random() < 0.8 else data
        with contextlib.suppress(GraftError):
            found += len(read_all(folder, name, broken, dice=dice))
    return found


def read_all(folder: Path, name: str, data: bytes, *, dice: random.Random) -> list[Interaction | ReadFault]:
    (folder / name).write_bytes(data)
    settings = SETTINGS[0] if name in ("log.jsonl", "log.json") else dice.choice(SETTINGS)
    limits = {"size": dice.choice([1, 50, 300, 4 << 20]), "longest": dice.choice([2000, 32 << 20])}
    results = []
    for index, block in enumerate(cut_blocks(name, root=folder, **limits)):
        if block.index != index:
            raise Failed("blocks are not counted")
        for row in read_block(block, settings=settings):
            if row.line != row.result.origin.line or row.line < 1 or row.result.origin.file != name:
                raise Failed("a row does not know where it stood")
            results.append(row.result)
    return results


def require_good(results: list, good: list, lines: dict[str, int]) -> None:
    read = {result.id: result.origin.line for result in results if isinstance(result, Interaction)}
    for row in good:
        if row["id"] not in read:
            raise Failed(f"{row['id']} is lost")
        if lines and lines[row["id"]] != read[row["id"]]:
            raise Failed(f"{row['id']} has the wrong line")


def break_row(dice: random.Random) -> dict | bytes:
    """A row of a known shape with some values replaced, moved or lost; or its bytes broken."""
    row = copy.deepcopy(dice.choice(SEEDS))
    for _ in range(dice.randint(0, 3)):
        break_value(row, dice)
    return break_bytes(one_line(row), dice).replace(b"\n", b" ") if dice.random() < 0.4 else row


def break_value(
    row: dict, dice: random.Random, *, values: Sequence[object] = JUNK, names: Sequence[str] = NAMES
) -> None:
    places = list(walk(row))
    if not places:
        return
    holder, key = dice.choice(places)
    act = dice.random()
    if act < 0.6:
        holder[key] = copy.deepcopy(dice.choice(values))
    elif act < 0.8:
        del holder[key]
    elif isinstance(holder, dict):
        holder[dice.choice(names)] = holder.pop(key)
    else:
        holder.append(copy.deepcopy(holder[key]))


def walk(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from walk(inner)


def break_bytes(data: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randint(1, 4)):
        place = dice.randint(0, len(data))
        act = dice.random()
        if act < 0.4:
            data = data[:place] + dice.choice(BYTES) + data[place + dice.randint(0, 2) :]
        elif act < 0.6:
            data = data[:place] + data[place + dice.randint(1, 20) :]
        elif act < 0.8:
            data = data[:place] + data[max(place - 10, 0) : place] + data[place:]
        else:
            data = data[:place]
    return data


def one_line(row: dict | bytes) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def as_parquet(rows: list[dict]) -> bytes:
    out = io.BytesIO()
    texts = [
        {"prompt": json.dumps(row), "completion": str(row.get("id")), "raw": one_line(row)} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(texts or [{"prompt": "q"}]), out)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, seed = time.monotonic(), options.seed
    with tempfile.TemporaryDirectory() as folder:
        while options.seconds is None or time.monotonic() - began < options.seconds:
            try:
                fuzz_once(Path(folder), seed)
            except BaseException:
                print(f"seed {seed}")
                raise
            seed += 1
    print(f"{seed - options.seed} rounds, no fault")


if __name__ == "__main__":
    main()
