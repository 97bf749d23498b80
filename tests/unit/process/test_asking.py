"""The asker of many prompts: what is asked by several threads at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

from graftwork.process.asking import Asker, KeptReply, ReplyJournal


def test_threads_that_ask_the_same_at_once_send_one_request(tmp_path):
    asker = Asker(ReplyJournal(tmp_path / "replies.jsonl"), refuse=lambda *_tokens: None)
    begun, second, sent = threading.Event(), threading.Event(), []

    def send():
        sent.append(1)
        begun.set()
        # A second request would set it.
        second.wait(0.2) if len(sent) == 1 else second.set()
        return KeptReply("yes", 3, 1)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asker.ask, "key", send, most_in=5, most_out=5)
        begun.wait(10)
        other = pool.submit(asker.ask, "key", send, most_in=5, most_out=5)
        assert first.result(10) == other.result(10)
    journal = ReplyJournal(tmp_path / "replies.jsonl")
    assert (len(sent), journal.requests, journal.lost) == (1, 1, 0)
    assert (journal.tokens_in, journal.tokens_out) == (3, 1)
