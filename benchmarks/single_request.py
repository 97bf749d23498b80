"""One request at a time on the embedded model: milliseconds a token and to the first one.

Run: python benchmarks/single_request.py [--tokens 128] [--rounds 7] [--questions 2] [--save]. On a GPU where
there is one. The same questions, greedy, through `graft serve` as a streamed request (base, and an adapter of
rank 16 on all layers), by the engine itself, and by `generate` of transformers in the same precision.
In turn, medians.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results import save_results
from serve_engines import QUESTIONS

from graftwork.inference.embedded import EmbeddedEngine, choose_device, precision_on
from graftwork.inference.engine import DecodingSettings, EngineSource
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach, save_adapter
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base
from graftwork.model.probe import name_device
from graftwork.records.interaction import Message
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

RELEASE, ALIAS = "adapter", "champion"
GOAL_MS = 5.0
"""A token on an H200."""


class Answered(NamedTuple):
    first: float
    """Seconds to the first token."""
    rest: float
    tokens: int


def make_adapter(base: Path, folder: Path) -> None:
    """A fresh adapter changes nothing and costs what any other does."""
    model = load_base(base)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = tuple(range(model.config.num_hidden_layers))
    shape = AdapterShape(rank=16, alpha=32, targets=targets, layers=layers)
    attach(model, shape, seed=0)
    save_adapter(model, folder, shape=shape, base=str(base))


@contextlib.asynccontextmanager
async def endpoint(base: Path, adapter: Path, folder: Path) -> AsyncIterator[Client]:
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    task = asyncio.create_task(
        serve(
            ServeSettings(port=0, capture=False),
            engine_job=EngineJob(folder=str(folder), base_folder=str(base), adapters={RELEASE: str(adapter)}),
            project=ServedProject(resolve_aliases=lambda: {ALIAS: RELEASE}),
            on_ready=ready.set_result,
            stop=stop,
        )
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield Client(port=int(ready.result().rpartition(":")[2]))
    finally:
        stop.set()
        await task


async def ask_endpoint(client: Client, question: str, *, model: str, tokens: int) -> Answered:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
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
    return Answered(first, total - first, usage[-1]["usage"]["completion_tokens"])


def ask_engine(engine: EmbeddedEngine, question: str, *, adapter: str | None, tokens: int) -> Answered:
    prompt = engine.render((Message(role="user", content=question),))
    written = 0
    began = time.perf_counter()
    first = 0.0

    def hear(_row: int, _token: int) -> bool:
        nonlocal written, first
        written += 1
        first = first or time.perf_counter() - began
        return True

    engine.answer([prompt], DecodingSettings(tokens), adapter=adapter, on_token=hear)
    return Answered(first, time.perf_counter() - began - first, written)


def ask_transformers(model: Any, engine: EmbeddedEngine, question: str, *, tokens: int) -> Answered:
    """The first token by a call for one; the rest is what a call for all takes longer."""
    prompt = engine.render((Message(role="user", content=question),)).tokens
    ids = torch.tensor([prompt], device=model.device)
    settings = {"do_sample": False, "eos_token_id": engine.template.eos, "pad_token_id": engine.template.eos}

    def generate(most: int) -> tuple[float, int]:
        began = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **settings)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, out.shape[1] - ids.shape[1]

    first, _ = generate(1)
    whole, written = generate(tokens)
    return Answered(first, max(whole - first, 0.0), written)


def summarize(answers: list[Answered]) -> dict[str, float]:
    each = [1000 * answer.rest / max(answer.tokens - 1, 1) for answer in answers]
    return {
        "ms_a_token": round(statistics.median(each), 2),
        "slowest_ms_a_token": round(max(each), 2),
        "first_token_ms": round(1000 * statistics.median(answer.first for answer in answers), 1),
        "tokens": round(statistics.median(answer.tokens for answer in answers)),
    }


async def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base, adapter = Path(find_base(EMBEDDED, project_folder=folder).folder), folder / "adapter"
    make_adapter(base, adapter)
    device = choose_device("auto", has_gpu=torch.cuda.is_available)
    source = EngineSource(
        base_folder=base, adapters={RELEASE: adapter}, device=device, precision=precision_on(device), rows=8
    )
    engine = EmbeddedEngine(source)
    peer = load_base(base, dtype=precision_on(device), device=device)
    tokens = asked.tokens
    found: dict[str, list[Answered]] = {}
    async with endpoint(base, adapter, folder / "engine") as client:
        direct: dict[str, Callable[[str], Answered]] = {
            "engine, base": lambda text: ask_engine(engine, text, adapter=None, tokens=tokens),
            "engine, adapter": lambda text: ask_engine(engine, text, adapter=RELEASE, tokens=tokens),
            "transformers, base": lambda text: ask_transformers(peer, engine, text, tokens=tokens),
        }
        # The first rounds warm up: a GPU records the passes of each question's length.
        questions = QUESTIONS[: asked.questions]
        for number in range(asked.rounds + 2 * len(questions)):
            question, warm = questions[number % len(questions)], number >= 2 * len(questions)
            for name, model in (("served, base", "base"), ("served, adapter", ALIAS)):
                answer = await ask_endpoint(client, question, model=model, tokens=tokens)
                found.setdefault(name, []).extend([answer] if warm else [])
            for name, ask in direct.items():
                if name.startswith("transformers") and 0 < number < 2 * len(questions):
                    continue  # it records nothing: one call has warmed it up
                answer = await asyncio.to_thread(ask, question)
                found.setdefault(name, []).extend([answer] if warm else [])
            print(
                number, {name: answers[-1:] for name, answers in found.items()}, file=sys.stderr, flush=True
            )
    return {
        "device": device,
        "precision": precision_on(device),
        "goal_ms_a_token": GOAL_MS,
        "rounds": asked.rounds,
        "ways": {name: summarize(answers) for name, answers in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="different ones, in turn")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(asked, Path(folder)))
    print(json.dumps(figures), flush=True)
    if asked.save:
        save_results(f"single_request_{name_device().kind}", figures, device=name_device().name)


if __name__ == "__main__":
    main()
