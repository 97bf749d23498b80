"""Breaks traces and transcripts at random and reads them: no error but our own, and good spans survive.

    python tests/fuzz/fuzz_traces.py [--seconds N] [--seed S] [--format NAME]

The traces are those that real libraries wrote (tests/data/traces). Runs until it is stopped or the time is
over. What fails is printed with its seed, by which it comes again: each round has a seed of its own.
"""

import argparse
import contextlib
import copy
import gzip
import json
import random
import tempfile
import time
from pathlib import Path

from fuzz_readers import Failed, break_bytes, break_value, one_line

from graftwork.data.ingest.blocks import ReadFault, SkippedPart, TraceScore
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import FORMATS, read_block
from graftwork.data.settings import DataSettings
from graftwork.http.messages import ApiError
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Interaction
from graftwork.serve.otlp import BadTrace, parse_json, parse_protobuf, unpack
from graftwork.serve.project import read_traces

FOLDER = Path(__file__).parents[1] / "data" / "traces"
GOOD = {"id": "good", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LANGFUSE = [
    {
        "id": "o", "trace_id": "t", "type": "GENERATION", "session_id": "s", "level": "DEFAULT",
        "input": '[{"role": "user", "content": "q"}]', "output": '{"role": "assistant", "content": "a"}',
        "usage_details": '{"input": 1, "output": 2}', "total_cost": 0.1, "latency": 1.5,
    },
    {"id": "s", "trace_id": "t", "observation_id": "o", "name": "n", "value": 1},
]  # fmt: skip
HELICONE = [
    {
        "request_id": "r", "request_body": {"messages": [{"role": "user", "content": "q"}]},
        "response_body": {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]},
        "response_status": 200, "delay_ms": 5, "scores": {"x": 1}, "costUSD": 0.1,
    }
]  # fmt: skip
CLAUDE = [
    {
        "type": "user", "uuid": "1", "parentUuid": None, "sessionId": "s",
        "message": {"role": "user", "content": "q"},
    },
    {
        "type": "assistant", "uuid": "2", "parentUuid": "1", "sessionId": "s",
        "message": {"id": "m", "role": "assistant", "content": [{"type": "text", "text": "a"}]},
    },
    {
        "type": "assistant", "uuid": "3", "parentUuid": "2", "sessionId": "s",
        "message": {"id": "m", "content": [{"type": "tool_use", "name": "f", "input": {}}], "usage": {}},
    },
    {
        "type": "user", "uuid": "4", "parentUuid": "3", "sessionId": "s",
        "message": {"role": "user", "content": [{"type": "tool_result", "content": "r"}]},
    },
    {
        "type": "assistant", "uuid": "5", "parentUuid": "4", "sessionId": "s",
        "message": {"id": "n", "content": [{"type": "text", "text": "b"}], "stop_reason": "end_turn"},
    },
]  # fmt: skip
CODEX = [
    {"type": "session_meta", "payload": {"id": "c", "base_instructions": {"text": "S"}}},
    {"type": "response_item", "payload": {"type": "message", "role": "user", "content": "q"}},
    {"type": "response_item", "payload": {"type": "function_call", "name": "f", "arguments": "{}"}},
    {"type": "response_item", "payload": {"type": "function_call_output", "output": "r"}},
    {"type": "compacted", "payload": {"message": "m"}},
    {"type": "response_item", "payload": {"type": "message", "role": "assistant", "content": "a"}},
]


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


ROWS = {
    "otlp": [row for path in sorted(FOLDER.glob("*.otlp*.jsonl")) for row in load(path.name)],
    "mlflow": load("mlflow.jsonl"),
    "langsmith": load("langsmith.jsonl"),
    "litellm": load("litellm.jsonl"),
    "openai_stored": load("openai_stored.jsonl"),
    "langfuse": LANGFUSE,
    "helicone": HELICONE,
}
FILES = {"claude_code": CLAUDE, "codex": CODEX}
PACKED = (FOLDER / "exporter.pb.gz").read_bytes()


def fuzz_once(folder: Path, seed: int, kinds: list[str]) -> None:
    dice = random.Random(seed)
    kind = dice.choice(kinds)
    if kind == "intake":
        return check_intake(dice)
    if kind in FILES:
        return check_file(folder, kind, dice)
    return check_rows(folder, kind, dice)


def check_rows(folder: Path, kind: str, dice: random.Random) -> None:
    """Among broken rows every good one is read, at its line."""
    rows: list[dict | bytes] = [broken(dice.choice(ROWS[kind]), dice) for _ in range(dice.randint(1, 4))]
    place = dice.randint(0, len(rows))
    rows.insert(place, GOOD)
    lines = [one_line(row) for row in rows]
    settings = DataSettings(format=kind) if dice.random() < 0.3 else DataSettings()
    found = read_all(folder, "log.jsonl", b"\n".join(lines), dice, settings)
    if settings.format is None:
        good = [row for row in found if isinstance(row, Interaction) and row.id == "good"]
        if [row.origin.line for row in good] != [place + 1]:
            raise Failed("the good row is lost or has the wrong line")


def check_file(folder: Path, kind: str, dice: random.Random) -> None:
    """A transcript with broken lines or broken bytes: errors of our own at most."""
    rows = [copy.deepcopy(row) for row in FILES[kind]] * dice.randint(1, 3)
    lines = [one_line(broken(row, dice) if dice.random() < 0.4 else row) for row in rows]
    data = b"\n".join(lines)
    if dice.random() < 0.4:
        data = break_bytes(data, dice)
    name = "session.jsonl"
    if dice.random() < 0.2:
        name, data = "session.jsonl.gz", gzip.compress(data, mtime=0)[: dice.randint(20, 4000)]
    with contextlib.suppress(GraftError):
        read_all(folder, name, data, dice, DataSettings())


def check_intake(dice: random.Random) -> None:
    """Any body of `/v1/traces` is read or refused."""
    act = dice.random()
    with contextlib.suppress(BadTrace, ApiError):
        if act < 0.4:
            read_traces(parse_protobuf(break_bytes(unpack(PACKED, most=1 << 24), dice)))
        elif act < 0.5:
            unpack(break_bytes(PACKED, dice), most=1 << 20)
        else:
            row = broken(dice.choice(ROWS["otlp"]), dice)
            read_traces(parse_json(one_line(row)))


def read_all(folder: Path, name: str, data: bytes, dice: random.Random, settings: DataSettings) -> list:
    (folder / name).write_bytes(data)
    limits = {"size": dice.choice([300, 4000, 4 << 20]), "longest": 32 << 20}
    results = []
    for block in cut_blocks(name, root=folder, **limits):
        for row in read_block(block, settings=settings):
            if not isinstance(row.result, Interaction | ReadFault | SkippedPart | TraceScore):
                raise Failed("a result of another kind")
            if row.line != row.result.origin.line or row.line < 1:
                raise Failed("a row does not know where it was")
            results.append(row.result)
    return results


def broken(row: dict, dice: random.Random) -> dict | bytes:
    row = copy.deepcopy(row)
    for _ in range(dice.randint(0, 4)):
        break_value(row, dice)
    return break_bytes(one_line(row), dice).replace(b"\n", b" ") if dice.random() < 0.2 else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[*ROWS, *FILES, "intake"], default=None)
    options = parser.parse_args()
    assert set(ROWS) | set(FILES) <= set(FORMATS)
    kinds = [options.format] if options.format else [*ROWS, *FILES, "intake"]
    began, seed = time.monotonic(), options.seed
    with tempfile.TemporaryDirectory() as folder:
        while options.seconds is None or time.monotonic() - began < options.seconds:
            try:
                fuzz_once(Path(folder), seed, kinds)
            except BaseException:
                print(f"seed {seed}")
                raise
            seed += 1
    print(f"{seed - options.seed} rounds, no fault")


if __name__ == "__main__":
    main()
