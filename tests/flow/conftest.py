"""A small project on the tiny model: the whole way in seconds."""

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from flows import PLACES, PLANTS, run

from graftwork.process.worker import lock_holder
from graftwork.project.reporter import NullReporter


class Listener(NullReporter):
    """Remembers what it was reported."""

    def __init__(self):
        self.done: list[str] = []
        self.skipped: list[str] = []
        self.words: list[str] = []

    def unchanged(self, step, title):
        self.skipped.append(step)

    def finished(self, step, output, seconds):
        self.done.append(step)

    def info(self, text):
        self.words.append(text)


def write_log(path: Path, rows: int = 70) -> None:
    chance = random.Random(5)
    lines = []
    for number in range(rows):
        plant, place, month = chance.choice(PLANTS), chance.choice(PLACES), chance.randrange(1, 13)
        source = f"[1] The {plant} stands by the {place} since 19{number:02d}."
        question = f"Sources:\n{source}\n\nQuestion: Where is {plant} number {number} of month {month}?"
        reply = json.dumps({"answer": f"By the {place}.", "citations": [1], "refused": False})
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        lines.append(json.dumps({"id": str(number), "status": "success", "messages": messages}))
    lines.append("this is no JSON")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_project(folder: Path, base: Path) -> Path:
    """A project whose gate looks only at latency, which a tiny model passes."""
    settings = {
        "project": "small",
        "base": str(base),
        "data": {"logs": ["logs/*.jsonl"], "test": 0.3, "validation": 0.1, "question_similarity": 0.95},
        "train": {"rank": 2, "epochs": 2, "batch_size": 4, "checkpoint_every": 4, "threads": 1},
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6},
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
    }
    write_log(folder / "logs" / "log.jsonl")
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def small_project(tmp_path, tiny_base) -> Path:
    """The folder of a project in which nothing was done yet."""
    return write_project(tmp_path / "project", tiny_base)


@pytest.fixture(scope="session")
def whole_run(tiny_base, tmp_path_factory) -> tuple[Path, Path]:
    """Where `graft run` ran once in a small project, and a copy of what it left there."""
    folder = write_project(tmp_path_factory.mktemp("released") / "project", tiny_base)
    run(folder)
    return folder, folder.rename(folder.with_name("original"))


@pytest.fixture
def released_project(whole_run) -> Iterator[Path]:
    """A small project after `graft run`: always at the same path, since its records name it."""
    folder, original = whole_run
    shutil.copytree(original, folder)
    yield folder
    while any(lock_holder(lock.parent) is not None for lock in folder.rglob("lock")):
        time.sleep(0.01)
    shutil.rmtree(folder)


@pytest.fixture
def change_settings():
    def change(folder: Path, **sections) -> None:
        path = folder / "graft.yaml"
        settings = yaml.safe_load(path.read_text())
        for name, changes in sections.items():
            if isinstance(changes, dict):
                settings[name] = {**settings.get(name, {}), **changes}
            else:
                settings[name] = changes
        path.write_text(yaml.safe_dump(settings))

    return change


@pytest.fixture
def listener():
    return Listener()
