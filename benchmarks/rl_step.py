"""A whole step of reinforcement learning against TRL's GRPO: answers, rewards and update, in the same run.

Run: python benchmarks/rl_step.py [--device cuda] [--shape qwen2.5-7b] [--save]. Needs TRL 1.16 on
the path (pip install --target FOLDER --no-deps trl==1.16.0, then PYTHONPATH). Both sides get the same base,
prompts, adapter shape, batch, learning rate and reward, each in a process of its own, one after the other.
Ours is `graft train` with its journal, graded in child processes; TRL generates with transformers, without
vLLM, and on the CPU in float32 without checkpointing. The sides take turns, `--rounds` times, and the first
step of each turn does not count. Seconds are from the end of a step to the end of the next; processor seconds
and memory are those of the whole process tree.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from process_tree import TreeMonitor
from results import save_results
from train_gpu_model import SHAPES, default_folder, make_model_folder

SMALL = "smollm2"
STEPS = "trl_steps.jsonl"
REWARD = "import random\n\n\ndef draw(case, text):\n    return random.random()\n"
"""By chance, so that no group is dead and both sides train on every answer of any model."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class Work:
    """What both sides do in a step."""

    shape: str
    device: str
    prompts: int
    answers: int
    prompt_tokens: int
    max_tokens: int
    steps: int
    micro_rows: int
    """Rows of one backward pass of TRL."""
    threads: int = 2
    base: str = ""

    @property
    def rows(self) -> int:
        return self.prompts * self.answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default=SMALL, choices=(SMALL, *SHAPES))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-rows", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/rl_step*.json")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        work = Work(**json.loads(Path(asked.side).read_text()))
        run_trl(work, Path(asked.side).parent)
        return
    card = asked.device == "cuda"
    work = Work(
        shape=asked.shape,
        device=asked.device,
        prompts=asked.prompts or (16 if card else 8),
        answers=asked.answers,
        prompt_tokens=asked.prompt_tokens or (256 if card else 150),
        max_tokens=asked.max_tokens or (512 if card else 32),
        steps=asked.steps,
        micro_rows=asked.micro_rows or 8,
        threads=asked.threads,
        base=str(find_base_folder(asked.shape)),
    )
    figures = measure(work, only=asked.only, rounds=asked.rounds)
    if asked.save:
        save_results(f"rl_step_{work.shape}_{work.device}".replace(".", "_"), figures, device=card_name(work))
    if asked.json:
        print(json.dumps(figures))
        return
    for name, found in figures.items():
        print(f"{name:<24} {found}")


def card_name(work: Work) -> str | None:
    if work.device == "cpu":
        return None
    import torch

    return str(torch.cuda.get_device_name())


def find_base_folder(shape: str) -> Path:
    from graftwork.model.base import EMBEDDED, find_base

    if shape == SMALL:
        return Path(find_base(EMBEDDED, project_folder=Path()).folder)
    folder = default_folder(shape)
    make_model_folder(folder, shape)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in config:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def measure(work: Work, *, only: str | None, rounds: int) -> dict[str, Any]:
    turns: dict[str, list[Turn]] = {}
    sides = {"graftwork": take_our_turn, "trl": take_trl_turn}
    chosen = {"ours": ["graftwork"], "trl": ["trl"]}.get(only or "", list(sides))
    for number in range(rounds):
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                write_work(work, Path(folder))
                turn = sides[name](work, Path(folder))
            print(f"round {number + 1}, {name}: {turn}", file=sys.stderr, flush=True)
            turns.setdefault(name, []).append(turn)
    figures: dict[str, Any] = {"work": {key: value for key, value in vars(work).items() if key != "base"}}
    figures |= {"rounds": rounds} | {name: summarize(found) for name, found in turns.items()}
    if len(turns) == 2:
        ours, theirs = figures["graftwork"], figures["trl"]
        for by in ("second", "processor_second"):
            rate = f"tokens_a_{by}"
            figures[f"times_as_many_{rate}"] = round(ours[rate] / theirs[rate], 2)
        figures["share_of_memory"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
    return figures


def write_work(work: Work, folder: Path) -> None:
    (folder / "work.json").write_text(json.dumps(vars(work)))
    lines = [
        json.dumps({"id": f"p{at}", "prompt": text, "reference": "e" * 40})
        for at, text in enumerate(make_prompts(work))
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Turn:
    """What one side did in one process tree, by step."""

    ends: list[float]
    """When each step ended."""
    tokens: list[float]
    cpu_seconds: list[float]
    """Of the whole tree, up to the end of each step."""
    peak_gib: float
    largest_gib: float
    extra: dict[str, float]


def watch(command: list[str], steps: Path, work: Work) -> TreeMonitor:
    environment = {**os.environ, "OMP_NUM_THREADS": str(work.threads)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        with TreeMonitor(process.pid, steps) as monitor:
            code = process.wait()
        output.seek(0)
        if code:
            raise SystemExit(f"{command[:3]} ended with {code}:\n{output.read()[-3000:]}")
    return monitor


def summarize(turns: list[Turn]) -> dict[str, Any]:
    """Medians over the steps of all turns but their first, which records, compiles and allocates."""
    steps = [(turn, at) for turn in turns for at in range(1, len(turn.ends))]
    seconds = [turn.ends[at] - turn.ends[at - 1] for turn, at in steps]
    spent = [turn.cpu_seconds[at] - turn.cpu_seconds[at - 1] for turn, at in steps]
    tokens = [turn.tokens[at] for turn, at in steps]
    found: dict[str, Any] = {
        "tokens_a_second": round(median(map(divide, tokens, seconds)), 1),
        "tokens_a_processor_second": round(median(map(divide, tokens, spent)), 1),
        "seconds_a_step": round(median(seconds), 2),
        "processor_seconds_a_step": round(median(spent), 2),
        "tokens_a_step": round(median(tokens)),
        "steps_counted": len(steps),
        "peak_gib": round(max(turn.peak_gib for turn in turns), 2),
        "largest_process_gib": round(max(turn.largest_gib for turn in turns), 2),
    }
    extra = {name for turn in turns for name in turn.extra}
    return found | {name: round(median(turn.extra[name] for turn in turns), 2) for name in sorted(extra)}


def divide(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def make_prompts(work: Work) -> list[str]:
    """Enough different prompts for all steps, each of about `prompt_tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    story = "The keeper of the old lighthouse wrote down every ship that passed the rocks that year. " * 100
    found = []
    for number in range(work.prompts * work.steps):
        ask = f"Number {number}. Go on with this story at length, in at least a thousand words: "
        room = work.prompt_tokens - len(tokenizer(ask).input_ids) - 12
        found.append(ask + tokenizer.decode(tokenizer(story).input_ids[:room]))
    return found


def take_our_turn(work: Work, folder: Path) -> Turn:
    """`graft train` on a project of its own; what its journal says."""
    project = folder / "project"
    (project / "rewards").mkdir(parents=True)
    (project / "rewards" / "own.py").write_text(REWARD)
    (project / "prompts.jsonl").write_bytes((folder / "prompts.jsonl").read_bytes())
    row = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there"}]
    }
    (project / "log.jsonl").write_text(json.dumps(row) + "\n")
    settings = {
        "project": "rl-step",
        "base": "smollm2-135m-instruct" if work.shape == SMALL else work.base,
        "data": {"logs": ["log.jsonl"], "test": 0, "validation": 0, "max_tokens": 2048},
        "train": {
            "objective": "grpo",
            "rank": 16,
            "alpha": 32,
            "learning_rate": 1e-5,
            "precision": "auto" if work.device == "cuda" else "float32",
            "checkpoint_every": work.steps,
            "threads": work.threads,
            "rollouts": {
                "source": "prompts.jsonl",
                "steps": work.steps,
                "prompts": work.prompts,
                "answers": work.answers,
                "max_tokens": work.max_tokens,
                "truncated": "grade",
            },
            "rewards": [{"metric": "rewards/own.py:draw"}],
            "reward_checks": {"hacks": False, "canaries": 0, "preflight": False},
        },
    }
    (project / "graft.yaml").write_text(json.dumps(settings))
    command = [str(Path(sys.executable).parent / "graft"), "train", "-C", str(project), "--json"]
    monitor = watch(command, project / ".graft" / "runs" / "*" / "steps.jsonl", work)
    (run,) = (project / ".graft" / "runs").iterdir()
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    later = [step["measures"] for step in steps[1:]]
    return Turn(
        ends=[step["at"] for step in steps],
        tokens=[step["measures"]["length"] * work.rows for step in steps],
        cpu_seconds=monitor.cpu_at_step,
        peak_gib=card_peak(run) if work.device == "cuda" else monitor.peak_gib,
        largest_gib=monitor.largest_gib,
        extra={
            "seconds_of_answers": median(measures.get("rollout_seconds", 0.0) for measures in later),
            "seconds_of_rewards": median(measures.get("grading_seconds", 0.0) for measures in later),
            "dead_groups": later[-1]["dead_groups"],
        },
    )


def card_peak(run: Path) -> float:
    outcome: dict[str, Any] = json.loads((run / "outcome.json").read_text())
    return float(outcome["peak_memory_gib"])


def take_trl_turn(work: Work, folder: Path) -> Turn:
    monitor = watch([sys.executable, __file__, "--side", str(folder / "work.json")], folder / STEPS, work)
    steps = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    return Turn(
        ends=[step["at"] for step in steps],
        tokens=[step["tokens"] for step in steps],
        cpu_seconds=monitor.cpu_at_step,
        peak_gib=steps[-1]["card_gib"] if work.device == "cuda" else monitor.peak_gib,
        largest_gib=monitor.largest_gib,
        extra={},
    )


def run_trl(work: Work, folder: Path) -> None:
    """In a process of its own; a line for each step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    card = work.device == "cuda"
    torch.set_num_threads(work.threads)
    tokenizer = AutoTokenizer.from_pretrained(work.base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = torch.bfloat16 if card else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work.base, dtype=dtype)
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines])
    lengths: list[float] = []

    def draw(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(float(sum(map(len, completion_ids))))
        return [random.random() for _ in completion_ids]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            reserved = torch.cuda.max_memory_reserved() / 2**30 if card else 0.0
            line = {"at": time.time(), "tokens": lengths[-1], "card_gib": reserved}
            with (folder / STEPS).open("a") as file:
                file.write(json.dumps(line) + "\n")

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=work.micro_rows,
        gradient_accumulation_steps=work.rows // work.micro_rows,
        num_generations=work.answers,
        max_completion_length=work.max_tokens,
        max_steps=work.steps,
        learning_rate=1e-5,
        bf16=card,
        gradient_checkpointing=card,
        use_cpu=not card,
        logging_steps=work.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=draw,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
