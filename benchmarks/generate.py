"""Batched generation with a shared prefix against transformers' `generate`, one by one and batched.

Run: python benchmarks/generate.py. Same model, same prompts, greedy, same run; rounds interleaved,
medians. The peers are asked the way most evaluation scripts ask.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.generate.generator import Generator, Sampling
from graftwork.model.load import load_base
from graftwork.model.threads import use_threads
from graftwork.records.interaction import Message

LOG = Path(__file__).parents[1] / "examples" / "cited_answers" / "logs" / "interactions.jsonl"
CASES = 16
NEW_TOKENS = 24
ROUNDS = 3


def prompts(template: ChatTemplate) -> list[list[int]]:
    found = []
    for line in LOG.read_text().splitlines():
        turns = json.loads(line)["messages"][:-1]
        found.append(template.prompt([Message(role=t["role"], content=t["content"]) for t in turns]))
    return sorted(found[:CASES], key=len)


def one_by_one(model: Any, asked: list[list[int]]) -> int:
    made = 0
    for prompt in asked:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        made += out.shape[1] - len(prompt)
    return made


def padded(model: Any, asked: list[list[int]]) -> int:
    width = max(map(len, asked))
    tokens = torch.full((len(asked), width), 2)
    mask = torch.zeros(len(asked), width, dtype=torch.long)
    for row, prompt in enumerate(asked):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return int((out[:, width:] != 2).sum())


def main() -> None:
    base = find_base(EMBEDDED, project_folder=Path())
    template = ChatTemplate.from_folder(Path(base.folder))
    # Two copies: our generator chooses another attention, which the peer shall not profit from.
    ours, model = load_base(Path(base.folder)), load_base(Path(base.folder))
    use_threads(None)
    asked = prompts(template)
    generator = Generator(ours, stop_tokens=[template.eos])
    ways: dict[str, Callable[[], object]] = {
        "graftwork": lambda: generator.generate(asked, Sampling(NEW_TOKENS)),
        "transformers, padded batch": lambda: padded(model, asked),
        "transformers, one by one": lambda: one_by_one(model, asked),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begun)
    best = statistics.median(times["graftwork"])
    print(f"{CASES} prompts of {min(map(len, asked))}–{max(map(len, asked))} tokens, {NEW_TOKENS} new ones")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:<28} {60 * CASES / median:7.1f} cases/min   {median / best:5.2f} × our time")


if __name__ == "__main__":
    main()
