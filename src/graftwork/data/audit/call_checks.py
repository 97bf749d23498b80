"""What is wrong with the tool calls of a conversation.

In: one interaction, or an assistant turn with the turns before it. Out: a code and how it was recognized,
or None. A reply is at fault for a call that cannot be carried out, or that goes round in a loop; a prompt
for calls and results that do not belong together.
"""

from collections.abc import Sequence
from typing import NamedTuple

from graftwork.grading.call_faults import find_call_fault
from graftwork.grading.matching import PatternTooSlow
from graftwork.records.interaction import Interaction, Message
from graftwork.text.tool_calls import read_calls

BROKEN_CALL, REPEATED_CALL, UNMATCHED_CALL = "broken_call", "repeated_call", "unmatched_call"
BROKEN_EARLIER_CALL = "broken_earlier_call"
MOST_REPEATS = 2
"""A call may be made this often with the same result: a first try, and another in case something passes."""
CALL_TAG = "<tool_call>"


class CallFault(NamedTuple):
    code: str
    reason: str


def judge_calls(row: Interaction) -> CallFault | None:
    """The fault of the reply's calls."""
    if CALL_TAG not in row.reply:
        return None
    fault = find_broken_call(row.messages, row.reply)
    if fault is not None:
        return CallFault(BROKEN_CALL, fault)
    if _is_loop(row):
        return CallFault(REPEATED_CALL, "the turns before it made the same call and got the same result")
    return None


def find_broken_call(messages: Sequence[Message], text: str) -> str | None:
    """Why a call of this assistant turn cannot be carried out; None where none is, or it cannot be judged."""
    try:
        return find_call_fault(messages, text)
    except PatternTooSlow:
        return None


def judge_results(messages: Sequence[Message]) -> CallFault | None:
    """The fault of a prompt whose calls and results do not belong together."""
    waiting = 0
    for message in messages:
        if message.role == "tool":
            if not waiting:
                return CallFault(UNMATCHED_CALL, "a result without a call before it")
            waiting -= 1
        elif waiting:
            return CallFault(UNMATCHED_CALL, _NO_RESULT)
        elif message.role == "assistant":
            waiting = len(read_calls(message.content) or ()) if CALL_TAG in message.content else 0
    return CallFault(UNMATCHED_CALL, _NO_RESULT) if waiting else None


_NO_RESULT = "a call without a result"


def _is_loop(row: Interaction) -> bool:
    """Whether the last turns made the calls of the reply, always with the same results."""
    calls = read_calls(row.reply)
    results: list[str] = []
    seen: list[list[str]] = []
    for message in reversed(row.messages):
        if message.role == "tool":
            results.append(message.content)
            continue
        if message.role != "assistant" or read_calls(message.content) != calls:
            return False
        seen.append(results)
        results = []
        if len(seen) == MOST_REPEATS:
            return all(answers == seen[0] and answers for answers in seen)
    return False
