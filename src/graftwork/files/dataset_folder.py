"""The folder in which a dataset lies: `manifest.json` and one file of rows a split.

In: a folder. Out: its manifest and its rows, every byte checked against the manifest. Shared by the
stage that writes it and those that read it.
"""

from pathlib import Path

from graftwork.files.digest import require_digest
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake

MANIFEST = "manifest.json"


def split_file(folder: Path, split: Split) -> Path:
    return folder / f"{split}.jsonl"


def read_manifest(folder: Path) -> Dataset:
    path = folder / MANIFEST
    if not path.is_file():
        raise UserMistake(
            "there is no dataset here",
            why="a dataset folder holds a manifest.json",
            fix="run `graft data prepare` first",
            where=str(folder),
        )
    return Dataset.from_json(path.read_bytes())


def read_rows(folder: Path, split: Split) -> list[Row]:
    """The rows of a split, whole and unchanged, or an error."""
    path = split_file(folder, split)
    require_digest(path, read_manifest(folder).splits[split].sha256)
    return [Row.from_json(line) for line in path.read_bytes().splitlines() if line]
