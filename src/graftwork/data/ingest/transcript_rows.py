"""Rows of a block of transcripts: each reply of a coding agent with the conversation before it.

In: the lines of a block, in order; a line that continues the conversation applies to the replies after it.
Out: interactions, and what is left out by which rule. Rows of one conversation share their messages.
"""

from itertools import chain
from typing import Any

import orjson

from graftwork.data.ingest.api_bodies import FINISH_REASONS
from graftwork.data.ingest.blocks import RowResult, SkippedPart, Transcript
from graftwork.data.ingest.fields import BadRow, take_usage, write_json
from graftwork.data.ingest.transcripts import CONTINUES, content_parts
from graftwork.data.ingest.turns import (
    ROLES,
    LogTurn,
    drop_reasoning,
    take_message,
    to_messages,
    write_call,
    write_reply,
)
from graftwork.records.interaction import Interaction, Message, Origin

NOT_TEXT = "not_text"
_FINISHED = {
    **FINISH_REASONS,
    "tool_use": "tool_calls",
    "stop_sequence": "stop",
}


class TranscriptReader:
    """Reads the lines of one block in order."""

    def __init__(self, kind: Transcript) -> None:
        self.kind = kind
        self._messages: list[Message] = []
        self._ends: list[int] = []
        """The number of messages up to each step of the conversation."""
        self._flaws: dict[int, BadRow | None] = {}
        """Steps that cannot be read, and those that hold more than text (None)."""
        self._parts: list[Any] = []
        self._answer: str | None = None
        """The last reply, and its text as a message of the conversation if that is known."""

    def continue_conversation(self, raw: bytes) -> bool:
        """Whether this line continues the conversation, which applies to the replies after it."""
        if not raw.startswith(CONTINUES):
            return False
        row = orjson.loads(raw)
        keep: int = row["keep"]
        del self._ends[keep:]
        del self._messages[self._ends[-1] if self._ends else 0 :]
        for step in [step for step in self._flaws if step >= keep]:
            del self._flaws[step]
        if "answer" in row:
            self._add_answer()
            self._ends.append(len(self._messages))
        for step in row["messages"]:
            self._add(step, len(self._ends))
            self._ends.append(len(self._messages))
        return True

    def _add_answer(self) -> None:
        if self._answer is not None:
            self._messages.append(Message(role="assistant", content=drop_reasoning(self._answer)))
        elif self.kind == "codex":
            self._add(self._parts, len(self._ends))
        else:
            self._add({"role": "assistant", "content": self._parts}, len(self._ends))

    def _add(self, step: Any, place: int) -> None:
        items = step if self.kind == "codex" else [step]
        if len(items) == 1 and (plain := _take_plain(items[0])) is not None:
            self._messages.append(plain)
            return
        if any(_has_other_parts(item) for item in items):
            self._flaws[place] = None
            return
        key = f"messages[{place}]"
        try:
            turns = _join_calls(items, key) if self.kind == "codex" else take_message(step, key)
        except BadRow as error:
            self._flaws[place] = error
        else:
            self._messages += to_messages(turns)

    def read(self, raw: bytes, origin: Origin) -> list[RowResult]:
        """Read a reply, or what the file leaves out."""
        row = orjson.loads(raw)
        if "parts" in row:
            return [self._read_reply(row["parts"], row["about"], origin)]
        counts = row["left_out"].items()
        return [SkippedPart(origin=origin, rule=rule, count=count) for rule, count in counts]

    def _read_reply(self, parts: list[Any], about: dict[str, Any], origin: Origin) -> RowResult:
        is_codex = self.kind == "codex"
        self._parts, self._answer = parts, None
        plain = _take_text(parts[0] if is_codex else {"content": parts}) if len(parts) == 1 else None
        items = parts if is_codex else ({"content": parts},)
        flaws = self._flaws.values()
        if None in flaws or (plain is None and any(map(_has_other_parts, items))):
            return SkippedPart(origin=origin, rule=NOT_TEXT, count=1)
        for flaw in flaws:
            assert flaw is not None
            raise flaw
        if plain is not None:
            text = self._answer = plain
        else:
            answer = self._take_answer(parts)
            text = write_reply(answer)
            # Codex joins the items of a reply in another way than those of the conversation.
            self._answer = answer.content if not is_codex or len(parts) == 1 else None
        if not text or text.isspace():
            return SkippedPart(origin=origin, rule="no_reply", count=1)
        if not any(message.role == "user" for message in self._messages):
            return SkippedPart(origin=origin, rule="no_content", count=1)
        session = about["session"] or str(origin)
        at = about["at"]
        reason = about.get("reason")
        return Interaction(
            id=f"{session}:{origin.line}",
            origin=origin,
            messages=tuple(self._messages),
            reply=text,
            finish_reason=_FINISHED.get(reason or "", reason),
            group=about.get("agent") or ("side_agent" if about.get("side") else None),
            session=session,
            trace=session,
            model=about["model"],
            extra={"timestamp": at} if 0 < len(at) <= 40 else {},
            **_take_usage(about["usage"]),
        )

    def _take_answer(self, parts: list[Any]) -> LogTurn:
        if self.kind == "codex":
            if len(parts) == 1 and parts[0].get("type") == "function_call":  # spares the search for text
                [call] = parts
                written = write_call(call.get("name"), call.get("arguments"), "reply.content[0]")
                return LogTurn("assistant", written)
            listed = [_to_parts(item, f"reply.items[{place}]") for place, item in enumerate(parts)]
            parts = list(chain.from_iterable(listed))
        [answer] = take_message({"role": "assistant", "content": parts}, "reply")
        return answer


def _take_plain(message: dict[str, Any]) -> Message | None:
    """Read a message of one text or one result, as most are: spares the search for calls and reasoning."""
    result = _take_result(message)
    if result is not None:
        return Message(role="tool", content=result)
    role = message.get("role")
    known = ROLES.get(role) if type(role) is str else None
    text = None if known is None or known == "tool" else _take_text(message)
    if text is None or known is None:
        return None
    return Message(role=known, content=drop_reasoning(text) if known == "assistant" else text)


def _take_result(message: dict[str, Any]) -> str | None:
    """Return the text of a tool's result that is the whole message; None for anything else."""
    if message.get("type") == "function_call_output":
        text = message.get("output")
        return text if type(text) is str else None
    content = message.get("content")
    if type(content) is not list or len(content) != 1 or type(content[0]) is not dict:
        return None
    [part] = content
    if part.get("type") != "tool_result" or message.get("role") != "user" or "type" in message:
        return None
    text = part.get("content")
    return text if type(text) is str and "\0" not in text else None


def _take_text(message: dict[str, Any]) -> str | None:
    """Return the text of a message, also of its only part; None for anything else."""
    content = message.get("content") if message.get("type", "message") == "message" else None
    if type(content) is list and len(content) == 1 and type(content[0]) is dict:
        [part] = content
        content = part.get("text") if part.get("type") in ("text", "input_text", "output_text") else None
    return content if type(content) is str and "\0" not in content else None


def _take_usage(usage: Any) -> dict[str, Any]:
    if not isinstance(usage, dict):
        return {}
    if "cached_input_tokens" in usage:
        usage = {"cached_tokens": usage["cached_input_tokens"], **usage}
    return take_usage({"usage": usage})


_TEXT_PARTS = frozenset(
    (
        *("text", "input_text", "output_text", "reasoning_text", "summary_text"),
        *("thinking", "redacted_thinking", "reasoning", "tool_use"),
    )
)


def _has_other_parts(message: dict[str, Any]) -> bool:
    """Whether a message holds pictures or files, also in the result of a tool."""
    waiting = [message.get("content")]
    while waiting:
        content = waiting.pop()
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind == "tool_result":
                waiting.append(part.get("content"))
            elif not isinstance(kind, str) or kind not in _TEXT_PARTS:
                return True
    return False


def _take_item(item: dict[str, Any], key: str) -> list[LogTurn]:
    kind = item.get("type", "message")
    if kind == "message":
        return take_message(item, key)
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        output = item.get("output")
        if isinstance(output, dict) and "content" in output:
            output = output["content"]
        return [LogTurn("tool", output if isinstance(output, str) else write_json(output, key))]
    parts = _to_parts(item, key)
    return take_message({"role": "assistant", "content": parts}, key) if parts else []


def _to_parts(item: dict[str, Any], key: str) -> list[Any]:
    """Return the parts of what the model wrote: text, reasoning, calls of tools."""
    kind = item.get("type", "message")
    if kind == "message":
        return content_parts(item)
    if kind == "reasoning":
        return [item]
    if kind == "function_call":
        return [{"type": "tool_use", "name": item.get("name"), "input": item.get("arguments")}]
    if kind == "custom_tool_call":
        return [{"type": "tool_use", "name": item.get("name"), "input": {"input": item.get("input")}}]
    if kind in ("local_shell_call", "web_search_call"):
        return [{"type": "tool_use", "name": kind.removesuffix("_call"), "input": item.get("action")}]
    raise BadRow(f"`{key}.type` is unknown")


def _join_calls(items: list[dict[str, Any]], key: str) -> list[LogTurn]:
    """Join what the model wrote in a row: Codex lists text and calls one by one."""
    joined: list[LogTurn] = []
    for item in items:
        for turn in _take_item(item, key):
            if joined and turn.role == joined[-1].role == "assistant":
                content = "\n".join(filter(None, (joined[-1].content, turn.content)))
                joined[-1] = LogTurn("assistant", content, joined[-1].reasoning)
            else:
                joined.append(turn)
    return joined
