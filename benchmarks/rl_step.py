"""A whole step of reinforcement learning against TRL's GRPO: answers, rewards and update, in the same run.

Run: python benchmarks/rl_step.py [--device cuda] [--shape qwen2.5-7b] [--save]. Needs TRL 1.16 on
the path (pip install --target FOLDER --no-deps trl==1.16.0, then PYTHONPATH). Both sides get the same base,
prompts, adapter shape, batch, learning rate and reward, each in a process of its own, one after the other.
Ours is `graft train` with its journal, graded in child processes; TRL generates with transformers, without
vLLM, in bfloat16 on a card and in float32 on the CPU. It checkpoints no activations unless `--checkpointing`
says so, and `--micro-rows` and `--trl KEY=VALUE` choose its other settings. The sides take turns, `--rounds`
times. The first step of each turn does not count; a turn that exceeds `--limit` seconds is stopped and
reports the steps that it did. Seconds are from the end of a step to the end of the next; processor seconds
and memory are those of the whole process tree, on a card what torch reserved.

`--only ours --memory-limit 16` caps the memory of a card, and `--supervised 0.3` mixes supervised rows in.
What `graft train` planned is shown next to what it took.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from results import save_results
from rl_step_trl import STEPS
from rl_step_turns import Turn, compare_sides, run_turn, summarize
from train_gpu_model import SHAPES, default_folder

SMALL = "smollm2"
REWARD = "import random\n\n\ndef draw(case, text):\n    return random.random()\n"
"""By chance, so that no group is dead and both sides train on every answer of any model."""
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STORY = "The keeper of the old lighthouse wrote down every ship that passed the rocks that year. "
MICRO_ROWS = {"cpu": 8, "cuda": 64}
"""Rows of one backward pass of TRL: on a card as many as are worth it for 135 million parameters."""
MICRO_ROWS_OF_LARGE = 8
SUPERVISED_ROWS = 8


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
    checkpointing: bool = False
    """TRL computes activations again in the backward pass."""
    trl: dict[str, Any] = field(default_factory=dict)
    """Further settings of TRL's GRPOConfig."""
    limit: float = 3600.0
    """Seconds of a turn."""
    memory_limit: float | None = None
    supervised: float = 0.0
    """Share of supervised rows in the gradient; ours only."""
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
    parser.add_argument("--micro-rows", type=int, help="rows of one backward pass of TRL")
    parser.add_argument("--checkpointing", action="store_true", help="TRL checkpoints activations")
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=VALUE", help="of GRPOConfig")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a turn")
    parser.add_argument("--memory-limit", type=float, help="GiB of a card that ours may take")
    parser.add_argument("--supervised", type=float, default=0.0, help="share of supervised rows, ours only")
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/rl_step*.json")
    asked = parser.parse_args()
    card = asked.device == "cuda"
    work = Work(
        shape=asked.shape,
        device=asked.device,
        prompts=asked.prompts or (16 if card else 8),
        answers=asked.answers,
        prompt_tokens=asked.prompt_tokens or (256 if card else 150),
        max_tokens=asked.max_tokens or (512 if card else 32),
        steps=asked.steps,
        micro_rows=asked.micro_rows
        or (MICRO_ROWS[asked.device] if asked.shape == SMALL else MICRO_ROWS_OF_LARGE),
        checkpointing=asked.checkpointing,
        trl=dict(map(read_setting, asked.trl)),
        limit=asked.limit,
        memory_limit=asked.memory_limit,
        supervised=asked.supervised,
        threads=asked.threads,
        base=str(find_base_folder(asked.shape)),
    )
    figures = measure(work, only=asked.only, rounds=asked.rounds)
    if asked.save:
        save_results(name_results(work), figures, device=gpu_name(work))
    if asked.json:
        print(json.dumps(figures))
        return
    for name, found in figures.items():
        print(f"{name:<24} {found}")


def read_setting(text: str) -> tuple[str, Any]:
    """A value of Python, or the text itself."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def name_results(work: Work) -> str:
    capped = f"_{work.memory_limit:g}gib" if work.memory_limit else ""
    mixed = "_mix" if work.supervised else ""
    return f"rl_step_{work.shape}_{work.device}{capped}{mixed}".replace(".", "_")


def gpu_name(work: Work) -> str | None:
    if work.device == "cpu":
        return None
    import torch

    return str(torch.cuda.get_device_name())


def find_base_folder(shape: str) -> Path:
    from graftwork.model.base import EMBEDDED, find_base

    if shape == SMALL:
        return Path(find_base(EMBEDDED, project_folder=Path()).folder)
    folder = default_folder(shape)
    # In a process of its own: this one would keep the card's memory that it took for the weights.
    maker = Path(__file__).with_name("train_gpu_model.py")
    subprocess.run([sys.executable, str(maker), "--shape", shape], check=True, stdout=sys.stderr)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in config:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def measure(work: Work, *, only: str | None, rounds: int) -> dict[str, Any]:
    turns: dict[str, list[Turn]] = {}
    sides = {"graftwork": take_our_turn, "trl": take_trl_turn}
    chosen = {"ours": ["graftwork"], "trl": ["trl"]}.get(only or "", list(sides))
    shown = {key: value for key, value in asdict(work).items() if key != "base"}
    figures: dict[str, Any] = {"work": shown, "rounds": rounds}
    for number in range(rounds):
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                write_work(work, Path(folder))
                turn = sides[name](work, Path(folder))
            turns.setdefault(name, []).append(turn)
            figures[name] = summarize(turns[name])
            print(f"round {number + 1}, {name}: {json.dumps(figures[name])}", file=sys.stderr, flush=True)
    return figures | compare_sides(figures)


def write_work(work: Work, folder: Path) -> None:
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    lines = [
        json.dumps({"id": f"p{at}", "prompt": text, "reference": "e" * 40})
        for at, text in enumerate(make_prompts(work))
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def make_prompts(work: Work) -> list[str]:
    """Enough different prompts for all steps, each of about `prompt_tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    found = []
    for number in range(work.prompts * work.steps):
        ask = f"Number {number}. Go on with this story at length, in at least a thousand words: "
        room = work.prompt_tokens - len(tokenizer(ask).input_ids) - 12
        found.append(ask + tokenizer.decode(tokenizer(STORY * 100).input_ids[: max(room, 0)]))
    return found


def take_our_turn(work: Work, folder: Path) -> Turn:
    """`graft train` on a project of its own; what its plan, its journal and its outcome say."""
    project = folder / "project"
    write_project(work, project, prompts=(folder / "prompts.jsonl").read_bytes())
    command = [*graft_command(), "train", "-C", str(project), "--json"]
    done = run_turn(
        "graftwork",
        command,
        steps=project / ".graft" / "runs" / "*" / "steps.jsonl",
        threads=work.threads,
        limit=work.limit,
    )
    (run,) = (project / ".graft" / "runs").iterdir()
    plan = json.loads((run / "job.json").read_text())["plan"]
    path = run / "outcome.json"
    outcome = json.loads(path.read_text()) if path.exists() else {}
    steps = [json.loads(line) for line in done.lines]
    later = [step["measures"] for step in steps[1:]]
    card = work.device == "cuda"
    peak = outcome.get("peak_memory_gib") if card else done.monitor.peak_gib
    extra: dict[str, float | None] = {
        "planned_gib": plan["peak_memory_gib"]["value"],
        "planned_seconds_per_step": planned_seconds(plan),
        "used_gib": outcome.get("peak_memory_gib"),
        "allocated_gib": outcome.get("peak_allocated_gib") if card else None,
    }
    for name, key in (("seconds_of_answers", "rollout_seconds"), ("seconds_of_rewards", "grading_seconds")):
        extra[name] = median([measures.get(key, 0.0) for measures in later]) if later else None
    return Turn(
        ends=[step["at"] for step in steps],
        tokens=[step["measures"]["length"] * work.rows for step in steps],
        cpu_seconds=done.monitor.cpu_at_step,
        peak_gib=peak,
        largest_gib=done.monitor.largest_gib,
        stopped=done.stopped,
        failed=done.failed,
        extra={name: value for name, value in extra.items() if value is not None},
    )


def graft_command() -> list[str]:
    """The script next to the interpreter; where there is none, the package as a module."""
    script = Path(sys.executable).parent / "graft"
    return [str(script)] if script.exists() else [sys.executable, "-m", "graftwork.cli.main"]


def planned_seconds(plan: dict[str, Any]) -> float:
    parts = [plan["parts"].get(f"minutes.{name}", {"value": 0.0}) for name in ("compute", "rollouts")]
    return float(60 * sum(part["value"] for part in parts) / plan["steps"]["value"])


def write_project(work: Work, project: Path, *, prompts: bytes) -> None:
    (project / "rewards").mkdir(parents=True)
    (project / "rewards" / "own.py").write_text(REWARD)
    (project / "prompts.jsonl").write_bytes(prompts)
    texts = [json.loads(line)["prompt"] for line in prompts.splitlines()]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{at} {STORY}"}]}
        for at, text in enumerate(texts[: SUPERVISED_ROWS * work.steps] if work.supervised else texts[:1])
    ]
    (project / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "project": "rl-step",
        "base": "smollm2-135m-instruct" if work.shape == SMALL else work.base,
        "data": {
            "logs": ["log.jsonl"],
            "test": 0,
            "validation": 0,
            "max_tokens": 2048,
            "near_duplicate": 1.0,
        },
        "train": {
            "objective": "grpo",
            "rank": 16,
            "alpha": 32,
            "learning_rate": 1e-5,
            "precision": "auto" if work.device == "cuda" else "float32",
            "checkpoint_every": work.steps,
            "batch_size": SUPERVISED_ROWS,
            "threads": work.threads,
            "rollouts": {
                "source": "prompts.jsonl",
                "steps": work.steps,
                "prompts": work.prompts,
                "num_generations": work.answers,
                "max_completion_length": work.max_tokens,
                "truncated": "grade",
            },
            "rewards": [{"metric": "rewards/own.py:draw"}],
            "reward_checks": {"hacks": False, "decoys": 0, "preflight": False},
        },
    }
    if work.memory_limit is not None:
        settings["plan"] = {"memory_limit_gib": work.memory_limit}
    if work.supervised:
        settings["train"]["mix"] = {"sft": work.supervised}
    # JSON is YAML.
    (project / "graft.yaml").write_text(json.dumps(settings))


def take_trl_turn(work: Work, folder: Path) -> Turn:
    side = Path(__file__).with_name("rl_step_trl.py")
    done = run_turn(
        "trl",
        [sys.executable, str(side), str(folder / "work.json")],
        steps=folder / STEPS,
        threads=work.threads,
        limit=work.limit,
        environment={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    steps = [json.loads(line) for line in done.lines]
    card = work.device == "cuda"
    last = steps[-1] if steps else {}
    return Turn(
        ends=[step["at"] for step in steps],
        tokens=[step["tokens"] for step in steps],
        cpu_seconds=done.monitor.cpu_at_step,
        peak_gib=last.get("reserved_gib") if card else done.monitor.peak_gib,
        largest_gib=done.monitor.largest_gib,
        stopped=done.stopped,
        failed=done.failed,
        extra={name: last[name] for name in ("allocated_gib",) if name in last},
    )


if __name__ == "__main__":
    main()
