"""The projects in which the commands of the source documents are typed, and calls of the library for what has
no command of its own."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml
from typed import type_json

REPOSITORY = Path(__file__).parents[2]


def make_none(folder: Path, _base: Path) -> None:
    """No project: a folder with the configurations of the documents."""
    shutil.copytree(REPOSITORY / "tests" / "data" / "lint", folder / "lint")


def make_week(folder: Path, _base: Path) -> None:
    """The example with one main model, six specialists and five places."""
    for name in ("week", "seven_models"):
        source = REPOSITORY / "examples" / name
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(".graft"))


AGENTS = {"coder": 178, "tester": 75, "researcher": 26, "coordinator": 20, "reviewer": 3}
"""302 interactions, divided as the fifth document divides them."""
FAILED = 4
TASKS = ("search", "sort", "parse", "merge", "count", "rename", "split", "check")
THINGS = ("orders", "invoices", "users", "tables", "files", "events", "tickets", "routes", "prices", "logs")


def make_team(folder: Path, base: Path) -> None:
    """The fifth document: a log of five agents, LoRA on attention at rank 8, and its deploy rule."""
    write_interactions(folder / "interactions.jsonl")
    settings = {
        "project": "team",
        "base": str(base),
        "data": {"logs": ["interactions.jsonl"], "test": 0.1, "validation": 0.1, "max_tokens": 2048},
        "train": {
            "rank": 8,
            "alpha": 32,
            "targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "epochs": 3,
            "batch_rows": 16,
            "learning_rate": 2e-4,
            "warmup_share": 0.05,
            "weight_decay": 0.01,
            "max_gradient_norm": 1.0,
            "checkpoint_every": 9,
            "threads": 1,
            "examine": {"every": 15, "patience": 2},
            "run": {"rehearse_crash": True},
        },
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6, "metrics": ["token_f1"]},
        "gate": {
            "rules": [
                {"metric": "latency_seconds", "under": 12},
                {"metric": "peak_memory_gib", "under": 10},
            ],
            "primary": "none",
        },
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def write_interactions(path: Path) -> None:
    chance = random.Random(20251001)
    agents = [agent for agent, count in AGENTS.items() for _ in range(count)]
    chance.shuffle(agents)
    rows = []
    for number, agent in enumerate(agents):
        task, thing, other = chance.choice(TASKS), chance.choice(THINGS), chance.choice(THINGS)
        question = f"Job {number}: {task} the {thing} of region {chance.randrange(900)} by {other}."
        reply = f"def {task}_{thing}_{number}({other}):\n    return {task}({other}, {chance.randrange(99)})"
        rows.append(
            {
                "id": f"i{number}",
                "role": agent,
                "status": "failed" if number % 75 == 74 else "success",
                "messages": [
                    {"role": "system", "content": f"You are the {agent} of the team."},
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": reply},
                ],
            }
        )
    assert sum(row["status"] == "failed" for row in rows) == FAILED
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_trained(folder: Path, base: Path) -> None:
    """The fifth document's project, trained, judged and released."""
    make_team(folder, base)
    done = type_json("run", folder=folder)
    assert done.exit_code == 0, done.document


PROJECTS: dict[str, Callable[[Path, Path], None]] = {
    "none": make_none,
    "week": make_week,
    "team": make_team,
    "trained": make_trained,
}
CALLS: dict[str, Callable[[Path], object]] = {}
