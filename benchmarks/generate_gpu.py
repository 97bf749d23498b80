"""Generation on one GPU: our recorded step, our step launched piece by piece, and transformers' ways.

Run on a machine with a GPU: python benchmarks/generate_gpu.py [--base FOLDER] [--random]. Same model in the
same precision, the example's prompts, greedy, same run; rounds interleaved, medians. `--random` takes random
weights of the Qwen2.5-7B shape and says how far a step is from reading its weights and keys once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import save_results
from train_gpu_model import SHAPES, default_folder, make_model_folder

from graftwork.model.generate.generator import Generator, Sampling
from graftwork.model.load import load_base

LOG = Path(__file__).parents[1] / "examples" / "cited_answers" / "logs" / "interactions.jsonl"
ROUNDS = 3
BYTES_A_SECOND = 4.8e12
"""The data sheet's memory bandwidth of the card that these figures are from (H200)."""


def read_prompts(template: Any, most: int) -> list[list[int]]:
    from graftwork.records.interaction import Message

    found = []
    for line in LOG.read_text().splitlines()[:most]:
        turns = json.loads(line)["messages"][:-1]
        found.append(template.prompt([Message(role=t["role"], content=t["content"]) for t in turns]))
    return sorted(found, key=len)


def padded(model: Any, asked: list[list[int]], *, new_tokens: int, end: int) -> list[list[int]]:
    width = max(map(len, asked))
    tokens = torch.full((len(asked), width), end, device="cuda")
    mask = torch.zeros(len(asked), width, dtype=torch.long, device="cuda")
    for row, prompt in enumerate(asked):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt, device="cuda")
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    return [cut(row, end) for row in out[:, width:].tolist()]


def continuous(model: Any, asked: list[list[int]], *, new_tokens: int, end: int) -> list[list[int]]:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=end, pad_token_id=end)
    out = model.generate_batch(inputs=asked, generation_config=config, progress_bar=False)
    return [cut(one.generated_tokens, end) for _, one in sorted(out.items(), key=lambda item: item[0])]


def cut(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def compare(ways: dict[str, Callable[[], list[list[int]]]], rows: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    said: dict[str, list[list[int]]] = {}
    failed: dict[str, str] = {}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            if name in failed:
                continue
            torch.cuda.synchronize()
            begun = time.perf_counter()
            try:
                said[name] = way()
            except Exception as error:  # a peer that does not run here is said to, and passed over
                failed[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            torch.cuda.synchronize()
            if number:  # the first round is for warming up
                times.setdefault(name, []).append(time.perf_counter() - begun)
    found: dict[str, Any] = {}
    first = next(iter(times))
    for name, seconds in times.items():
        tokens = sum(map(len, said[name]))
        median = statistics.median(seconds)
        same = sum(a == b for a, b in zip(said[first], said[name], strict=True)) / len(said[first])
        found[name] = {
            "seconds": round(median, 3),
            "cases_a_minute": round(60 * rows / median),
            "tokens_a_second": round(tokens / median),
            "times_ours": round(median / statistics.median(times[first]), 2),
            "same_answers": round(same, 3),
        }
    return found | {name: {"failed": why} for name, why in failed.items()}


def measure_base(folder: Path) -> dict[str, Any]:
    from graftwork.model.chat.template import ChatTemplate

    template = ChatTemplate.from_folder(folder)
    ours, peer = (load_base(folder, dtype="bfloat16", device="cuda") for _ in range(2))
    recorded = Generator(ours, stop_tokens=[template.eos], recorded=True)
    walked = Generator(ours, stop_tokens=[template.eos])
    found = {}
    for rows, new_tokens in ((1, 96), (32, 96), (256, 96)):
        asked, sampling = read_prompts(template, rows), Sampling(new_tokens)
        settings = {"new_tokens": new_tokens, "end": template.eos}
        ways: dict[str, Callable[[], list[list[int]]]] = {
            "recorded": lambda: [o.tokens for o in recorded.generate(asked, sampling)],  # noqa: B023
            "piece by piece": lambda: [o.tokens for o in walked.generate(asked, sampling)],  # noqa: B023
            "transformers, padded": lambda: padded(peer, asked, **settings),  # noqa: B023
        }
        if rows == 32:  # takes minutes with more
            ways["transformers, continuous"] = lambda: continuous(peer, asked, **settings)  # noqa: B023
        found[f"{rows} rows"] = compare(ways, rows)
        print(json.dumps({rows: found[f"{rows} rows"]}), flush=True)
    return found


def measure_random() -> dict[str, Any]:
    """Random weights never end an answer: all rows run their whole length."""
    shape = "qwen2.5-7b"
    make_model_folder(default_folder(shape), shape)
    model = load_base(default_folder(shape), dtype="bfloat16", device="cuda")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    measures, found = SHAPES[shape], {}
    embedding = measures.vocabulary * measures.hidden * 2
    recorded = Generator(model, stop_tokens=[-1], recorded=True)
    walked = Generator(model, stop_tokens=[-1])
    prompt_tokens, new_tokens = 256, 64
    key_bytes = 2 * 2 * measures.layers * measures.key_heads * (measures.hidden // measures.heads)
    for rows in (1, 32, 128):
        asked = [[(7 * row + place) % 1000 for place in range(prompt_tokens)] for row in range(rows)]
        both: dict[str, Callable[[], list[list[int]]]] = {}
        for length in (new_tokens // 2, new_tokens):
            for name, one in (("recorded", recorded), ("piece by piece", walked)):
                sampling = Sampling(length)
                both[f"{name} {length}"] = lambda one=one, sampling=sampling, asked=asked: [  # type: ignore[misc]
                    o.tokens for o in one.generate(asked, sampling)
                ]
        times = compare(both, rows)
        read = weights - embedding + rows * key_bytes * (prompt_tokens + new_tokens * 3 // 4)
        line: dict[str, Any] = {"roofline_ms": round(1000 * read / BYTES_A_SECOND, 2)}
        for name in ("recorded", "piece by piece"):
            seconds = times[f"{name} {new_tokens}"]["seconds"] - times[f"{name} {new_tokens // 2}"]["seconds"]
            line[f"{name}_step_ms"] = round(1000 * seconds / (new_tokens - new_tokens // 2), 2)
        found[f"{rows} rows"] = line
        print(json.dumps({rows: line}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--random", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("passed over: there is no GPU here")
        return
    figures: dict[str, Any] = {}
    if asked.base is not None:
        figures["base"] = measure_base(asked.base)
    if asked.random:
        figures["qwen2.5-7b, random weights"] = measure_random()
    save_results("generate_gpu", figures, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
