"""Tokens a second of one client: the embedded engine against llama.cpp, through `graft serve`'s own gateway.

Run: python benchmarks/serve_engines.py [--rounds 7] [--threads 1] [--save]. All endpoints run at once and are
asked in turn, so that other load on the machine hits all alike. Figures are medians of the rounds; `write` is
the speed after the first token.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from results import save_results

from graftwork.model.base import EMBEDDED, find_base
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import EngineSettings, ServeSettings

ENGINES = {
    "embedded float32": EngineSettings(device="cpu"),
    **{
        f"llama.cpp {precision}": EngineSettings(kind="llamacpp", precision=precision, context=2048)
        for precision in ("f32", "f16", "q8_0", "q4_1")
    },
}
QUESTIONS = (
    "Explain in four sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List the steps for baking bread, with reasons.",
)


@asynccontextmanager
async def endpoint(
    engine: EngineSettings, folder: Path, *, base: str, threads: int | None
) -> AsyncIterator[Client]:
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    settings = ServeSettings(port=0, threads=threads, engine=engine, capture=False)
    job = EngineJob(folder=str(folder), base_folder=base)
    project = ServedProject(resolve_aliases=dict)
    task = asyncio.create_task(
        serve(settings, engine_job=job, project=project, on_ready=ready.set_result, stop=stop)
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    yield Client(port=int(ready.result().rpartition(":")[2]))
    stop.set()
    await task


async def ask(client: Client, question: str, tokens: int) -> tuple[float, float, int]:
    """Seconds to the first token, seconds of the rest, tokens."""
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    reply = await client.send(
        "POST",
        "/v1/chat/completions",
        body=json.dumps(body).encode(),
        headers=(("content-type", "application/json"),),
    )
    first, seen = 0.0, b""
    while (chunk := await reply.next_chunk()) is not None:
        seen += chunk
        if not first and b'"content":"' in seen:
            first = time.perf_counter() - began
    total = time.perf_counter() - began
    usage = [
        json.loads(line[6:]) for line in seen.split(b"\n") if line.startswith(b"data: {") and b"usage" in line
    ]
    return first, total - first, usage[-1]["usage"]["completion_tokens"]


async def main(options: argparse.Namespace) -> dict[str, object]:
    base = find_base(EMBEDDED, project_folder=Path()).folder
    chosen = {name: engine for name, engine in ENGINES.items() if not options.only or name in options.only}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
    async with AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory() as folder:
            clients = {
                name: await stack.enter_async_context(
                    endpoint(engine, Path(folder) / str(place), base=base, threads=options.threads)
                )
                for place, (name, engine) in enumerate(chosen.items())
            }
            for number in range(options.rounds + 1):
                for name, client in clients.items():
                    answer = await ask(client, QUESTIONS[number % len(QUESTIONS)], options.tokens)
                    if number:  # the first round warms up
                        found[name].append(answer)
                        print(f"{number} {name}: {answer}", file=sys.stderr, flush=True)
            await stack.aclose()
    rows = {}
    for name, answers in found.items():
        write = statistics.median((tokens - 1) / rest for _, rest, tokens in answers)
        whole = statistics.median(tokens / (first + rest) for first, rest, tokens in answers)
        first = statistics.median(first for first, _, _ in answers)
        rows[name] = {
            "tokens_per_second": round(whole, 1),
            "write": round(write, 1),
            "first_token_s": round(first, 3),
        }
    return {"threads": options.threads, "rounds": options.rounds, "tokens": options.tokens, "engines": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", action="append", choices=list(ENGINES))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/serve_engines.json")
    asked = parser.parse_args()
    figures = asyncio.run(main(asked))
    if asked.save:
        save_results("serve_engines", figures)
    print(json.dumps(figures, indent=2))
