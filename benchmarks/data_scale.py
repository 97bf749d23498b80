"""How memory and time of the preparation grow with the logs: the same rows, ten times as many, again.

Generates logs of agents (roles, a system prompt each, sources, code, JSON; one row in twenty repeats
an earlier one, exactly or nearly), prepares them from nothing, appends one row in a hundred and
prepares again. Memory is the sum over all processes, sampled; time is wall time and processor time of the
whole command, its start included. With `--check` the grown log is also prepared from nothing: the hashes of
the datasets must be equal. With `--save` the figures go to benchmarks/results/data_scale.json.

    python benchmarks/data_scale.py                      # 10,000 and 100,000 rows
    python benchmarks/data_scale.py --rows 1000000       # about 2.1 GiB of logs
    python benchmarks/data_scale.py --rows 100000 --check --save
"""

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from results import save_results

ROLES = ("coder", "tester", "researcher", "reviewer", "planner", "writer", "support")
WORDS_IN_ROW = 320
SYLLABLES = (
    *("the", "and", "ing", "ion", "ed", "to", "in", "er", "re", "is", "on", "at", "en", "or", "ter", "con"),
    *(
        "pro",
        "com",
        "per",
        "sta",
        "man",
        "port",
        "ver",
        "line",
        "form",
        "ness",
        "ment",
        "able",
        "ful",
        "over",
    ),
    *("under", "out", "up", "down", "sub", "inter", "trans", "auto", "multi", "data", "file", "code", "test"),
    *("run", "log", "net", "work", "time", "day", "year", "part", "place", "point", "hand", "side", "house"),
    *("world", "head", "turn", "move", "play", "read", "write", "open", "close", "set", "get", "let", "make"),
)
LENGTHS = (1, 1, 1, 2, 2, 3)
PROJECT = """\
project: scale
data:
  logs: [log.jsonl]
  max_tokens: 1024
"""


class Cost(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_gib: float
    output: str


def make_words(chance: random.Random, *, count: int) -> tuple[list[str], list[float]]:
    """A vocabulary in which, as in language, few words are frequent and most are rare."""
    words = list(
        dict.fromkeys("".join(chance.choices(SYLLABLES, k=chance.choice(LENGTHS))) for _ in range(count))
    )
    return words, list(itertools.accumulate(1 / (rank + 2.7) for rank in range(len(words))))


def make_rows(count: int, *, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    words, frequencies = make_words(chance, count=60_000)
    kept: list[dict[str, object]] = []
    for number in range(count):
        if kept and chance.random() < 0.05:
            row = dict(chance.choice(kept))
            if chance.random() < 0.5:
                row = _change_a_word(row, chance)
        else:
            row = _make_row(number, chance, words, frequencies)
            if len(kept) < 2_000:
                kept.append(row)
            else:
                kept[chance.randrange(2_000)] = row
        yield json.dumps(row).encode() + b"\n"


def _make_row(
    number: int, chance: random.Random, words: list[str], frequencies: list[float]
) -> dict[str, object]:
    text = chance.choices(words, cum_weights=frequencies, k=WORDS_IN_ROW)
    role = ROLES[number % len(ROLES)]
    source = " ".join(text[:120])
    question = " ".join(text[120:140])
    answer = {"answer": " ".join(text[140:240]), "steps": text[240:], "confidence": chance.randint(1, 100)}
    return {
        "messages": [
            {"role": "system", "content": f"You are a {role}. Answer in JSON and cite your sources."},
            {"role": "user", "content": f"Sources:\n[1] {source}.\n\nQuestion {number}: {question}?"},
            {"role": "assistant", "content": json.dumps(answer)},
        ],
        "agent": role,
        "status": "success",
    }


def _change_a_word(row: dict[str, object], chance: random.Random) -> dict[str, object]:
    changed = json.loads(json.dumps(row))
    text = changed["messages"][2]["content"].split(" ")
    text[chance.randrange(2, len(text) - 12)] = "another"
    changed["messages"][2]["content"] = " ".join(text)
    return changed


def write_log(path: Path, rows: Iterator[bytes], *, mode: str) -> None:
    with path.open(mode) as handle:
        handle.writelines(rows)


def run_watched(command: list[str]) -> Cost:
    """Run a command and sample what it and its children hold in memory."""
    started, before = time.perf_counter(), _used()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    done, peak = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], sum(_resident(pid) for pid in list_family(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(time.perf_counter() - started, _used() - before, peak[0] / 2**30, output)


def _used() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def list_family(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sorted(family)


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(rows: int, *, check: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="graft-scale-"))
    graft = [sys.executable, "-m", "graftwork.cli.main", "data", "prepare", "--json", "--project"]
    try:
        (folder / "graft.yaml").write_text(PROJECT)
        log = folder / "log.jsonl"
        write_log(log, make_rows(rows, seed=1), mode="wb")
        size = log.stat().st_size / 2**30
        whole = run_watched([*graft, str(folder)])
        write_log(log, make_rows(max(rows // 100, 1), seed=2), mode="ab")
        grown = run_watched([*graft, str(folder)])
        found = {
            "rows": rows,
            "gib": round(size, 2),
            "whole": _figures(whole),
            "grown": _figures(grown),
            "share_of_cpu": round(grown.cpu_seconds / whole.cpu_seconds, 4),
            "share_of_time": round(grown.seconds / whole.seconds, 4),
        }
        print(
            f"{rows:>10,} rows  {size:6.2f} GiB   whole {whole.seconds:8.1f} s  "
            f"{rows / whole.seconds:7.0f} rows/s  {whole.cpu_seconds:8.1f} s cpu  "
            f"peak {whole.peak_gib:5.2f} GiB   "
            f"1 % more {grown.seconds:7.1f} s ({found['share_of_time']:6.1%})  "
            f"{grown.cpu_seconds:7.1f} s cpu ({found['share_of_cpu']:6.1%})",
            flush=True,
        )
        if check:
            shutil.rmtree(folder / ".graft")
            fresh = run_watched([*graft, str(folder)])
            found["fresh"] = _figures(fresh)
            found["same_hash"] = _hash_of(fresh) == _hash_of(grown)
            print(
                f"{'':>10} from nothing {fresh.cpu_seconds:.1f} s cpu; the same dataset: {found['same_hash']}"
            )
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figures(cost: Cost) -> dict[str, float]:
    return {
        "seconds": round(cost.seconds, 1),
        "cpu_seconds": round(cost.cpu_seconds, 1),
        "peak_gib": round(cost.peak_gib, 2),
    }


def _hash_of(cost: Cost) -> str:
    return str(json.loads(cost.output)["dataset"]["content_hash"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    found = [measure(rows, check=given.check) for rows in given.rows]
    if given.save:
        save_results("data_scale", {"runs": found})


if __name__ == "__main__":
    main()
