"""Transcripts of coding agents: Claude Code and Codex write one file per session, one event per line.

In: the lines of a file. Out: one record per reply of the model with the conversation before it, on the line
where the reply begins. Claude Code links its lines into a tree, so edited prompts, side agents and compacted
sessions are separate branches; Codex replaces its history when it compacts. What is no exchange is counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from graftwork.data.ingest.api_bodies import FINISH_REASONS
from graftwork.data.ingest.blocks import (
    ByteStream,
    Entry,
    Flaw,
    RowResult,
    SkippedPart,
    name_size,
    split_lines,
)
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    take_fact,
    take_list,
    take_object,
    take_usage,
    write_json,
)
from graftwork.data.ingest.turns import (
    LogTurn,
    require_user,
    take_message,
    take_turns,
    to_messages,
    write_reply,
)
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.shape import has_too_many_values

LONGEST_CONTEXT = 256 << 10
"""Bytes of the conversation before a reply. Sessions of agents grow to megabytes, and every reply repeats
what was before it."""
MOST_BYTES = 256 << 20
"""A whole session is in memory while it is read."""
TOO_MUCH_BEFORE = "too_much_context"
OTHER_LINE = "other_line"
API_ERROR = "api_error"
NOT_TEXT = "not_text"
_TYPES = ("user", "assistant", "system", "summary", "queue-operation", "file-history-snapshot", "ai-title")
_CODEX_TYPES = ("session_meta", "response_item", "turn_context", "compacted")
_LOOKED_AT = 20
_FINISHED = {**FINISH_REASONS, "tool_use": "tool_calls", "stop_sequence": "stop"}


def find_transcript(head: bytes) -> str | None:
    """Recognize a transcript by its first lines: the name of its format, or None."""
    for line in head.splitlines()[:_LOOKED_AT]:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if not isinstance(row, dict):
            return None
        kind = row.get("type")
        if kind in _CODEX_TYPES and isinstance(row.get("payload"), dict):
            return "codex"
        if kind in ("user", "assistant") and "uuid" in row and isinstance(row.get("message"), dict):
            return "claude_code"
        is_event = kind == "event_msg" or (kind in _TYPES and ("sessionId" in row or "leafUuid" in row))
        if not is_event and "messageId" not in row:
            return None
    return None


def split_transcript(stream: ByteStream, kind: str, *, longest: int) -> Iterator[Entry | Flaw]:
    """Yield one record per reply, then one that counts what was left out."""
    lines = _parse_lines(stream, longest=longest)
    replies = _split_claude_code(lines) if kind == "claude_code" else _split_codex(lines)
    left_out: Counter[str] = Counter()
    last = 1
    for item in replies:
        if isinstance(item, Flaw):
            yield item
        elif isinstance(item, str):
            left_out[item] += 1
        else:
            line, row = item
            last = max(last, line)
            data = orjson.dumps({"transcript": kind, **row})
            if len(data) > min(LONGEST_CONTEXT, longest):
                left_out[TOO_MUCH_BEFORE] += 1
            else:
                yield Entry(line, data)
    if left_out:
        yield Entry(last, orjson.dumps({"transcript": kind, "left_out": dict(sorted(left_out.items()))}))


_Item = tuple[int, dict[str, Any]] | str | Flaw


def _parse_lines(stream: ByteStream, *, longest: int) -> Iterator[tuple[int, dict[str, Any]] | Flaw]:
    size, line = 0, 1
    for record in split_lines(stream, line=1, longest=longest):
        line = record.line
        if isinstance(record, Flaw):
            yield record
            continue
        size += len(record.data)
        if size > MOST_BYTES:
            yield Flaw(line, "parse_error", f"the transcript has more than {name_size(MOST_BYTES)}")
            return
        if not record.data.strip():
            continue
        if stream.damage and not record.data.endswith(b"\n"):
            continue
        row = None
        if not has_too_many_values(record.data):
            with suppress(orjson.JSONDecodeError):
                row = orjson.loads(record.data)
        if isinstance(row, dict):
            yield line, row
        else:
            open_end = "" if record.data.endswith(b"\n") else "; the file may still be being written"
            yield Flaw(line, "parse_error", f"the row is not a JSON object{open_end}")
    if stream.damage:
        yield Flaw(line, "parse_error", f"{stream.damage}; the rows before are read")


def _split_claude_code(lines: Iterator[tuple[int, dict[str, Any]] | Flaw]) -> Iterator[_Item]:
    rows: list[tuple[int, dict[str, Any]]] = []
    for item in lines:
        if isinstance(item, Flaw):
            yield item
        elif item[1].get("type") in ("user", "assistant") and isinstance(item[1].get("message"), dict):
            rows.append(item)
        elif isinstance(item[1].get("uuid"), str):
            rows.append(item)  # a link of the tree without a message
            yield OTHER_LINE
        else:
            yield OTHER_LINE
    tree = _Tree(rows)
    for place, (line, row) in enumerate(rows):
        if row.get("type") != "assistant" or not isinstance(row.get("message"), dict):
            continue
        if row.get("isApiErrorMessage"):
            yield API_ERROR
            continue
        parent = tree.parent_of(row)
        if parent is not None and parent < place and _same_message(rows[parent][1], row):
            continue  # a later part of a reply that began before
        before = tree.walk_up(parent, below=place)
        if before is None:
            yield TOO_MUCH_BEFORE
            continue
        yield (
            line,
            {
                "session": _text(row.get("sessionId")),
                "side": bool(row.get("isSidechain")),
                "agent": take_fact(row.get("agentId")),
                "messages": [rows[number][1]["message"] for number in before],
                "reply": tree.join_parts(place),
                "at": _text(row.get("timestamp")),
            },
        )


class _Tree:
    """The lines of a session by their ids, their parents and the replies that they are parts of."""

    def __init__(self, rows: list[tuple[int, dict[str, Any]]]) -> None:
        self._rows = rows
        self._by_id: dict[str, int] = {}
        self._parts: dict[str, list[int]] = {}
        self._sizes = [len(orjson.dumps(row.get("message"))) for _, row in rows]
        for place, (_, row) in enumerate(rows):
            if isinstance(row.get("uuid"), str):
                self._by_id[row["uuid"]] = place
            message = row.get("message")
            if row.get("type") == "assistant" and isinstance(message, dict):
                name = message.get("id")
                if isinstance(name, str):
                    self._parts.setdefault(name, []).append(place)

    def parent_of(self, row: dict[str, Any]) -> int | None:
        return self._by_id.get(_text(row.get("parentUuid")))

    def walk_up(self, place: int | None, *, below: int) -> list[int] | None:
        """Return the messages from the root of the branch to here; None if they are too long.

        Links to later lines are not followed, so there are no loops.
        """
        chain: list[int] = []
        size = 0
        while place is not None and place < below:
            row = self._rows[place][1]
            if isinstance(row.get("message"), dict) and not row.get("isApiErrorMessage"):
                chain.append(place)
                size += self._sizes[place]
                if size > LONGEST_CONTEXT:
                    return None
            below = place
            place = self.parent_of(row)
        return chain[::-1]

    def join_parts(self, place: int) -> dict[str, Any]:
        """Return a reply whose parts are on several lines as one message."""
        first = self._rows[place][1]["message"]
        parts: list[Any] = []
        reason = usage = None
        name = first.get("id")
        for number in self._parts[name] if isinstance(name, str) else [place]:
            message = self._rows[number][1]["message"]
            parts += _parts(message)
            reason = message.get("stop_reason") or reason
            usage = message.get("usage") or usage
        return {"content": parts, "model": first.get("model"), "stop_reason": reason, "usage": usage}


def _same_message(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = one.get("message"), other.get("message")
    if one.get("type") != "assistant" or not isinstance(first, dict) or not isinstance(second, dict):
        return False
    return isinstance(first.get("id"), str) and first["id"] == second.get("id")


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _split_codex(lines: Iterator[tuple[int, dict[str, Any]] | Flaw]) -> Iterator[_Item]:
    session = _CodexSession()
    for item in lines:
        if isinstance(item, Flaw):
            yield item
            continue
        line, row = item
        payload = row.get("payload")
        yield from session.read(line, row, payload if isinstance(payload, dict) else {})
    yield from session.end_reply()


class _CodexSession:
    """The history so far, and the reply that is being gathered."""

    def __init__(self) -> None:
        self._session = self._system = self._at = ""
        self._model: str | None = None
        self._history: list[dict[str, Any]] = []
        self._reply: list[dict[str, Any]] = []
        self._usage: Any = None
        self._began = self._size = 0

    def read(self, line: int, row: dict[str, Any], payload: dict[str, Any]) -> Iterator[_Item]:
        kind = row.get("type")
        if kind == "session_meta":
            self._session = _text(first_of(payload, "id", "session_id")) or self._session
            given = first_of(payload, "base_instructions", "instructions")
            self._system = _text(given.get("text") if isinstance(given, dict) else given) or self._system
        elif kind == "turn_context":
            self._model = take_fact(payload.get("model")) or self._model
        elif kind == "compacted":
            yield from self.end_reply()
            self._compact(payload)
        elif kind == "event_msg" and payload.get("type") == "token_count":
            info = payload.get("info")
            self._usage = info.get("last_token_usage") if isinstance(info, dict) else self._usage
        elif kind != "response_item":
            yield OTHER_LINE
        elif _is_from_model(payload):
            if not self._reply:
                self._began, self._at = line, _text(row.get("timestamp"))
            self._reply.append(payload)
        else:
            yield from self.end_reply()
            self._add(payload)

    def end_reply(self) -> Iterator[_Item]:
        if self._reply and self._size > LONGEST_CONTEXT:
            yield TOO_MUCH_BEFORE
        elif self._reply:
            system = [{"role": "system", "content": self._system}] if self._system else []
            answer = {"items": self._reply, "model": self._model, "usage": self._usage}
            context = [*system, *self._history]
            yield (
                self._began,
                {"session": self._session, "messages": context, "reply": answer, "at": self._at},
            )
        for item in self._reply:
            self._add(item)
        self._reply, self._usage = [], None

    def _add(self, item: dict[str, Any]) -> None:
        self._history.append(item)
        self._size += len(orjson.dumps(item))

    def _compact(self, payload: dict[str, Any]) -> None:
        kept = payload.get("replacement_history")
        items = [item for item in kept if isinstance(item, dict)] if isinstance(kept, list) else []
        self._history, self._size = [], 0
        for item in items or [{"role": "user", "content": _text(payload.get("message"))}]:
            self._add(item)


_FROM_MODEL = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")


def _is_from_model(item: dict[str, Any]) -> bool:
    return item.get("type") in _FROM_MODEL or (
        item.get("type") == "message" and item.get("role") == "assistant"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""


def fits_claude_code(row: dict[str, Any]) -> bool:
    return row.get("transcript") == "claude_code"


def fits_codex(row: dict[str, Any]) -> bool:
    return row.get("transcript") == "codex"


def read_claude_code(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a reply and the branch before it."""
    if "left_out" in row:
        return _count_left_out(row, origin)
    reply = take_object(row.get("reply"), "reply")
    messages: list[dict[str, Any]] = []
    for item in take_list(row.get("messages"), "messages"):
        message = take_object(item, "messages")
        previous = messages[-1] if messages else None
        # The parts of one reply are on several lines.
        if previous is not None and message.get("id") is not None and previous.get("id") == message["id"]:
            messages[-1] = {**previous, "content": [*_parts(previous), *_parts(message)]}
        else:
            messages.append(message)
    if any(_has_other_parts(message) for message in (*messages, reply)):
        return [SkippedPart(origin=origin, rule=NOT_TEXT, count=1)]
    turns = take_turns(messages, "messages") if messages else []
    [answer] = take_message({"role": "assistant", "content": reply.get("content")}, "reply")
    reason = take_fact(reply.get("stop_reason"))
    return _make(row, origin, turns, answer, reply, _FINISHED.get(reason or "", reason))


def read_codex(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    if "left_out" in row:
        return _count_left_out(row, origin)
    reply = take_object(row.get("reply"), "reply")
    listed = take_list(row.get("messages"), "messages")
    items = take_list(reply.get("items"), "reply.items")
    if any(_has_other_parts(take_object(item, "messages")) for item in (*listed, *items)):
        return [SkippedPart(origin=origin, rule=NOT_TEXT, count=1)]
    turns: list[LogTurn] = []
    for place, item in enumerate(listed):
        turns += _take_item(take_object(item, "messages"), f"messages[{place}]")
    parts: list[Any] = []
    for place, item in enumerate(items):
        parts += _to_parts(take_object(item, "reply"), f"reply.items[{place}]")
    [answer] = take_message({"role": "assistant", "content": parts}, "reply")
    return _make(row, origin, _join_calls(turns), answer, reply, None)


def _make(
    row: dict[str, Any],
    origin: Origin,
    turns: list[LogTurn],
    answer: LogTurn,
    reply: dict[str, Any],
    reason: str | None,
) -> list[RowResult]:
    text = write_reply(answer)
    if not text.strip():
        return [SkippedPart(origin=origin, rule="no_reply", count=1)]
    if not any(turn.role == "user" for turn in turns):
        return [SkippedPart(origin=origin, rule="no_content", count=1)]
    require_user(turns, "messages")
    session = take_fact(row.get("session")) or str(origin)
    at = row.get("at")
    return [
        Interaction(
            id=f"{session}:{origin.line}",
            origin=origin,
            messages=to_messages(turns),
            reply=text,
            finish_reason=reason,
            group=take_fact(row.get("agent")) or ("side_agent" if row.get("side") else None),
            session=session,
            trace=session,
            model=take_fact(reply.get("model")),
            extra={"timestamp": at} if isinstance(at, str) and 0 < len(at) <= 40 else {},
            **_take_usage(reply.get("usage")),
        )
    ]


def _take_usage(usage: Any) -> dict[str, Any]:
    found = take_usage({"usage": usage})
    if isinstance(usage, dict) and "cached_input_tokens" in usage:
        found |= take_usage({"usage": {"cached_tokens": usage["cached_input_tokens"]}})
    return found


def _count_left_out(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    counts = take_object(row["left_out"], "left_out")
    return [
        SkippedPart(origin=origin, rule=str(rule), count=count)
        for rule, count in counts.items()
        if isinstance(count, int)
    ]


_TEXT_PARTS = (
    *("text", "input_text", "output_text", "reasoning_text", "summary_text"),
    *("thinking", "redacted_thinking", "reasoning", "tool_use"),
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
            elif kind not in _TEXT_PARTS:
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
        return _parts(item)
    if kind == "reasoning":
        return [item]
    if kind == "function_call":
        return [{"type": "tool_use", "name": item.get("name"), "input": item.get("arguments")}]
    if kind == "custom_tool_call":
        return [{"type": "tool_use", "name": item.get("name"), "input": {"input": item.get("input")}}]
    if kind in ("local_shell_call", "web_search_call"):
        return [{"type": "tool_use", "name": kind.removesuffix("_call"), "input": item.get("action")}]
    raise BadRow(f"`{key}.type` is unknown")


def _join_calls(turns: list[LogTurn]) -> list[LogTurn]:
    """Join what the model wrote in a row: Codex lists text and calls one by one."""
    joined: list[LogTurn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "assistant":
            content = "\n".join(filter(None, (joined[-1].content, turn.content)))
            joined[-1] = LogTurn("assistant", content, joined[-1].reasoning)
        else:
            joined.append(turn)
    return joined
