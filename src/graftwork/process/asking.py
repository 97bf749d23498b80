"""Send many prompts: in parallel, each once, within a budget, with replies cached by prompt.

Input: a key of all that decides the reply, and a function that sends the question. Output: the reply, from
the journal where the same was asked before. Each request is journaled before it is sent and after it is
answered, so that a kill loses no reply and the budget counts what was lost. After five requests in a row
without a reply nothing more is asked. Does not know who answers; retries are the sender's.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from graftwork.files.disk import Journal

GIVE_UP_AFTER = 5
"""Requests in a row without a reply after which the model counts as unavailable, and nothing more is
asked.
"""
BUDGET_PAUSE = 1.0
"""Seconds after which a request that waits for budget checks again."""
POLL_SECONDS = 0.2
"""Seconds between two checks for pending replies."""

Question = TypeVar("Question")
Reply = TypeVar("Reply")


def ask_many(
    questions: Sequence[Question],
    ask: Callable[[Question], Reply],
    *,
    together: int,
    on_reply: Callable[[Question, Reply], object] = lambda _question, _reply: None,
    on_poll: Callable[[], object] = lambda: None,
    give_up: Callable[[], object] = lambda: None,
) -> list[Reply]:
    """Ask this many in parallel; returns the replies in the order of the questions. Callbacks run in this
    thread alone. Any error, or Ctrl-C, ends it: `give_up` is called, and no further question is asked.
    Pending requests are paid for: `on_reply` gets their replies if they arrive.
    """
    replies: dict[int, Reply] = {}
    remaining = iter(enumerate(questions))
    running: dict[Future[Reply], int] = {}
    with ThreadPoolExecutor(max_workers=together) as pool:
        try:
            while True:
                for number, question in islice(remaining, together - len(running)):
                    running[pool.submit(ask, question)] = number
                if not running:
                    return [replies[number] for number in range(len(questions))]
                for future in wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                    number = running.pop(future)
                    replies[number] = future.result()
                    on_reply(questions[number], replies[number])
                on_poll()
        except BaseException:
            give_up()
            for future, number in running.items():
                if not future.cancel() and future.exception() is None:
                    on_reply(questions[number], future.result())
            raise


class KeptReply(NamedTuple):
    text: str
    tokens_in: int
    tokens_out: int
    finish_reason: str = "stop"
    at: str = ""
    """When it was answered."""


class NoReply(Exception):
    """No reply for now, after all attempts. The next run asks again."""


class BudgetSpent(Exception):
    """Nothing more is asked. A later run with a larger budget continues."""


class ReplyJournal:
    """Replies by key, and what was spent on them, over all runs. Threads may share one.

    Without a file, replies are kept only in memory.
    """

    def __init__(self, file: Path | None) -> None:
        self._journal = Journal(file) if file is not None else None
        self._lock = threading.Lock()
        self._replies: dict[str, KeptReply] = {}
        self._open: dict[str, tuple[int, int]] = {}
        self.requests = self.tokens_in = self.tokens_out = self.lost = 0
        for line in self._journal.read() if self._journal is not None else ():
            self._apply(line)
        # What was asked and neither answered nor failed was lost by a kill: it may have been paid for.
        for tokens_in, tokens_out in self._open.values():
            self._count_lost(tokens_in, tokens_out)
        self._open.clear()

    def get(self, key: str) -> KeptReply | None:
        with self._lock:
            return self._replies.get(key)

    def note_asked(self, key: str, *, tokens_in: int, tokens_out: int) -> None:
        self._append({"event": "asked", "key": key, "in": tokens_in, "out": tokens_out})

    def note_failed(self, key: str) -> None:
        self._append({"event": "failed", "key": key})

    def put(self, key: str, reply: KeptReply) -> None:
        self._append({"event": "answered", "key": key, **reply._asdict()})

    def reserved(self) -> tuple[int, int]:
        """Prompt and reply tokens that pending requests may still cost."""
        with self._lock:
            waiting = self._open.values()
            return sum(tokens for tokens, _ in waiting), sum(tokens for _, tokens in waiting)

    def _append(self, line: dict[str, object]) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.append(line, durable=True)
            self._apply(line)

    def _count_lost(self, tokens_in: int, tokens_out: int) -> None:
        self.lost += 1
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out

    def _apply(self, line: dict[str, object]) -> None:
        key = str(line["key"])
        if line["event"] == "asked":
            if key in self._open:
                # Asked again after a kill: the first request may have been paid for too.
                self._count_lost(*self._open[key])
            self._open[key] = (int(str(line["in"])), int(str(line["out"])))
            return
        self._open.pop(key, None)
        if line["event"] == "answered":
            reply = KeptReply(**{name: line[name] for name in KeptReply._fields})  # type: ignore[arg-type]
            self._replies[key] = reply
            self.requests += 1
            self.tokens_in += reply.tokens_in
            self.tokens_out += reply.tokens_out


class Asker:
    """Asks each key once. Threads may share one. `refuse` says why nothing more may be asked if all requests
    cost this many prompt and reply tokens: those of earlier runs, pending ones, and the next one.
    """

    def __init__(self, journal: ReplyJournal, *, refuse: Callable[[int, int], str | None]) -> None:
        self.journal = journal
        self._refuse = refuse
        self._settled = threading.Condition()
        self._asking: set[str] = set()
        self._unanswered = 0

    def ask(
        self, key: str, send: Callable[[], KeptReply], *, most_in: int = 0, most_out: int = 0
    ) -> KeptReply:
        """Raise NoReply, BudgetSpent, or what `send` raises."""
        with self._settled:
            # Another thread may be asking the same.
            self._settled.wait_for(lambda: key not in self._asking)
            earlier_reply = self.journal.get(key)
            if earlier_reply is not None:
                return earlier_reply
            self._asking.add(key)
        try:
            if self._unanswered >= GIVE_UP_AFTER:
                raise NoReply(f"not asked: {GIVE_UP_AFTER} requests in a row had no answer")
            self._reserve(key, most_in, most_out)
            return self._send_and_keep(key, send)
        finally:
            with self._settled:
                self._asking.discard(key)
                self._settled.notify_all()

    def _send_and_keep(self, key: str, send: Callable[[], KeptReply]) -> KeptReply:
        try:
            reply = send()._replace(at=datetime.now(UTC).isoformat(timespec="seconds"))
        except Exception as error:
            self._unanswered += isinstance(error, NoReply)
            self.journal.note_failed(key)
            raise
        self._unanswered = 0
        self.journal.put(key, reply)
        return reply

    def _reserve(self, key: str, most_in: int, most_out: int) -> None:
        """Reserve the most that the request may cost, before it is sent."""
        journal = self.journal
        with self._settled:
            while True:
                waiting_in, waiting_out = journal.reserved()
                refusal = self._refuse(
                    journal.tokens_in + waiting_in + most_in, journal.tokens_out + waiting_out + most_out
                )
                if refusal is None:
                    journal.note_asked(key, tokens_in=most_in, tokens_out=most_out)
                    return
                if not waiting_out:
                    raise BudgetSpent(refusal)
                # Requests on their way seldom cost what was set aside for them.
                self._settled.wait(BUDGET_PAUSE)
