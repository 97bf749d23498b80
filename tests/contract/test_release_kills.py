"""Kill -9 at any moment of making, signing, promoting, rolling back and collecting: the store stays whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from new_database import new_database
from registry_workers import make_release, open_work
from sqlalchemy import text

from graftwork.project.open_project import OpenProject
from graftwork.registry.folder import MINISIGN, verify_release
from graftwork.registry.index import reachable_releases
from graftwork.registry.project import collect_garbage, open_store, promote_release

NURSERY = Path(__file__).with_name("registry_workers.py")
ACTIONS = {"make", "promote", "back", "gc", "sign"}


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("sqlite", 12),
        pytest.param("postgresql", 20, marks=pytest.mark.slow),
        pytest.param("sqlite", 200, marks=pytest.mark.slow),
        pytest.param("postgresql", 200, marks=pytest.mark.slow),
    ],
)
def test_whenever_a_process_is_killed_the_store_is_whole_and_the_alias_old_or_new(
    kind, kills, request, tmp_path
):
    url = new_database(kind, request=request, folder=tmp_path)
    settings = {
        "project": "cited-answers",
        "data": {"logs": ["l.jsonl"]},
        "release": {"keep_last": 2, "keep_days": 0},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    work = open_work(tmp_path, url)
    first = make_release(work, tmp_path / "first", weights=b"first")
    promote_release(work, first)
    chance, current, actions = random.Random(7), first, set()
    command = [sys.executable, str(NURSERY), str(tmp_path), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        try:
            for number in range(20 * kills):
                # A test whose kills never met anything would prove nothing: go on until each action was met.
                if number >= kills and actions >= ACTIONS:
                    break
                journal = tmp_path / f"said-{number}"
                kill_at_random(
                    nursery, chance, journal, seed=f"{kind}-{number}", most=0.06 * (1 + number // kills)
                )
                allowed, interrupted = read_said(journal, current)
                actions.add(interrupted)
                current = assert_whole(work, allowed)
        finally:
            nursery.kill()
    assert actions >= ACTIONS
    assert_tidy_after_one_more_collection(work)
    work.database.close()


def kill_at_random(nursery, chance: random.Random, journal: Path, *, seed: str, most: float) -> None:
    nursery.stdin.write(f"{seed} {journal}\n")
    nursery.stdin.flush()
    worker = int(nursery.stdout.readline())
    deadline = time.monotonic() + 300
    while not journal.exists() or not journal.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(chance.uniform(0, most))
    os.kill(worker, signal.SIGKILL)
    assert nursery.stdout.readline() == "gone\n"


def read_said(journal: Path, current: str) -> tuple[set[str], str]:
    """Where the alias may point after what the worker said, and what it was at when it was killed."""
    allowed, interrupted = {current}, "nothing"
    for line in journal.read_text().splitlines():
        word, *rest = line.split()
        if word == "try":
            allowed = {current, rest[0]}
        elif word == "done":
            current = rest[0]
            allowed = {current}
        elif word in ("begin", "end"):
            interrupted = rest[0] if word == "begin" else "nothing"
    return allowed, interrupted


def assert_whole(work: OpenProject, allowed: set[str]) -> str:
    with work.database.write() as connection:
        # Taken only when a server has ended what the killed client had asked for.
        if work.database.engine.dialect.name == "sqlite":
            assert connection.execute(text("PRAGMA quick_check")).scalar() == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
    store, aliases, logs = open_store(work), work.releases.aliases(), work.releases.alias_logs()
    assert aliases["champion"] in allowed
    moves = logs["champion"]
    assert [move.previous for move in moves] == [None, *(move.release_id for move in moves[:-1])]
    assert moves[-1].release_id == aliases["champion"]
    for release in reachable_releases(logs.values()):
        assert work.releases.entry(release).collected_at is None
        assert store.has(release)
    for release_id in store.ids():
        release = verify_release(store.folder(release_id))
        assert release.id == release_id
        # Nothing but the release: also what verifying forgives is not left there.
        files = {path.name for path in store.folder(release_id).iterdir()} - {
            file.path for file in release.files
        }
        assert {"manifest.json"} <= files <= {"manifest.json", "manifest.json.minisig"}
        assert (
            not (signature := store.folder(release_id) / MINISIGN).exists() or signature.stat().st_size == 300
        )
    for entry in work.releases.entries():
        assert entry.collected_at is not None or store.has(entry.id)
    return aliases["champion"]


def assert_tidy_after_one_more_collection(work: OpenProject) -> None:
    collect_garbage(work)
    store = open_store(work)
    assert not [*store.root.glob(".*.part"), *store.root.glob(".trash*"), *store.blobs.leftovers()]
    held = {file.sha256 for release_id in store.ids() for file in store.verify(release_id).files}
    assert {digest for digest, _ in store.blobs.all()} == held
    assert collect_garbage(work, dry_run=True).bytes == 0
