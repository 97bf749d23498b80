"""Regular expressions that cannot hang the evaluation.

In: a pattern and a text. Out: whether it is found, or PatternTooSlow. Matching runs in one small child
process that stays for the next question and is killed when it takes too long: `re` can be stopped from
the main thread only, and a pattern like (a+)+$ would take longer than the universe has.
"""

import atexit
import json
import re
import selectors
import subprocess
import sys
import threading
from pathlib import Path

SECONDS = 1.0
"""What one match may take, wall-clock: thousands of times what a sound pattern needs."""
_CHILD = Path(__file__).with_name("patterns_child.py")
_SIMPLE = re.compile(r"\^?(?:[\w \-:,;/#@=<>\"'!%&]|\\[.dws\-]|\[[\w\-]+\])*\$?")
"""No repetition, no alternatives: such a pattern is matched here, in time linear in the text."""


class PatternTooSlow(Exception):
    """The pattern ran out of its time on this text."""


def require_pattern(pattern: str) -> None:
    """ValueError with the reason where the pattern is none."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def matches(pattern: str, text: str, *, whole: bool = False, seconds: float = SECONDS) -> bool:
    """Whether the pattern is found in the text; with `whole`, whether it is all of it."""
    if _SIMPLE.fullmatch(pattern):
        found = re.fullmatch(pattern, text) if whole else re.search(pattern, text)
        return found is not None
    return _child.ask(pattern, text, whole=whole, seconds=seconds)


class _Child:
    """The process that matches. One question at a time; started anew after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, pattern: str, text: str, *, whole: bool, seconds: float) -> bool:
        question = json.dumps([pattern, text, whole]).encode() + b"\n"
        with self._lock:
            for last_try in (False, True):
                process = self._started()
                try:
                    return self._exchange(process, question, seconds)
                except (BrokenPipeError, EOFError):
                    # Somebody else ended the child between two questions; once is no reason to give up.
                    self.close()
                    if last_try:
                        raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        continue

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                # Isolated and without site-packages: it starts in 15 ms and can load nothing of ours.
                [sys.executable, "-I", "-S", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                raise EOFError("the process that matches patterns did not start")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question)
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=seconds):
                self.close()
                raise PatternTooSlow(f"the pattern took over {seconds:g} s on a text of this kind")
        reply = process.stdout.readline()
        if not reply:
            raise EOFError("the process that matches patterns ended")
        return reply == b"1\n"


_child = _Child()
atexit.register(_child.close)
