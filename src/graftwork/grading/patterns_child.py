"""The process that matches regular expressions, one JSON line each. Imports nothing of ours.

In: `[pattern, text, whole]` a line. Out: `1` or `0` a line, after a first line that says it is ready.
Whoever asks kills it when it takes too long.
"""

import json
import re
import sys


def answer(line: bytes) -> bytes:
    pattern, text, whole = json.loads(line)
    found = re.fullmatch(pattern, text) if whole else re.search(pattern, text)
    return b"1\n" if found else b"0\n"


def main() -> None:
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
