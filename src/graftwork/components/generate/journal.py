"""The journal of a generation: every prompt, answer, verdict and decision, as a chain of hashes.

In: entries, each on the disk before the next step. Out: what is known already, so that a run that was killed
anywhere asks nothing and verifies nothing twice. An entry names the hash of the one before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftwork.files.disk import Journal
from graftwork.records.base import fingerprint
from graftwork.records.errors import Damaged

JOURNAL_FILE = "journal.jsonl"
FIRST = "0" * 64


def entry_hash(entry: dict[str, Any]) -> str:
    return fingerprint({key: value for key, value in entry.items() if key != "hash"})


def check_chain(entries: list[dict[str, Any]]) -> str:
    """What breaks the chain; empty where nothing does."""
    previous = FIRST
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "hash" not in entry:
            return f"entry {number} is no entry of a journal"
        if entry.get("previous") != previous:
            return f"entry {number} does not follow the one before it: an entry was removed or added"
        if entry_hash(entry) != entry["hash"]:
            return f"entry {number} ({entry.get('kind')}) was changed"
        previous = entry["hash"]
    return ""


class GenerationJournal:
    """One writer at a time. `find` looks an entry up by its kind and key."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / JOURNAL_FILE)
        self.entries: list[dict[str, Any]] = self._journal.read()
        broken = check_chain(self.entries)
        if broken:
            raise Damaged(
                f"the journal is damaged: {broken}",
                why="answers and verdicts in it are no longer evidence",
                fix="restore the file, or generate into another folder",
                where=str(self._journal.path),
            )
        self._known = {(entry["kind"], entry["key"]): entry for entry in self.entries if "key" in entry}

    @property
    def head(self) -> str:
        return str(self.entries[-1]["hash"]) if self.entries else FIRST

    def find(self, kind: str, key: str) -> dict[str, Any] | None:
        return self._known.get((kind, key))

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        return (entry for entry in self.entries if entry["kind"] == kind)

    def add(self, kind: str, key: str, **content: Any) -> dict[str, Any]:
        """Append an entry and wait until it is on the disk."""
        entry = {"kind": kind, "key": key, **content, "previous": self.head}
        entry["hash"] = entry_hash(entry)
        self._journal.append(entry, durable=True)
        self.entries.append(entry)
        self._known[kind, key] = entry
        return entry
