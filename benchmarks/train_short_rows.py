"""Ordinary runs on a card: `graft train` on the demo's log, short rows, eight a step, all layers, rank 16.

Run on a machine with a GPU: `python benchmarks/train_short_rows.py [--base smollm2 1.4b 6.9b]`.
Measures what a user gets: the real command line, with the time between the ends of two steps, so that
the journal, the heartbeat and checkpoints are in it. In the same run, on eight rows of the mean length: plain
transformers + PEFT in bf16, eager and with the whole step recorded as a CUDA graph, and Unsloth if installed.
`1.4b` (Llama's shape) and `6.9b` (Qwen2's) have random weights and the tokenizer of SmolLM2. Each runs in a
process and a project of its own.
"""

import argparse
import importlib.util
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import save_results

EXAMPLE = Path(__file__).parents[1] / "examples" / "cited_answers"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHAPES: dict[str, dict[str, int]] = {
    "1.4b": {
        "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16,
    },
    "6.9b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
}  # fmt: skip
CHANGES = {
    r"  upper_layers:.*\n": "",
    r"max_rows:.*": "max_rows: 780",
    r"rehearse_crash:.*": "rehearse_crash: false",
    r"checkpoint_every:.*": "checkpoint_every: 50",
    r"learning_rate:.*": "learning_rate: 2.0e-4",
}
"""The demo saves time on a laptop; here all layers learn from all rows."""


def make_base(name: str, folder: Path) -> Path:
    """A base of this shape with random weights."""
    from transformers import LlamaConfig, Qwen2Config

    return make_random_base(LlamaConfig if name == "1.4b" else Qwen2Config, SHAPES[name], folder)


def make_random_base(kind: Any, shape: dict[str, int], folder: Path) -> Path:
    """Random weights on the GPU, with the tokenizer of SmolLM2."""
    import torch
    from transformers import AutoModelForCausalLM

    from graftwork.model.base import EMBEDDED, find_base

    config = kind(
        **shape,
        vocab_size=49152,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    embedded = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    for file in TOKENIZER:
        shutil.copy(embedded / file, folder / file)
    return folder


def measure(name: str, scratch: Path) -> dict[str, Any]:
    project = scratch / name
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns(".graft", "*.html"))
    settings = (project / "graft.yaml").read_text()
    for pattern, text in CHANGES.items():
        settings = re.sub(pattern, text, settings)
    if name in SHAPES:
        base = make_base(name, scratch / f"base-{name}")
        settings = re.sub(r"base:.*", f"base: {base}", settings)
    (project / "graft.yaml").write_text(settings)
    began = time.perf_counter()
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "--project", str(project)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    wall = time.perf_counter() - began
    (run,) = project.glob(".graft/runs/*")
    steps = [step for step in _read_steps(run) if step.at]
    gaps = [1000 * (later.at - earlier.at) for earlier, later in itertools.pairwise(steps)]
    tokens = statistics.median(step.tokens for step in steps)
    return {
        "steps": len(steps),
        "median_step_ms": round(statistics.median(gaps), 2),
        "median_bare_step_ms": round(1000 * statistics.median(step.seconds for step in steps[1:]), 2),
        "total_ms_per_step": round(sum(gaps) / len(gaps), 2),
        "median_tokens_per_step": tokens,
        "tokens_per_second": round(1000 * tokens / statistics.median(gaps)),
        "first_loss": round(steps[0].loss, 4),
        "last_loss": round(steps[-1].loss, 4),
        "wall_seconds": round(wall, 1),
    }


def _read_steps(folder: Path) -> list[Any]:
    from graftwork.train.run_folder import read_steps

    return list(read_steps(folder))


def load_peft(folder: Path) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).cuda()
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def load_unsloth(folder: Path) -> Any:
    from peers.load import load_peer
    from peers.variants import Variant

    return load_peer(Variant("unsloth", 8), folder)


def measure_peer(folder: Path, *, length: int, kind: str) -> float:
    """Milliseconds of a step of a peer (`eager`, `recorded` or `unsloth`): the median of 20 after 5."""
    model = load_unsloth(folder) if kind == "unsloth" else load_peft(folder)
    import torch

    model.train()
    recorded = kind == "recorded"
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=2e-4, fused=True, capturable=recorded)
    tokens = torch.randint(3, 1000, (8, length), device="cuda")
    labels = tokens.clone()
    labels[:, : length * 3 // 4] = -100

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == "unsloth"):
            loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not recorded)
        return loss.detach()

    run = _record(step, learned) if recorded else step
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        began = time.perf_counter()
        float(run())
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[5:])


def _record(step: Callable[[], Any], learned: list[Any]) -> Callable[[], Any]:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Any:
        graph.replay()
        return loss

    return replay


def in_child(*arguments: str) -> float | None:
    """A figure measured in a process of its own; None if the peer cannot run here."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    return round(float(done.stdout.split()[-1]), 1) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", nargs="*", default=["smollm2", *SHAPES])
    parser.add_argument("--peer", nargs=3, metavar=("FOLDER", "LENGTH", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("passed over: this needs a GPU")
        return
    if arguments.peer:
        folder, length, kind = arguments.peer
        print(measure_peer(Path(folder), length=int(length), kind=kind))
        return
    figures = {}
    with tempfile.TemporaryDirectory(prefix="graft-") as scratch:
        for name in arguments.base:
            figures[name] = shown = compare(name, Path(scratch))
            print(name, json.dumps(shown), flush=True)
    save_results("train_short_rows", figures, device=torch.cuda.get_device_name())


def compare(name: str, scratch: Path) -> dict[str, Any]:
    from graftwork.model.base import EMBEDDED, find_base

    found = measure(name, scratch)
    print(name, json.dumps(found), file=sys.stderr, flush=True)
    base = scratch / f"base-{name}"
    folder = base if base.exists() else Path(find_base(EMBEDDED, project_folder=Path()).folder)
    length = str(round(found["median_tokens_per_step"] / 8))
    found["hf_peft_eager_ms"] = in_child("--peer", str(folder), length, "eager")
    found["hf_peft_recorded_ms"] = in_child("--peer", str(folder), length, "recorded")
    if importlib.util.find_spec("unsloth"):
        found["unsloth_ms"] = in_child("--peer", str(folder), length, "unsloth")
    return found


if __name__ == "__main__":
    main()
