"""How memory and time of the preparation grow with the logs: the same rows, ten times as many, again.

Generates logs of agents (roles, a system prompt each, sources, code, JSON; one row in twenty repeats
an earlier one, exactly or nearly), prepares them from nothing, appends one row in a hundred and
prepares again. Memory is the sum over all processes, sampled; time is wall time.

    python benchmarks/data_scale.py                      # 10,000 and 100,000 rows
    python benchmarks/data_scale.py --rows 1000000       # about 2.1 GiB of logs
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    peak_gib: float


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
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    done, peak = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], sum(_resident(pid) for pid in _family(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    if code != 0:
        sys.exit(f"{' '.join(command)} ended with {code}")
    return Cost(time.perf_counter() - started, peak[0] / 2**30)


def _family(root: int) -> list[int]:
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


def measure(rows: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="graft-scale-"))
    graft = [
        str(Path(sys.executable).with_name("graft")),
        "data",
        "prepare",
        "--project",
        str(folder),
        "--json",
    ]
    try:
        (folder / "graft.yaml").write_text(PROJECT)
        log = folder / "log.jsonl"
        write_log(log, make_rows(rows, seed=1), mode="wb")
        size = log.stat().st_size / 2**30
        whole = run_watched(graft)
        write_log(log, make_rows(max(rows // 100, 1), seed=2), mode="ab")
        grown = run_watched(graft)
        share = grown.seconds / whole.seconds
        print(
            f"{rows:>10,} rows  {size:6.2f} GiB   whole {whole.seconds:8.1f} s  "
            f"{rows / whole.seconds:7.0f} rows/s  peak {whole.peak_gib:5.2f} GiB   "
            f"1 % more {grown.seconds:7.1f} s ({share:6.1%})",
            flush=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    for rows in parser.parse_args().rows:
        measure(rows)


if __name__ == "__main__":
    main()
