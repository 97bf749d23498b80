"""What `--json` of every command that reads a project prints: its keys, words, and figures of the log."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from compare import check
from typed import type_json

from free_ports import free_port

STORED = Path(__file__).parent / "commands"
ANIMALS = ("otter", "heron", "newt", "vole", "stoat", "grebe", "shrew", "teal")
ROOMS = ("kitchen", "cellar", "attic", "porch", "larder", "study", "hallway")
WORD = re.compile(r"[a-z][a-z_-]{0,40}")
MOST_WORDS = 6
COUNTED = {
    *("rows", "readable", "usable", "fit_to_train", "usable_groups", "tokens", "trained_tokens", "longest"),
    *("count", "epochs", "cases", "line", "rank", "batch_size", "exit_code"),
}
"""Figures that the log, the settings and the arguments decide, on every machine alike."""
OF_THE_MACHINE = {"result"}
"""Words that a check of the machine decides."""
COMMANDS = (
    "status",
    "logs",
    "doctor",
    "data audit",
    "data trace log.jsonl:3",
    "data trace log.jsonl:71",
    "data show",
    "data show --words heron",
    "data diff",
    "data diff DATASET DATASET",
    "data review --corrections",
    "data captures --out captures.jsonl",
    "plan",
    "plan catalog",
    "plan --past 20",
    "plan lint",
    "plan week",
    "plan compare",
    "eval",
    "eval --savings",
    "gate",
    "reward check",
    "generate report",
    "release list",
    "release show RELEASE",
    "release verify RELEASE",
    "release log",
    "release lineage RELEASE",
    "release ab --traffic shadow",
    "serve keys list",
    "up status",
    "fleet places",
    "fleet offers",
    "fleet list",
    "fleet ledger",
    "fleet reconcile",
)


def write_log(path: Path) -> None:
    chance = random.Random(11)
    lines = []
    for number in range(70):
        animal, room = chance.choice(ANIMALS), chance.choice(ROOMS)
        question = f"The {animal} numbered {number} sleeps in the {room}. Where is {animal} {number}?"
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"In the {room}."},
        ]
        lines.append(json.dumps({"id": f"row-{number}", "messages": messages}))
    path.write_text("\n".join([*lines, "no JSON"]) + "\n")


@pytest.fixture(scope="module")
def project(tiny_base, tmp_path_factory):
    """A project after one `graft run`: the base is random, the gate looks only at latency."""
    folder = tmp_path_factory.mktemp("read") / "project"
    folder.mkdir()
    write_log(folder / "log.jsonl")
    settings = {
        "project": "read",
        "base": str(tiny_base),
        "data": {"logs": ["log.jsonl"], "test": 0.3, "validation": 0.1, "question_similarity": 0.98},
        "train": {"rank": 2, "epochs": 1, "batch_size": 8, "threads": 1},
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6},
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
        "serve": {"port": free_port()},
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    typed = type_json("run", folder=folder)
    assert typed.exit_code == 0, typed
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_reads_prints_what_it_printed(command, project, update_golden):
    names = read_names(project)
    typed = type_json(*(names.get(word, word) for word in command.split()), folder=project)
    printed = {"exit_code": typed.exit_code, "document": outline(typed.document)}
    check(STORED / f"{command.replace(' ', '_').replace(':', '_')}.json", printed, update_golden)


def read_names(project: Path) -> dict[str, str]:
    release = json.loads(next((project / ".graft" / "releases").glob("*/manifest.json")).read_text())
    return {"RELEASE": release["id"], "DATASET": release["dataset_hash"]}


def outline(value: Any, key: str = "") -> Any:
    """Keys, words and counted figures as they are; of everything else, what it is."""
    if isinstance(value, dict):
        return {name if WORD.fullmatch(name) else "…": outline(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return merge([outline(entry, key) for entry in value])
    if isinstance(value, str):
        if key in OF_THE_MACHINE:
            return "TEXT"
        return value if WORD.fullmatch(value) else "TEXT"
    if isinstance(value, bool) or value is None or key in COUNTED:
        return value
    return "NUMBER"


def merge(outlines: list[Any]) -> list[Any]:
    """The outlines that occur; objects become one with the keys of all, and of each what occurs."""
    objects = [entry for entry in outlines if isinstance(entry, dict)]
    distinct = sorted({json.dumps(entry) for entry in outlines if not isinstance(entry, dict)})
    others = [json.loads(text) for text in distinct] if len(distinct) <= MOST_WORDS else ["MANY"]
    if not objects:
        return others
    names = dict.fromkeys(name for entry in objects for name in entry)
    merged = {name: merge([entry[name] for entry in objects if name in entry]) for name in names}
    return [{name: found[0] if len(found) == 1 else found for name, found in merged.items()}, *others]
