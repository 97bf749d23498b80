"""The projects in which the commands of the source documents are typed, and calls of the library for what has
no command of its own."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from typed import type_json

from free_ports import free_port
from graftwork.process.stdio import encode, read_messages

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
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "epochs": 3,
            "batch_size": 16,
            "learning_rate": 2e-4,
            "warmup_ratio": 0.05,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "checkpoint_every": 9,
            "threads": 1,
            "eval": {"every": 15, "early_stopping": 2},
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
        "serve": {"port": free_port()},
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


def make_two_nodes(folder: Path, base: Path) -> None:
    """The fifth document's project, on two machines."""
    make_team(folder, base)
    edit_settings(folder, train={"strategy": "ddp", "epochs": 1})


def make_agents(folder: Path, base: Path) -> None:
    """The fourth document: answers in JSON with citations and refusals, in place of its own corpus."""
    make_example("cited_answers", folder, base)


def make_managers(folder: Path, base: Path) -> None:
    """The third document: a main model and a specialist for each of six managers."""
    make_example("seven_models", folder, base)


def make_example(name: str, folder: Path, base: Path) -> None:
    ignored = shutil.ignore_patterns(".graft", "report.html", "audit.html")
    shutil.copytree(REPOSITORY / "examples" / name, folder, ignore=ignored, dirs_exist_ok=True)
    serve = yaml.safe_load((folder / "graft.yaml").read_text()).get("serve", {})
    edit_settings(folder, base=str(base), serve={**serve, "port": free_port()})


GENERATE = (
    "generate --spec converter/converter.tiki --engine recorded:converter/answers.jsonl "
    "--out generated --samples 2 --only 1"
)


def make_generated(folder: Path, _base: Path) -> None:
    """A specification in the team's format, and five components of it by the recorded answers of a model."""
    source = REPOSITORY / "examples" / "converter"
    shutil.copytree(source, folder / "converter", ignore=shutil.ignore_patterns(".graft"))
    done = type_json(*GENERATE.split(), folder=folder)
    assert done.exit_code == 0, done.document


def edit_settings(folder: Path, **sections: object) -> None:
    path = folder / "graft.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, **sections}, sort_keys=False))


def judge_by(folder: Path, **gate: object):
    """What `graft gate` says of the trained run by other rules."""
    with TemporaryDirectory() as temporary:
        copy = shutil.copytree(folder, Path(temporary) / "project")
        edit_settings(copy, gate={"primary": "none", **gate})
        done = type_json("gate", folder=copy)
    return {"exit_code": done.exit_code, **done.document}


def read_files(folder: Path, pattern: str):
    """The JSON of the files of a pattern, by their names without the folder; of others their names alone."""
    paths = sorted(folder.glob(pattern))
    return {path.name: json.loads(path.read_text()) if path.suffix == ".json" else {} for path in paths}


def read_logs(folder: Path):
    """How far `graft logs` says that the run came, and how often it began again."""
    lines = type_json("logs", folder=folder).document
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    return {
        "steps": len(set(steps)),
        "last_step": max(steps),
        "last_checkpoint": max(line["step"] for line in lines if line["kind"] == "checkpoint"),
        "alerts": [line["alert"] for line in lines if line["kind"] == "alert"],
    }


CHECKLIST = ("gpu", "configuration", "logs", "write access", "disk", "Hugging Face account", "base model")


def check_machine(folder: Path):
    """What `graft doctor` finds, and what of the fourth document's checklist it leaves out."""
    checks = {check["name"]: check["result"] for check in type_json("doctor", folder=folder).document}
    return {"missing": [name for name in CHECKLIST if name not in checks], **checks}


def compare_base(folder: Path):
    """Whether the weights of the base are the same bytes after training."""
    outcome = type_json("train", folder=folder).document
    return {
        "unchanged": outcome["base_hash_before"] == outcome["base_hash_after"],
        "proof": outcome["base_proof"],
    }


def roll_back(folder: Path):
    """A second adapter is released and promoted, and the alias goes back to the first."""
    with TemporaryDirectory() as temporary:
        copy = shutil.copytree(folder, Path(temporary) / "project")
        first = type_json("release", "list", folder=copy).document["aliases"]["champion"]
        other = shutil.copytree(type_json("train", folder=copy).document["adapter_folder"], copy / "other")
        config = other / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 16}))
        second = type_json("release", "import", "other", folder=copy)
        words = ("--force", "--reason", "better in a test")
        promoted = type_json("release", "promote", second.document["id"], *words, folder=copy)
        back = type_json("release", "rollback", "--reason", "it fails", folder=copy)
        return {
            "exit_codes": [second.exit_code, promoted.exit_code, back.exit_code],
            "back": type_json("release", "list", folder=copy).document["aliases"]["champion"] == first,
            "log": type_json("release", "log", folder=copy).document["moves"],
        }


def drive_worker(folder: Path):
    """Another program starts a run over a port of length-prefixed messages and reads to its end."""
    command = [sys.executable, "-m", "graftwork.cli.main", "worker", "--stdio", "--packet", "4"]
    start = {"type": "start", "v": 1, "project": str(folder)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as worker:
        worker.stdin.write(encode(json.dumps(start).encode(), "packet4"))
        worker.stdin.flush()
        messages = []
        for text in read_messages(worker.stdout, "packet4"):
            messages.append(json.loads(text))
            if messages[-1]["type"] in ("done", "error", "stopped"):
                worker.stdin.close()
    return {
        "first": messages[0]["type"],
        "last": messages[-1]["type"],
        "steps": {message["step"]: message["state"] for message in messages if message["type"] == "step"},
        "exit_code": worker.returncode,
    }


PROJECTS: dict[str, Callable[[Path, Path], None]] = {
    "none": make_none,
    "week": make_week,
    "team": make_team,
    "trained": make_trained,
    "two_nodes": make_two_nodes,
    "agents": make_agents,
    "managers": make_managers,
    "generated": make_generated,
}
CALLS: dict[str, Callable[..., object]] = {
    "judge_by": judge_by,
    "read_files": read_files,
    "read_logs": read_logs,
    "check_machine": check_machine,
    "compare_base": compare_base,
    "roll_back": roll_back,
    "drive_worker": drive_worker,
}
