"""Every word the judge said, kept by what it was asked: asked once, never paid for twice.

In: a question's key and the reply. Out: the reply again, in this run or a later one. Safe for threads;
one process writes at a time. A torn line, left by a kill, is asked again.
"""

import threading
from pathlib import Path

from graftwork.evaluate.judge.client import Said
from graftwork.evaluate.judge.settings import JudgeSettings
from graftwork.evaluate.judge.wording import Chat
from graftwork.files.disk import Journal
from graftwork.records.base import fingerprint

REPLIES_FILE = "judge_replies.jsonl"


def key_of(chat: Chat, *, settings: JudgeSettings) -> str:
    """A hash of all that decides the reply."""
    return fingerprint(
        {"url": settings.url, "model": settings.model, "max_tokens": settings.max_tokens, "chat": chat}
    )


class ReplyStore:
    """`folder` None keeps the replies in memory alone."""

    def __init__(self, folder: Path | None) -> None:
        self._journal = Journal(folder / REPLIES_FILE) if folder is not None else None
        self._lock = threading.Lock()
        self._replies: dict[str, Said] = {}
        for line in self._journal.read() if self._journal is not None else ():
            self._replies[line["key"]] = Said(line["text"], line["tokens_in"], line["tokens_out"])

    def get(self, key: str) -> Said | None:
        with self._lock:
            return self._replies.get(key)

    def put(self, key: str, said: Said) -> None:
        with self._lock:
            self._replies[key] = said
            if self._journal is not None:
                self._journal.append({"key": key, **said._asdict()}, durable=True)
