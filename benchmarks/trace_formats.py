"""How fast each format of traces is read, and how much memory a large file of OTLP takes.

The same conversations are written in every format and read in this process, on one core. The rate is in MB of
the file a second of processor time, next to that of plain chat rows. Memory is the peak of a process that
reads one file.

    python benchmarks/trace_formats.py [--megabytes 8] [--flat-megabytes 64]     # 1024 for a GB
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction

ROUNDS = 3
SPANS_A_LINE = 8
WORDS = ("station", "river", "bridge", "morning", "ticket", "platform", "window", "letter", "garden")

Turns = list[dict[str, str]]


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words)) + "."


def conversations(dice: random.Random) -> Iterator[tuple[Turns, str]]:
    """A system prompt, a few turns, a reply: about two kilobytes."""
    while True:
        turns = [{"role": "system", "content": text(dice, 60)}]
        for _ in range(dice.randint(1, 3)):
            turns += [
                {"role": "user", "content": text(dice, 40)},
                {"role": "assistant", "content": text(dice, 50)},
            ]
        turns.append({"role": "user", "content": text(dice, 40)})
        yield turns, text(dice, 60)


def chat(number: int, turns: Turns, reply: str) -> dict:
    return {"id": str(number), "messages": [*turns, {"role": "assistant", "content": reply}], "model": "m"}


def attribute(key: str, value: object) -> dict:
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": key, "value": {kind: str(value) if isinstance(value, int) else value}}


def span(number: int, facts: dict[str, object]) -> dict:
    return {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "name": "chat m",
        "startTimeUnixNano": "1794799850574747053",
        "endTimeUnixNano": "1794799850667299393",
        "attributes": [attribute(key, value) for key, value in facts.items()],
        "status": {},
    }


def genai(number: int, turns: Turns, reply: str) -> dict:
    def message(role: str, content: str) -> dict:
        return {"role": role, "parts": [{"type": "text", "content": content}]}

    asked = [message(turn["role"], turn["content"]) for turn in turns]
    facts = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 60,
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([message("assistant", reply)]),
    }
    return span(number, facts)


def openinference(number: int, turns: Turns, reply: str) -> dict:
    facts: dict[str, object] = {"openinference.span.kind": "LLM", "llm.model_name": "m"}
    for place, turn in enumerate(turns):
        facts[f"llm.input_messages.{place}.message.role"] = turn["role"]
        facts[f"llm.input_messages.{place}.message.content"] = turn["content"]
    facts["llm.output_messages.0.message.role"] = "assistant"
    facts["llm.output_messages.0.message.content"] = reply
    facts["llm.token_count.prompt"] = 200
    return span(number, facts)


def langfuse(number: int, turns: Turns, reply: str) -> dict:
    return {
        "id": str(number),
        "trace_id": str(number),
        "type": "GENERATION",
        "input": json.dumps(turns),
        "output": json.dumps({"role": "assistant", "content": reply}),
        "usage_details": '{"input": 200, "output": 60}',
        "latency": 1.5,
    }


def response(reply: str) -> dict:
    choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop", "index": 0}
    usage = {"prompt_tokens": 200, "completion_tokens": 60, "total_tokens": 260}
    return {"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def langsmith(number: int, turns: Turns, reply: str) -> dict:
    about = {"id": str(number), "run_type": "llm", "trace_id": str(number), "error": None}
    return {**about, "inputs": {"messages": turns, "model": "m"}, "outputs": response(reply)}


def mlflow(number: int, turns: Turns, reply: str) -> dict:
    attributes = {
        "mlflow.spanType": '"CHAT_MODEL"',
        "mlflow.spanInputs": json.dumps({"messages": turns, "model": "m"}),
        "mlflow.spanOutputs": json.dumps(response(reply)),
    }
    held = {"span_id": "s", "name": "x", "attributes": attributes, "status": {"code": "STATUS_CODE_OK"}}
    return {"info": {"trace_id": f"tr-{number}"}, "data": {"spans": [held]}}


def litellm(number: int, turns: Turns, reply: str) -> dict:
    about = {"id": str(number), "call_type": "completion", "status": "success", "response_cost": 0.1}
    return {**about, "messages": turns, "response": response(reply), "model": "m", "prompt_tokens": 200}


def stored(number: int, turns: Turns, reply: str) -> dict:
    return {"id": str(number), **response(reply), "messages": turns}


ROWS: dict[str, Callable[[int, Turns, str], dict]] = {
    "chat": chat,
    "langfuse": langfuse,
    "langsmith": langsmith,
    "mlflow": mlflow,
    "litellm": litellm,
    "openai_stored": stored,
}
SPANS = {"otlp (GenAI)": genai, "otlp (OpenInference)": openinference}


def batch(spans: list[dict]) -> dict:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "x"}, "spans": spans}]}]}


def write_file(path: Path, name: str, *, size: int) -> None:
    dice = random.Random(0)
    source = conversations(dice)
    number = 0
    with path.open("wb") as out:
        while out.tell() < size:
            if name in SPANS:
                made = []
                for _ in range(SPANS_A_LINE):
                    number += 1
                    made.append(SPANS[name](number, *next(source)))
                row = batch(made)
            else:
                number += 1
                row = ROWS[name](number, *next(source))
            out.write(json.dumps(row).encode() + b"\n")


def write_transcript(path: Path, name: str, *, size: int) -> None:
    """One session of short turns, cut into files as agents write them."""
    dice = random.Random(0)
    with path.open("wb") as out:
        number, parent = 0, None
        while out.tell() < size:
            number += 1
            said = text(dice, 60 if number % 2 == 0 else 40)
            role = "assistant" if number % 2 == 0 else "user"
            if number % 20 == 1:
                parent = None  # as after compaction
            row: dict = {"type": role, "uuid": str(number), "parentUuid": parent, "sessionId": "s"}
            row["message"] = {"role": role, "content": [{"type": "text", "text": said}], "id": str(number)}
            if name == "codex":
                kind = "output_text" if role == "assistant" else "input_text"
                payload = {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}
                row = {"type": "response_item", "payload": payload}
                if number % 20 == 1:
                    row = {"type": "compacted", "payload": {"message": said}}
            parent = str(number)
            out.write(json.dumps(row).encode() + b"\n")


def read_rows(path: Path) -> int:
    found = 0
    for block in cut_blocks(path.name, root=path.parent):
        for row in read_block(block, settings=DataSettings()):
            found += isinstance(row.result, Interaction)
    return found


def measure(path: Path) -> tuple[float, int]:
    """Megabytes a second, and rows."""
    taken, rows = [], 0
    for _ in range(ROUNDS):
        began = time.process_time()
        rows = read_rows(path)
        taken.append(time.process_time() - began)
    return path.stat().st_size / 1e6 / statistics.median(taken), rows


def peak_of(path: Path) -> tuple[int, float]:
    """Read a file in a process of its own: its rows and its peak memory in MiB."""
    done = subprocess.run(
        [sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True
    )
    rows, peak = done.stdout.split()
    return int(rows), int(peak) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--flat-megabytes", type=int, default=64)
    parser.add_argument("--read", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(read_rows(options.read), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    with tempfile.TemporaryDirectory() as folder:
        rates: dict[str, float] = {}
        for name in (*ROWS, *SPANS, "claude_code", "codex"):
            path = Path(folder) / "log.jsonl"
            write = write_transcript if name in ("claude_code", "codex") else write_file
            write(path, name, size=options.megabytes * 1_000_000)
            rates[name], rows = measure(path)
            share = rates[name] / rates["chat"]
            print(f"{name:<22} {rates[name]:7.1f} MB/s  {share:5.2f} × chat  {rows:,} rows", flush=True)
        for megabytes in (max(options.flat_megabytes // 8, 1), options.flat_megabytes):
            path = Path(folder) / "large.jsonl"
            write_file(path, "otlp (GenAI)", size=megabytes * 1_000_000)
            rows, peak = peak_of(path)
            print(f"OTLP of {megabytes:,} MB: {rows:,} rows, peak {peak:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
