"""How fast each format of traces is read, and how much memory a large file of OTLP takes.

The same conversations are written in every format and read in this process, on one core. The rate is in MB of
the file a second of processor time, next to that of plain chat rows, read in turn. Transcripts have calls of
tools and the fields that the agents write; what repeats a text or is no message counts as read. A transcript
states each message once and gives a row for each reply, so its rows are also written as plain chat rows, each
with its conversation, and the time to read the same rows is compared. Memory is the peak of a process that
reads one file, which repeats its first 32 MB.

    python benchmarks/trace_formats.py [--megabytes 8] [--flat-megabytes 64] [--save]     # 1024 for a GB
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
from typing import NamedTuple

from results import save_results

from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction

ROUNDS = 5
SPANS_A_LINE = 8
WORDS = ("station", "river", "bridge", "morning", "ticket", "platform", "window", "letter", "garden")

MOMENT = "2026-11-01T12:00:00.000Z"
BARE = ("claude_code (bare)", "codex (bare)")

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


def helicone(number: int, turns: Turns, reply: str) -> dict:
    about = {"request_id": str(number), "response_status": 200, "delay_ms": 1500, "costUSD": 0.1}
    counts = {
        "prompt_tokens": 200,
        "completion_tokens": 60,
        "request_model": "m",
        "scores": {"x": {"value": 1}},
    }
    return {**about, "request_body": {"messages": turns}, "response_body": response(reply), **counts}


def stored(number: int, turns: Turns, reply: str) -> dict:
    return {"id": str(number), **response(reply), "messages": turns}


ROWS: dict[str, Callable[[int, Turns, str], dict]] = {
    "chat": chat,
    "langfuse": langfuse,
    "langsmith": langsmith,
    "mlflow": mlflow,
    "litellm": litellm,
    "helicone": helicone,
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


def claude_code(dice: random.Random) -> Iterator[dict]:
    """A session as Claude Code writes it: a prompt, calls of tools with their results, an answer."""
    parent, number = None, 0

    def line(role: str, message: dict, **more: object) -> dict:
        nonlocal parent, number
        number += 1
        name = f"{number:08x}-9d0c-4a51-8d0e-0f7f9a2c51aa"
        about = {"parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/a/shop"}
        about |= {
            "sessionId": "6f0c2f0e-9d0c-4a51-8d0e-0f7f9a2c51aa",
            "version": "2.0.31",
            "gitBranch": "main",
        }
        parent = name
        return {**about, "type": role, "message": message, "uuid": name, **more, "timestamp": MOMENT}

    def reply(part: dict, reason: str | None) -> dict:
        usage = {"input_tokens": 4, "cache_creation_input_tokens": 310, "cache_read_input_tokens": 20512}
        usage |= {"output_tokens": 87, "service_tier": "standard"}
        message = {"model": "m", "id": f"msg_{number:024x}", "type": "message", "role": "assistant"}
        message |= {"content": [part], "stop_reason": reason, "stop_sequence": None, "usage": usage}
        return line("assistant", message, requestId=f"req_{number:024x}")

    while True:
        parent = None  # as after compaction
        for _ in range(4):
            yield line("user", {"role": "user", "content": text(dice, 40)})
            for _ in range(3):
                call = {"type": "tool_use", "id": f"toolu_{number:024x}", "name": "Bash"}
                yield reply({**call, "input": {"command": text(dice, 12)}}, "tool_use")
                output = text(dice, 150)
                result = {
                    "tool_use_id": call["id"],
                    "type": "tool_result",
                    "content": output,
                    "is_error": False,
                }
                kept = {"stdout": output, "stderr": "", "interrupted": False, "isImage": False}
                yield line("user", {"role": "user", "content": [result]}, toolUseResult=kept)
            yield reply({"type": "text", "text": text(dice, 60)}, "end_turn")


def codex(dice: random.Random) -> Iterator[dict]:
    """The same as Codex writes it."""

    def line(event: str, **payload: object) -> dict:
        return {"timestamp": MOMENT, "type": event, "payload": payload}

    def message(role: str, content: str) -> dict:
        kind = "output_text" if role == "assistant" else "input_text"
        return line("response_item", type="message", role=role, content=[{"type": kind, "text": content}])

    usage = {"input_tokens": 20912, "cached_input_tokens": 20512, "output_tokens": 87, "total_tokens": 20999}
    while True:
        yield line("compacted", message=text(dice, 60))
        for _ in range(4):
            asked = text(dice, 40)
            yield message("user", asked)
            yield line("event_msg", type="user_message", message=asked, kind="plain")
            for _ in range(3):
                command = json.dumps({"command": ["bash", "-lc", text(dice, 12)]})
                yield line(
                    "response_item", type="function_call", name="shell", arguments=command, call_id="c"
                )
                info = {"total_token_usage": usage, "last_token_usage": usage, "model_context_window": 272000}
                yield line("event_msg", type="token_count", info=info)
                output = json.dumps({"output": text(dice, 150), "metadata": {"exit_code": 0}})
                yield line("response_item", type="function_call_output", call_id="c", output=output)
            answer = text(dice, 60)
            yield line("event_msg", type="agent_message", message=answer)
            yield message("assistant", answer)


TRANSCRIPTS = {"claude_code": claude_code, "codex": codex}


def write_transcript(path: Path, name: str, *, size: int) -> None:
    with path.open("wb") as out:
        for row in TRANSCRIPTS[name](random.Random(0)):
            if out.tell() >= size:
                return
            out.write(json.dumps(row).encode() + b"\n")


def write_bare_transcript(path: Path, name: str, *, size: int) -> None:
    """Short turns of text alone, with no more than links: the most rows a megabyte."""
    dice = random.Random(0)
    with path.open("wb") as out:
        number, parent = 0, None
        while out.tell() < size:
            number += 1
            content = text(dice, 60 if number % 2 == 0 else 40)
            role = "assistant" if number % 2 == 0 else "user"
            if number % 20 == 1:
                parent = None  # as after compaction
            row: dict = {"type": role, "uuid": str(number), "parentUuid": parent, "sessionId": "s"}
            row["message"] = {"role": role, "content": [{"type": "text", "text": content}], "id": str(number)}
            if name.startswith("codex"):
                kind = "output_text" if role == "assistant" else "input_text"
                payload = {"type": "message", "role": role, "content": [{"type": kind, "text": content}]}
                row = {"type": "response_item", "payload": payload}
                if number % 20 == 1:
                    row = {"type": "compacted", "payload": {"message": content}}
            parent = str(number)
            out.write(json.dumps(row).encode() + b"\n")


def write(path: Path, name: str, *, size: int) -> None:
    if name in TRANSCRIPTS:
        write_transcript(path, name, size=size)
    elif name in BARE:
        write_bare_transcript(path, name, size=size)
    else:
        write_file(path, name, size=size)


def read_rows(path: Path) -> int:
    return sum(1 for _ in read_interactions(path))


def read_interactions(path: Path) -> Iterator[Interaction]:
    for block in cut_blocks(path.name, root=path.parent):
        for row in read_block(block, settings=DataSettings()):
            if isinstance(row.result, Interaction):
                yield row.result


def write_as_chat(path: Path, source: Path) -> None:
    """Write the rows of a log as plain chat rows, each with the conversation before it."""
    with path.open("wb") as out:
        for number, row in enumerate(read_interactions(source)):
            turns = [{"role": turn.role, "content": turn.content} for turn in row.messages]
            out.write(json.dumps(chat(number, turns, row.reply)).encode() + b"\n")


class Rate(NamedTuple):
    """Megabytes a second, that as a share of plain chat rows, rows, microseconds a row, and that in which the
    same rows are read as plain chat.
    """

    megabytes: float
    share: float
    rows: int
    row_us: float
    chat_row_us: float


def measure(path: Path, chat_path: Path) -> Rate:
    """Read the files in turn, so that a busy machine slows all of them."""
    same = path.with_name("same.jsonl")
    write_as_chat(same, path)
    files = (path, chat_path, same)
    rows = [read_rows(file) for file in files]
    seconds: list[list[float]] = []
    for _ in range(ROUNDS):
        seconds.append([])
        for file in files:
            began = time.process_time()
            read_rows(file)
            seconds[-1].append(time.process_time() - began)
    size, plain = path.stat().st_size, chat_path.stat().st_size
    middle = statistics.median
    return Rate(
        middle(size / own for own, _, _ in seconds) / 1e6,
        middle((size / own) / (plain / other) for own, other, _ in seconds),
        rows[0],
        middle(1e6 * own / rows[0] for own, _, _ in seconds),
        middle(1e6 * other / rows[2] for _, _, other in seconds),
    )


def write_large(path: Path, *, size: int) -> None:
    """Write a large file of OTLP: the same 32 MB again and again, which is faster."""
    write_file(path, "otlp (GenAI)", size=min(size, 32_000_000))
    piece = path.read_bytes()
    with path.open("ab") as out:
        while out.tell() < size:
            out.write(piece)


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
    parser.add_argument("--formats", nargs="*", help="only these; none without names")
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results")
    parser.add_argument("--read", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(read_rows(options.read), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    figures: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        chat_path, path = Path(folder) / "chat.jsonl", Path(folder) / "log.jsonl"
        write(chat_path, "chat", size=options.megabytes * 1_000_000)
        every = (*ROWS, *SPANS, *TRANSCRIPTS, *BARE)
        for name in every if options.formats is None else options.formats:
            write(path, name, size=options.megabytes * 1_000_000)
            rate = measure(path, chat_path)
            figures[name] = {key: round(value, 3) for key, value in rate._asdict().items()}
            print(
                f"{name:<22} {rate.megabytes:7.1f} MB/s  {rate.share:5.2f} × chat  {rate.rows:6,} rows  "
                f"{rate.row_us:6.1f} µs a row, as plain chat {rate.chat_row_us:6.1f}",
                flush=True,
            )
        flat = options.flat_megabytes
        for megabytes in (max(flat // 8, 1), flat) if flat else ():
            path = Path(folder) / "large.jsonl"
            write_large(path, size=megabytes * 1_000_000)
            rows, peak = peak_of(path)
            memory[f"OTLP of {megabytes} MB"] = {"rows": rows, "peak_mib": round(peak)}
            print(f"OTLP of {megabytes:,} MB: {rows:,} rows, peak {peak:,.0f} MiB", flush=True)
    for title, found in (("trace_formats", figures), ("otlp_memory", memory)):
        if options.save and found:
            print(save_results(title, found))


if __name__ == "__main__":
    main()
