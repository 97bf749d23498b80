"""The five source documents, sentence by sentence: what is typed for it, and what comes out.

Each file of `sources/` is one document: rows of a section, a few words of it, a command in a project (or a
call of the library), its exit code, and figures of what it prints. What the product does not do is a row
with the reason under `missing`. `--update-golden` stores the exit codes and figures of today.
"""

import json
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from source_projects import CALLS, PROJECTS
from typed import type_json

STORED = Path(__file__).parent / "sources"
DOCUMENTS = sorted(path.stem for path in STORED.glob("*.json"))
ROWS = [
    (document, number, row)
    for document in DOCUMENTS
    for number, row in enumerate(json.loads((STORED / f"{document}.json").read_text()))
]
RUN = [entry for entry in ROWS if "missing" not in entry[2]]
_FILTER = re.compile(r"(\w+)=(.+)")


@pytest.fixture(scope="session")
def projects(tmp_path_factory, tiny_base):
    """The folder of a project by its name; each is set up once."""
    folders: dict[str, Path] = {}

    def open_folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name) / "project"
            folders[name].mkdir()
            PROJECTS[name](folders[name], tiny_base)
        return folders[name]

    return open_folder


@pytest.mark.parametrize(
    ("document", "number", "row"),
    [
        pytest.param(*entry, id=f"{entry[0]}-{entry[1]}", marks=[pytest.mark.slow] * entry[2].get("slow", 0))
        for entry in RUN
    ],
)
def test_a_sentence_of_a_source_document_has_its_answer(document, number, row, projects, update_golden):
    folder = projects(row.get("project", "none"))
    exit_code, result = answer(row, folder)
    assert row["expected"] or update_golden, "a row without figures cannot fail"
    seen = {path: rounded(pick(result, path)) for path in row["expected"]}
    if update_golden:
        store(document, number, exit_code, seen)
        return
    assert exit_code == row.get("exit_code", 0), result
    share = row.get("within", 0)
    assert seen == {path: near(value, seen[path], share) for path, value in row["expected"].items()}


def test_every_document_is_in_the_table():
    documents = Counter(document for document, _, _ in RUN)
    assert len(documents) == 5
    assert documents.total() >= 140
    assert min(documents.values()) >= 8
    assert all(row["missing"] and "expected" not in row for _, _, row in ROWS if "missing" in row)


def answer(row, folder: Path):
    """The exit code and the document that the command prints; of a call 0 and what it returns."""
    if "call" in row:
        return 0, CALLS[row["call"]](folder, **row.get("arguments", {}))
    return type_once(row["command"], folder)


@cache
def type_once(command: str, folder: Path):
    """Several sentences ask for figures of one answer."""
    typed = type_json(*shlex.split(command), folder=folder)
    return typed.exit_code, typed.document


def pick(document, path: str):
    """What is at a path: names and numbers with points; `[name=value,…]` is the entry with these values,
    `*` each entry, `#` their number. An absent name is an error: it says what is there."""
    parts = re.findall(r"\[[^]]*\]|[^.[\]]+", path)
    return follow(document, parts, path)


def follow(value, parts: list[str], path: str):
    if not parts:
        return value
    part, *rest = parts
    if part == "#":
        return len(value)
    if part == "*":
        entries = value.values() if isinstance(value, dict) else value
        return [follow(entry, rest, path) for entry in entries]
    if part.startswith("["):
        wanted = dict(_FILTER.fullmatch(words).groups() for words in part[1:-1].split(","))
        return follow(only(value, wanted, path), rest, path)
    if isinstance(value, list):
        return follow(value[int(part)], rest, path)
    assert part in value, f"{path}: {part} is not one of {', '.join(value)}"
    return follow(value[part], rest, path)


def only(entries, wanted: dict[str, str], path: str):
    matching = [
        entry for entry in entries if all(str(entry[name]) == value for name, value in wanted.items())
    ]
    assert len(matching) == 1, f"{path}: {len(matching)} entries are {wanted}"
    return matching[0]


def rounded(value):
    """Four digits: what a person reads, and the same on every machine."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def near(expected, seen, share: float):
    """What was seen, where it is a figure within this share of what is expected."""
    if share and isinstance(expected, float) and isinstance(seen, float):
        return seen if abs(seen - expected) <= share * abs(expected) else expected
    return expected


def store(document: str, number: int, exit_code: int, seen: dict) -> None:
    path = STORED / f"{document}.json"
    rows = json.loads(path.read_text())
    rows[number] = {**rows[number], "exit_code": exit_code, "expected": seen}
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
