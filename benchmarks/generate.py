"""Generation by the embedded engine against transformers' `generate`: one request, and the demo's answers.

Run: python benchmarks/generate.py [--device cuda] [--json] [--save]. Same model, precision, prompts and
limits in the same run, greedy; rounds interleaved, medians. The engine is asked as evaluation and serving ask
it, the peers the way most scripts ask. `first use` includes what is recorded on a card.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import save_results

from graftwork.inference.embedded import EmbeddedEngine
from graftwork.inference.engine import DecodingSettings, EngineSource, RenderedPrompt
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base
from graftwork.records.interaction import Message

LOG = Path(__file__).parents[1] / "examples" / "cited_answers" / "logs" / "interactions.jsonl"
SINGLE_TOKENS = 64
BATCH_TOKENS = 56


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/generate.json")
    asked = parser.parse_args()
    figures = measure(asked.device, cases=asked.cases, rounds=asked.rounds)
    if asked.save:
        name = torch.cuda.get_device_name() if asked.device == "cuda" else None
        save_results("generate", figures, device=name)
    if asked.json:
        print(json.dumps(figures))
        return
    for name, found in figures.items():
        print(f"{name:<44} {found}")


def measure(device: str, *, cases: int | None, rounds: int) -> dict[str, Any]:
    folder = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    precision = "bfloat16" if device == "cuda" else "float32"
    cases = cases or (126 if device == "cuda" else 16)
    # Two copies: the engine chooses another attention, from which the peer must not profit.
    peer = load_base(folder, dtype=precision, device=device)
    begun = time.perf_counter()
    engine = EmbeddedEngine(
        EngineSource(base_folder=folder, device=device, precision=precision, rows=min(cases, 128))
    )
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seconds to load the engine": round(time.perf_counter() - begun, 2),
        "cases": cases,
    }
    prompts = [engine.render(messages) for messages in read_conversations(cases)]
    figures |= measure_single(engine, peer, prompts[: min(5, cases)], rounds=rounds)
    figures |= measure_batch(engine, peer, prompts, rounds=rounds)
    with tempfile.TemporaryDirectory() as temporary:
        engine.load_adapter("adapter", make_adapter(peer, Path(temporary)))
        figures |= measure_adapter(engine, prompts, rounds=rounds)
    return figures


def read_conversations(most: int) -> list[tuple[Message, ...]]:
    found = []
    for line in LOG.read_text().splitlines()[:most]:
        turns = json.loads(line)["messages"][:-1]
        found.append(tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns))
    return found


def measure_single(
    engine: EmbeddedEngine, peer: Any, prompts: list[RenderedPrompt], *, rounds: int
) -> dict[str, Any]:
    """A request alone: milliseconds to its first token, and for each further one."""
    begun = time.perf_counter()
    one_request(engine, prompts[0], adapter=None)
    figures: dict[str, Any] = {"single: seconds of the first use": round(time.perf_counter() - begun, 2)}
    ours, theirs = [], []
    generate_one(peer, prompts[0], most=4)
    for _ in range(rounds):
        for prompt in prompts:
            ours.append(one_request(engine, prompt, adapter=None))
            theirs.append(one_request_of_peer(peer, prompt))
    return figures | summarize("single", ours) | summarize("single, transformers", theirs)


def one_request(
    engine: EmbeddedEngine, prompt: RenderedPrompt, *, adapter: str | None
) -> tuple[float, float]:
    """(seconds to the first token, seconds of each further one), from the tokens as a listener gets them."""
    heard: list[float] = []
    begun = time.perf_counter()

    def hear(_row: int, _token: int) -> bool:
        heard.append(time.perf_counter())
        return True

    engine.answer([prompt], DecodingSettings(SINGLE_TOKENS), adapter=adapter, on_token=hear)
    return heard[0] - begun, (heard[-1] - heard[0]) / max(len(heard) - 1, 1)


def one_request_of_peer(peer: Any, prompt: RenderedPrompt) -> tuple[float, float]:
    begun = time.perf_counter()
    generate_one(peer, prompt, most=1)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    tokens = generate_one(peer, prompt, most=SINGLE_TOKENS)
    return first, (time.perf_counter() - begun - first) / max(len(tokens) - 1, 1)


def generate_one(peer: Any, prompt: RenderedPrompt, *, most: int) -> list[int]:
    given = torch.tensor([prompt.tokens], device=peer.device)
    out = peer.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=most, do_sample=False)
    tokens: list[int] = out[0, given.shape[1] :].tolist()
    return tokens


def summarize(name: str, found: list[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{name}: ms to the first token": round(1000 * statistics.median(first for first, _ in found), 2),
        f"{name}: ms a token": round(1000 * statistics.median(each for _, each in found), 2),
    }


def measure_batch(
    engine: EmbeddedEngine, peer: Any, prompts: list[RenderedPrompt], *, rounds: int
) -> dict[str, Any]:
    """All answers: seconds from the first prompt to the last token."""
    decoding, end = DecodingSettings(BATCH_TOKENS), engine.template.eos
    ways: dict[str, Callable[[], list[str]]] = {
        "batch": lambda: [reply.text for reply in engine.answer(prompts, decoding)],
        "batch, a quarter of the rows at once": lambda: answer_in_slots(engine, prompts, decoding),
        "batch, transformers padded": lambda: [
            engine.template.decode(row) for row in padded(peer, prompts, end=end)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, list[str]] = {}
    figures: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            answers[name] = way()
            seconds = time.perf_counter() - begun
            if number:
                times[name].append(seconds)
            else:
                figures[f"{name}: seconds of the first use"] = round(seconds, 2)
    for name, found in times.items():
        same = sum(a == b for a, b in zip(answers[name], answers["batch"], strict=True)) / len(prompts)
        figures[f"{name}: seconds"] = round(statistics.median(found), 3)
        figures[f"{name}: same answers"] = round(same, 3)
    return figures


def answer_in_slots(
    engine: EmbeddedEngine, prompts: list[RenderedPrompt], decoding: DecodingSettings
) -> list[str]:
    rows, engine._rows = engine._rows, max(len(prompts) // 4, 1)
    try:
        return [reply.text for reply in engine.answer(prompts, decoding)]
    finally:
        engine._rows = rows


def padded(peer: Any, prompts: list[RenderedPrompt], *, end: int) -> list[list[int]]:
    width = max(len(prompt.tokens) for prompt in prompts)
    tokens = torch.full((len(prompts), width), end)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
        mask[row, width - len(prompt.tokens) :] = 1
    out = peer.generate(
        tokens.to(peer.device),
        attention_mask=mask.to(peer.device),
        max_new_tokens=BATCH_TOKENS,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    rows: list[list[int]] = out[:, width:].tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def measure_adapter(engine: EmbeddedEngine, prompts: list[RenderedPrompt], *, rounds: int) -> dict[str, Any]:
    """The same with an adapter on all linear layers, alone and with rows of the base in the batch."""
    one_request(engine, prompts[0], adapter="adapter")
    single = [one_request(engine, prompt, adapter="adapter") for prompt in prompts[:5] for _ in range(rounds)]
    begun = time.perf_counter()
    answer_mixed(engine, prompts)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    answer_mixed(engine, prompts)
    return {
        **summarize("single with an adapter", single),
        "batch of base and adapter: seconds of the first use": round(first, 2),
        "batch of base and adapter: seconds": round(time.perf_counter() - begun, 3),
    }


def answer_mixed(engine: EmbeddedEngine, prompts: list[RenderedPrompt]) -> None:
    from graftwork.model.generate.requests import GenerationRequest
    from graftwork.model.generate.sampling import Sampling

    for number, prompt in enumerate(prompts):
        adapter = "adapter" if number % 2 else None
        engine.decoder.submit(GenerationRequest(prompt.tokens, Sampling(BATCH_TOKENS), adapter=adapter))
    engine.decoder.finish()


def make_adapter(model: Any, folder: Path) -> Path:
    """A fresh adapter of rank 16 on all linear layers: B is zero, so that answers stay the base's."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter

    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = tuple(range(model.config.num_hidden_layers))
    shape = AdapterShape(rank=16, alpha=32, targets=targets, layers=layers)
    attach(model, shape, seed=0)
    save_adapter(model, folder / "adapter", shape=shape, base="base")
    return folder / "adapter"


if __name__ == "__main__":
    main()
