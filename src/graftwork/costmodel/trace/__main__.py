"""Trace one setting in a process of its own, so that a crash of the libraries is not one of the command line.

    python -m graftwork.costmodel.trace '{"config": {…}, "setup": {…}, "events": false}'

In: one JSON object: a `config.json` and a PlainSetup. Out: one JSON line: the peak, what was held in each
phase, and with `events` the whole stream, to be replayed through an allocator.
"""

import json
import sys
from typing import Any

from graftwork.costmodel.trace.memory import trace_run
from graftwork.records.errors import GraftError
from graftwork.records.plan import PlainSetup


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What was asked, traced."""
    trace = trace_run(question["config"], PlainSetup.model_validate(question["setup"]))
    line: dict[str, Any] = {"peak": trace.peak.model_dump(), "phases": trace.phases}
    if question.get("events"):
        line |= {"sizes": trace.sizes, "events": trace.events}
    return line


def main() -> int:
    """Print the answer, or the error."""
    try:
        line = answer(json.loads(sys.argv[1]))
    except GraftError as mistake:
        print(json.dumps(mistake.as_json()))
        return mistake.exit_code
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
