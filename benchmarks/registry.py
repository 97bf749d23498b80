"""How long list, show, promote and rollback take with 1,000 releases, beside a plain folder of JSON files.

Run: python benchmarks/registry.py [--releases 1000]. Our own time: the work behind the verb in an open
process, without starting Python. Below it the whole command as it is typed, with Python, all that it imports
and the database: processor time, which others on the machine disturb less. The peer is what teams write
first: one JSON file a release and one for the aliases, read and written whole, with no log, no lock and no
check of any byte. Medians of all rounds.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from graftwork.files.disk import write_atomic
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.releases import collect_garbage, open_store, promote_release, rollback_alias
from graftwork.pipeline.reporter import NullReporter
from graftwork.project.load import open_project
from graftwork.records.release import Release, ReleaseFile, ReleaseQuery
from graftwork.registry.aliases import find_release
from graftwork.registry.manifest import content_id
from graftwork.store.database import open_database

ROUNDS = 15
COMMAND_ROUNDS = 7
PROMISE_MS = 100.0
COMMAND_PROMISE_MS = 1000.0
WEIGHTS = 2 * 2**20
"""The size of one adapter's weights, shared by all releases: what a verification reads."""


def fill(work: OpenProject, count: int) -> list[str]:
    header = json.dumps({"w": {"dtype": "U8", "shape": [WEIGHTS], "data_offsets": [0, WEIGHTS]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(WEIGHTS)
    store, ids = open_store(work), []
    for number in range(count):
        files = {
            "adapter_config.json": b'{"peft_type": "LORA"}',
            "adapter_model.safetensors": weights,
            "plan.json": json.dumps({"number": number}).encode(),
        }
        release = make_manifest(work, number, files)
        store.put(release, sources=files)
        work.releases.add(release)
        ids.append(release.id)
    return ids


def make_manifest(work: OpenProject, number: int, files: dict[str, bytes]) -> Release:
    described = tuple(
        ReleaseFile(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        for name, data in sorted(files.items())
    )
    hashes = {
        name: hashlib.sha256(f"{name} {number}".encode()).hexdigest()
        for name in ("adapter_hash", "dataset_hash", "plan_hash", "report_hash", "verdict_hash")
    }
    nameless = Release(
        id="",
        project=work.settings.project,
        base="small",
        base_fingerprint="b" * 64,
        template_fingerprint="t" * 64,
        decision="deploy",
        run_id=f"run-{number}",
        parent=None,
        created_at=f"2026-01-01T00:00:{number % 60:02d}+00:00",
        files=described,
        settings=work.settings.model_dump(mode="json"),
        versions={"graftwork": "0"},
        **hashes,
    )
    return nameless.model_copy(update={"id": content_id(nameless)})


def median_ms(action: Callable[[int], object]) -> float:
    times = []
    for number in range(ROUNDS):
        begun = time.perf_counter()
        action(number)
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def measure_ours(work: OpenProject, ids: list[str]) -> dict[str, float]:
    found = {
        "list 50": median_ms(lambda _n: work.releases.entries(ReleaseQuery(limit=50))),
        "list all": median_ms(lambda _n: work.releases.entries()),
        "search": median_ms(lambda _n: work.releases.entries(ReleaseQuery(search="run-77"))),
        "show": median_ms(lambda n: work.releases.entry(find_release(work.releases, ids[n]).id)),
        "promote": median_ms(lambda n: promote_release(work, ids[n])),
    }
    found["rollback"] = median_ms(lambda n: rollback_alias(work) if n < ROUNDS - 1 else None)
    found["gc --dry-run"] = median_ms(lambda _n: collect_garbage(work, dry_run=True))
    return found


def measure_commands(root: Path, ids: list[str]) -> dict[str, float]:
    """Milliseconds of processor time for each whole command."""
    typed = {
        "list": lambda _n: ["list"],
        "show": lambda n: ["show", ids[n]],
        "promote": lambda n: ["promote", ids[-1 - n]],
        "rollback": lambda _n: ["rollback"],
    }
    run_command(root, ["list"])  # what Python compiles once is compiled
    return {
        verb: statistics.median(run_command(root, words(number)) for number in range(COMMAND_ROUNDS))
        for verb, words in typed.items()
    }


def run_command(root: Path, words: list[str]) -> float:
    command = [sys.executable, "-m", "graftwork.cli.main", "release", *words, "-C", str(root)]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {started.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


def measure_peer(folder: Path, ids: list[str], work: OpenProject) -> dict[str, float]:
    """One JSON file a release; the aliases in one more."""
    for one in ids:
        write_atomic(folder / f"{one}.json", work.releases.get(one).to_json(), durable=False)

    def read(one: str) -> object:
        return json.loads((folder / f"{one}.json").read_bytes())

    return {
        "list all": median_ms(lambda _n: [json.loads(p.read_bytes()) for p in folder.glob("*.json")]),
        "show": median_ms(lambda n: read(ids[n])),
        "promote": median_ms(lambda n: write_atomic(folder / "aliases", json.dumps({"champion": ids[n]}))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "graft.yaml").write_text(
            "project: bench\ndata: {logs: [l.jsonl]}\nrelease: {keep_last: 5000}\n"
        )
        project = open_project(root)
        database = open_database(project.database_url)
        work = OpenProject(project=project, database=database, reporter=NullReporter())
        ids = fill(work, asked.releases)
        ours, peer = measure_ours(work, ids), measure_peer(root / "peer", ids, work)
        database.close()
        commands = measure_commands(root, ids)
    print(f"{asked.releases} releases, weights of {WEIGHTS // 2**20} MiB each, medians of {ROUNDS}")
    for verb, value in ours.items():
        beside = f"{peer[verb]:8.2f} ms" if verb in peer else "          –"
        print(f"{verb:<14} ours {value:8.2f} ms   folder of JSON {beside}")
    promised = ("list 50", "list all", "show", "promote", "rollback")
    kept = all(ours[verb] < PROMISE_MS for verb in promised)
    print(f"promise of {PROMISE_MS:.0f} ms for list, show, promote: {'kept' if kept else 'BROKEN'}")
    for verb, value in commands.items():
        print(f"graft release {verb:<9} {value:8.0f} ms of processor time, whole command")
    quick = commands["rollback"] < COMMAND_PROMISE_MS
    print(f"promise of a rollback in under a second: {'kept' if quick else 'BROKEN'}")


if __name__ == "__main__":
    main()
