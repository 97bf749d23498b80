"""Forks workers that make, sign, promote, roll back and collect releases until they are killed.

`python registry_workers.py ROOT URL`: for each line on its input (a seed and the file to write to) it forks a
worker, says its process id, and says "gone" when it is. What is imported is imported once. A worker writes
what it is about to do and what it has done, each with one write, which outlives it.
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from registry_samples import parts, publish_parts, write_adapter

from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.registry.index import plan_rollback
from graftwork.registry.project import collect_garbage, open_store, promote_release, rollback_alias
from graftwork.store.database import open_database


def open_work(root: Path, url: str) -> OpenProject:
    return OpenProject(project=open_project(root), database=open_database(url), reporter=NullReporter())


def make_release(work: OpenProject, scratch: Path, *, weights: bytes, **more) -> str:
    adapter = write_adapter(scratch, weights=weights)
    return publish_parts(folder=open_store(work), index=work.releases, **{**parts(adapter), **more}).id


def choose(work: OpenProject, chance: random.Random) -> str:
    return chance.choice([entry.id for entry in work.releases.entries() if entry.collected_at is None])


def work_until_killed(root: Path, url: str, *, seed: str, journal: Path) -> None:
    chance = random.Random(seed)
    work = open_work(root, url)
    output = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: str) -> None:
        os.write(output, (" ".join(words) + "\n").encode())

    number = 0
    while True:
        number += 1
        action = chance.choice(["make", "promote", "promote", "back", "back", "gc", "gc", "sign", "sign"])
        say("begin", action)
        if action == "make":
            make_release(work, root / "runs" / f"{seed}-{number}", weights=chance.randbytes(4096))
        elif action == "sign":
            open_store(work).sign(choose(work, chance), chance.randbytes(300))
        elif action == "promote":
            chosen = choose(work, chance)
            say("try", chosen)
            promote_release(work, chosen)
            say("done", chosen)
        elif action == "back":
            try:
                say("try", plan_rollback(work.releases, alias="champion").target)
                say("done", rollback_alias(work).release_id)
            except UserError:
                say("nowhere")
        else:
            collect_garbage(work)
        say("end", action)


def main(root: str, url: str) -> None:
    for line in sys.stdin:
        seed, journal = line.split()
        worker = os.fork()
        if worker == 0:
            work_until_killed(Path(root), url, seed=seed, journal=Path(journal))
        print(worker, flush=True)
        os.waitpid(worker, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
