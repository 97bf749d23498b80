"""Transcripts of coding agents: Claude Code and Codex write one file per session, one event per line.

Input: the lines of a file. Output: blocks of replies, each on the line where it begins, with the conversation
before it; of the lines of a block its interactions, which share their messages. Claude Code links its lines
into a tree, so edited prompts, side agents and compacted sessions are separate branches; Codex replaces its
history when it compacts. What is not an exchange is counted.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import orjson

from graftwork.data.ingest.blocks import (
    ByteStream,
    Flaw,
    LogBlock,
    RowResult,
    SkippedPart,
    Transcript,
    make_block,
    name_size,
    split_lines,
)
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    parse_object,
    plain_text,
    take_fact,
    take_usage,
    write_json,
)
from graftwork.data.ingest.turns import (
    FINISH_REASONS,
    ROLES,
    LogTurn,
    drop_reasoning,
    take_message,
    to_messages,
    write_call,
    write_reply,
)
from graftwork.records.interaction import Interaction, Message, Origin

LONGEST_CONTEXT = 256 << 10
"""Bytes of a reply and of the conversation before it. Sessions of agents grow to megabytes, and every reply
is a row with all that was before it."""
MOST_BYTES = 256 << 20
"""A whole session is in memory while it is read."""
TOO_MUCH_BEFORE = "too_much_context"
OTHER_LINE = "other_line"
API_ERROR = "api_error"
_TYPES = ("user", "assistant", "system", "summary", "queue-operation", "file-history-snapshot", "ai-title")
_CODEX_TYPES = ("session_meta", "response_item", "turn_context", "compacted")
_LOOKED_AT = 20
CONTINUES = b'{"keep":'
"""How a line of a block begins that continues the conversation."""
ASSISTANT = b'"assistant"'
_LIGHTEST = 512
"""The least weight of a reply or a fault in a block."""


def find_transcript(head: bytes) -> Transcript | None:
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


class _Step:
    """A message of a conversation, linked to the one before it: branches share a prefix."""

    __slots__ = ("before", "data", "depth", "digest", "size")

    def __init__(self, before: "_Step | None", data: bytes) -> None:
        self.before = before
        self.data = data
        depth, size, digest = (0, 0, b"") if before is None else (before.depth, before.size, before.digest)
        self.depth: int = depth + 1
        self.size: int = size + len(data) + 1
        self.digest: bytes = hashlib.sha256(digest + data).digest()


class _Reply(NamedTuple):
    """`parts` is JSON without brackets, `about` a JSON object: what the log states about the reply.

    `step` is the reply as a message of the conversation after it.
    """

    line: int
    before: _Step | None
    parts: bytes
    about: bytes
    step: bytes


_Item = _Reply | str | Flaw


def cut_transcript(
    stream: ByteStream, kind: Transcript, *, file: str, size: int, longest: int
) -> Iterator[LogBlock]:
    """Yield blocks of replies.

    Written out, every reply repeats the conversation before it. So a block states, before each reply, only
    what its conversation has beyond that of the reply before, and is read from its first line on.
    """
    lines = _parse_lines(stream, longest=longest)
    replies = _split_claude_code(lines) if kind == "claude_code" else _split_codex(lines)
    block = _OpenBlock(file, kind)
    left_out: Counter[str] = Counter()
    last = 1
    for item in replies:
        if isinstance(item, str):
            left_out[item] += 1
            continue
        data, cost = b"", _LIGHTEST
        if isinstance(item, _Reply):
            last = max(last, item.line)
            # With the hash of what was before it, so that its line identifies the row.
            before = b"" if item.before is None else item.before.digest.hex().encode()
            data = b'{"before":"%b","parts":[%b],"about":%b}' % (before, item.parts, item.about)
            # What the row takes when it is written out.
            cost = max(cost, len(data) + (0 if item.before is None else item.before.size))
            if cost > min(LONGEST_CONTEXT, longest):
                left_out[TOO_MUCH_BEFORE] += 1
                continue
        if block.weight and block.weight + cost > size:
            yield block.close()
            block = _OpenBlock(file, kind)
        block.weight += cost
        if isinstance(item, Flaw):
            block.flaws.append(item)
        else:
            block.add(item, data)
    if left_out:
        block.add_line(last, orjson.dumps({"left_out": dict(sorted(left_out.items()))}))
    if block.lines or block.flaws:
        yield block.close()


class _OpenBlock:
    """The lines of a block: replies, and before them what they have in their conversation beyond the last."""

    def __init__(self, file: str, kind: Transcript) -> None:
        self.weight = 0
        self.lines: list[int] = []
        self.flaws: list[Flaw] = []
        self._file, self._kind = file, kind
        self._data = bytearray()
        self._steps: list[_Step] = []
        self._answer = b""

    def add(self, reply: _Reply, data: bytes) -> None:
        new: list[_Step] = []
        step = reply.before
        steps = self._steps
        while step is not None and (step.depth > len(steps) or steps[step.depth - 1] is not step):
            new.append(step)
            step = step.before
        keep = 0 if step is None else step.depth
        if new or keep != len(self._steps):
            new.reverse()
            self._steps[keep:] = new
            # Nearly always the conversation continues with the reply before, which is not written again.
            has_answer = bool(new) and new[0].data == self._answer
            messages = b",".join(step.data for step in new[has_answer:])
            form = b'%b%d,"answer":true,"messages":[%b]}' if has_answer else b'%b%d,"messages":[%b]}'
            self.add_line(reply.line, form % (CONTINUES, keep, messages))
        self.add_line(reply.line, data)
        self._answer = reply.step

    def add_line(self, line: int, data: bytes) -> None:
        self._data += data
        self._data += b"\n"
        self.lines.append(line)

    def close(self) -> LogBlock:
        first = min([*self.lines, *(flaw.line for flaw in self.flaws)])
        return make_block(
            self._file,
            kind=self._kind,
            first_line=first,
            data=bytes(self._data),
            offsets=tuple(line - first for line in self.lines),
            flaws=self.flaws,
        )


def _parse_lines(stream: ByteStream, *, longest: int) -> Iterator[tuple[int, dict[str, Any]] | Flaw]:
    size, line = 0, 1
    for record in split_lines(stream, line=1, longest=longest):
        line = record.line
        if isinstance(record, Flaw):
            yield record
            continue
        data = record.data
        size += len(data)
        if size > MOST_BYTES:
            yield Flaw(line, "parse_error", f"the transcript has more than {name_size(MOST_BYTES)}")
            return
        if data.isspace() or (stream.damage and not data.endswith(b"\n")):
            continue
        row = parse_object(data)
        if row is not None:
            yield line, row
        else:
            open_end = "" if data.endswith(b"\n") else "; the file may still be being written"
            yield Flaw(line, "parse_error", f"the row is not a JSON object{open_end}")
    if stream.damage:
        yield Flaw(line, "parse_error", f"{stream.damage}; the rows before are read")


class _Event(NamedTuple):
    """A line of Claude Code. `parts` is the content of its message: JSON without brackets, None without one.

    A session may be large: what is kept of a line is text and bytes, which take less than parsed JSON.
    """

    line: int
    uuid: str
    parent: str
    role: bytes
    parts: bytes | None
    message: str
    """The id that parts of one message share."""
    is_reply: bool
    is_error: bool
    about: bytes
    reason: str | None
    usage: bytes | None


def _split_claude_code(lines: Iterator[tuple[int, dict[str, Any]] | Flaw]) -> Iterator[_Item]:
    events: list[_Event] = []
    for item in lines:
        if isinstance(item, Flaw):
            yield item
            continue
        line, row = item
        is_turn = row.get("type") in ("user", "assistant") and isinstance(row.get("message"), dict)
        if not is_turn:
            yield OTHER_LINE
        if is_turn or isinstance(row.get("uuid"), str):  # a link of the tree, perhaps without a message
            try:
                events.append(_to_event(line, row))
            except TypeError:
                yield _too_deep(line)
    tree = _Tree(events)
    for index, event in enumerate(events):
        if not event.is_reply:
            continue
        if event.is_error:
            yield API_ERROR
        elif not tree.continues_reply(index):
            yield tree.join_parts(index)


def _to_event(line: int, row: dict[str, Any]) -> _Event:
    raw, uuid = row.get("message"), row.get("uuid")
    message = raw if isinstance(raw, dict) else {}
    is_reply = row.get("type") == "assistant" and isinstance(raw, dict)
    about, usage = b"", None
    if is_reply:
        stated = {
            "session": plain_text(row.get("sessionId")),
            "side": bool(row.get("isSidechain")),
            "agent": take_fact(row.get("agentId")),
            "at": plain_text(row.get("timestamp")),
            "model": take_fact(message.get("model")),
        }
        about = orjson.dumps(stated)[1:-1]
        usage = message.get("usage")
    return _Event(
        line,
        uuid if isinstance(uuid, str) else "",
        plain_text(row.get("parentUuid")),
        orjson.dumps(message.get("role")),
        orjson.dumps(content_parts(message))[1:-1] if isinstance(raw, dict) else None,
        plain_text(message.get("id")),
        is_reply,
        bool(row.get("isApiErrorMessage")),
        about,
        take_fact(message.get("stop_reason")),
        orjson.dumps(usage) if usage else None,
    )


def _too_deep(line: int) -> Flaw:
    return Flaw(line, "parse_error", "the row is nested too deeply")


class _Tree:
    """The lines of a session by their ids, their parents and the replies that they are parts of.

    Links to later lines are not followed, so there are no loops.
    """

    def __init__(self, events: list[_Event]) -> None:
        self._events = events
        self._parts: dict[str, list[int]] = {}
        self._parents: list[int | None] = []
        self._above: list[int | None] = []
        """The nearest line above this one that has a message."""
        self._steps: dict[int, _Step] = {}
        by_id = {event.uuid: index for index, event in enumerate(events) if event.uuid}
        for index, event in enumerate(events):
            parent = by_id.get(event.parent)
            parent = None if parent is None or parent >= index else parent
            self._parents.append(parent)
            if parent is None:
                self._above.append(None)
            else:
                ancestor = events[parent]
                has_message = ancestor.parts is not None and not ancestor.is_error
                self._above.append(parent if has_message else self._above[parent])
            if event.is_reply and event.message:
                self._parts.setdefault(event.message, []).append(index)

    def continues_reply(self, index: int) -> bool:
        """Whether this is a later part of a reply that began before."""
        parent, name = self._parents[index], self._events[index].message
        if parent is None or not name:
            return False
        before = self._events[parent]
        return before.is_reply and before.message == name

    def _before(self, index: int) -> _Step | None:
        """Return the conversation before a reply."""
        end = above = self._above[index]
        waiting: list[int] = []
        while above is not None and above not in self._steps:
            waiting.append(above)
            above = self._above[above]
        for number in reversed(waiting):
            self._steps[number] = self._make_step(number)
        return None if end is None else self._steps[end]

    def _make_step(self, index: int) -> _Step:
        """Make the last step of a conversation that ends with this line."""
        first = self._events[index]
        above, name, parts = self._above[index], first.message, first.parts or b""
        if name and above is not None and self._events[above].message == name:
            listed = [parts]
            while above is not None and self._events[above].message == name:
                first = self._events[above]  # the parts of one reply are on several lines
                listed.append(first.parts or b"")
                above = self._above[above]
            parts = b",".join(filter(None, reversed(listed)))
        return _Step(None if above is None else self._steps[above], _write_message(first.role, parts))

    def join_parts(self, index: int) -> _Reply:
        """Return a reply whose parts are on several lines as one."""
        first = self._events[index]
        numbers = self._parts.get(first.message, ())
        parts, reason, usage = first.parts or b"", first.reason, first.usage
        if len(numbers) > 1:
            listed = [self._events[number] for number in numbers]
            reason = next((event.reason for event in reversed(listed) if event.reason), None)
            usage = next((event.usage for event in reversed(listed) if event.usage), None)
            parts = b",".join(event.parts for event in listed if event.parts)
        header = b'{%b,"reason":%b,"usage":%b}' % (first.about, orjson.dumps(reason), usage or b"null")
        return _Reply(first.line, self._before(index), parts, header, _write_message(ASSISTANT, parts))


def _write_message(role: bytes, parts: bytes) -> bytes:
    return b'{"role":%b,"content":[%b]}' % (role, parts)


def content_parts(message: dict[str, Any]) -> list[Any]:
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
        self._history: _Step | None = None
        self._reply: list[bytes] = []
        self._usage: Any = None
        self._began = 0

    def read(self, line: int, row: dict[str, Any], payload: dict[str, Any]) -> Sequence[_Item]:
        kind = row.get("type")
        if kind == "response_item":
            return self._read_item(line, row, payload)
        if kind == "event_msg" and payload.get("type") == "token_count":
            info = payload.get("info")
            self._usage = info.get("last_token_usage") if isinstance(info, dict) else self._usage
        elif kind == "turn_context":
            self._model = take_fact(payload.get("model")) or self._model
        elif kind == "session_meta":
            self._session = plain_text(first_of(payload, "id", "session_id")) or self._session
            instructions = first_of(payload, "base_instructions", "instructions")
            self._set_system(
                plain_text(instructions.get("text") if isinstance(instructions, dict) else instructions)
            )
        elif kind == "compacted":
            return [*self.end_reply(), *self._compact(line, payload)]
        else:
            return (OTHER_LINE,)
        return ()

    def _read_item(self, line: int, row: dict[str, Any], item: dict[str, Any]) -> Sequence[_Item]:
        data = _write(item)
        if data is None:
            return (_too_deep(line),)
        if _is_from_model(item):
            if not self._reply:
                self._began, self._at = line, plain_text(row.get("timestamp"))
            self._reply.append(data)
            return ()
        ended = self.end_reply()
        self._history = _Step(self._history, b"[%b]" % data)
        return ended

    def end_reply(self) -> Sequence[_Item]:
        parts, usage = self._reply, self._usage
        self._reply, self._usage = [], None
        if not parts:
            return ()
        header = {"session": self._session, "at": self._at, "model": self._model, "usage": usage}
        data = _write(header) or _write({**header, "usage": None}) or b"{}"
        joined = parts[0] if len(parts) == 1 else b",".join(parts)
        before, step = self._history, b"[%b]" % joined
        self._history = _Step(before, step)
        return (_Reply(self._began, before, joined, data, step),)

    def _add(self, items: list[bytes]) -> None:
        self._history = _Step(self._history, b"[%b]" % b",".join(items))

    def _set_system(self, text: str) -> None:
        """Put the instructions before the history, in place of earlier ones."""
        if not text or text == self._system:
            return
        steps = []
        step = self._history
        while step is not None:
            steps.append(step.data)
            step = step.before
        if self._system:
            steps.pop()
        self._system = text
        self._restart()
        for data in reversed(steps):
            self._history = _Step(self._history, data)

    def _restart(self) -> None:
        self._history = None
        if self._system:
            self._add([orjson.dumps({"role": "system", "content": self._system})])

    def _compact(self, line: int, payload: dict[str, Any]) -> Iterator[_Item]:
        history = payload.get("replacement_history")
        items = [item for item in history if isinstance(item, dict)] if isinstance(history, list) else []
        self._restart()
        together: list[bytes] = []
        was_from_model = False
        for item in items or [{"role": "user", "content": plain_text(payload.get("message"))}]:
            data = _write(item)
            if data is None:
                yield _too_deep(line)
                continue
            if together and not (was_from_model and _is_from_model(item)):
                self._add(together)
                together = []
            together.append(data)
            was_from_model = _is_from_model(item)
        if together:
            self._add(together)


def _write(value: Any) -> bytes | None:
    """Write JSON; None if it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return None


_FROM_MODEL = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")


def _is_from_model(item: dict[str, Any]) -> bool:
    return item.get("type") in _FROM_MODEL or (
        item.get("type") == "message" and item.get("role") == "assistant"
    )


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

    def _add(self, step: Any, index: int) -> None:
        items = step if self.kind == "codex" else [step]
        if len(items) == 1 and (plain := _take_plain(items[0])) is not None:
            self._messages.append(plain)
            return
        if any(_has_other_parts(item) for item in items):
            self._flaws[index] = None
            return
        key = f"messages[{index}]"
        try:
            turns = _join_calls(items, key) if self.kind == "codex" else take_message(step, key)
        except BadRow as error:
            self._flaws[index] = error
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
        timestamp = about["at"]
        reason = about.get("reason")
        facts = {}
        if isinstance(usage := about["usage"], dict):
            cached = {"cached_tokens": usage["cached_input_tokens"]} if "cached_input_tokens" in usage else {}
            facts = take_usage({"usage": {**cached, **usage}})
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
            extra={"timestamp": timestamp} if 0 < len(timestamp) <= 40 else {},
            **facts,
        )

    def _take_answer(self, parts: list[Any]) -> LogTurn:
        if self.kind == "codex":
            if len(parts) == 1 and parts[0].get("type") == "function_call":  # spares the search for text
                [call] = parts
                content = write_call(call.get("name"), call.get("arguments"), "reply.content[0]")
                return LogTurn("assistant", content)
            listed = [_to_parts(item, f"reply.items[{index}]") for index, item in enumerate(parts)]
            parts = list(chain.from_iterable(listed))
        [answer] = take_message({"role": "assistant", "content": parts}, "reply")
        return answer


def _take_plain(message: dict[str, Any]) -> Message | None:
    """Read a message of one text or one result, as most are: spares the search for calls and reasoning."""
    result = _take_result(message)
    if result is not None:
        return Message(role="tool", content=result)
    role = message.get("role")
    normalized = ROLES.get(role) if type(role) is str else None
    text = None if normalized is None or normalized == "tool" else _take_text(message)
    if text is None or normalized is None:
        return None
    return Message(role=normalized, content=drop_reasoning(text) if normalized == "assistant" else text)


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
    """Return the text of a message, or of its only part; None for anything else."""
    content = message.get("content") if message.get("type", "message") == "message" else None
    if type(content) is list and len(content) == 1 and type(content[0]) is dict:
        [part] = content
        content = part.get("text") if part.get("type") in ("text", "input_text", "output_text") else None
    return content if type(content) is str and "\0" not in content else None


_TEXT_PARTS = frozenset(
    (
        *("text", "input_text", "output_text", "reasoning_text", "summary_text"),
        *("thinking", "redacted_thinking", "reasoning", "tool_use"),
    )
)


def _has_other_parts(message: dict[str, Any]) -> bool:
    """Whether a message contains pictures or files, including in the result of a tool."""
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
