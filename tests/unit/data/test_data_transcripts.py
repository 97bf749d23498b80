"""Transcripts of coding agents: one row per reply, with the branch before it."""

import json

import pytest

from graftwork.data.ingest import transcripts
from graftwork.data.ingest.blocks import ReadFault, SkippedPart
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block, read_file
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction

CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'


def line(kind, uuid, parent, content, **more):
    role = "assistant" if kind == "assistant" else "user"
    message = {"role": role, "content": content, **more.pop("message", {})}
    row = {"parentUuid": parent, "isSidechain": False, "sessionId": "s-1", "type": kind, "uuid": uuid}
    return {**row, "timestamp": "2026-01-01T00:00:00Z", "message": message, **more}


def reply(uuid, parent, content, *, message_id, **more):
    about = {"id": message_id, "model": "large-1", "stop_reason": more.pop("stop_reason", "end_turn")}
    about["usage"] = {"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 5}
    return line("assistant", uuid, parent, content, message=about, **more)


CLAUDE = [
    {"type": "summary", "summary": "x", "leafUuid": "z"},
    line("user", "u1", None, "List the files."),
    reply("a1", "u1", [{"type": "thinking", "thinking": "Use ls."}], message_id="m1", stop_reason=None),
    reply("a2", "a1", [{"type": "text", "text": "I look."}], message_id="m1", stop_reason=None),
    reply(
        "a3",
        "a2",
        [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}}],
        message_id="m1",
        stop_reason="tool_use",
    ),
    line("user", "u2", "a3", [{"type": "tool_result", "tool_use_id": "t", "content": "a.py"}]),
    reply("a4", "u2", [{"type": "text", "text": "There is a.py."}], message_id="m2"),
    line("user", "u3", "a4", "Thanks. And now?"),
    reply("a5", "u3", [{"type": "text", "text": "Nothing."}], message_id="m3"),
    line("user", "u4", "a4", "Thanks. Remove it."),  # the prompt was edited: a branch
    reply("a6", "u4", [{"type": "text", "text": "Removed."}], message_id="m4"),
    line("user", "u5", None, "Summary: a.py was removed.", isCompactSummary=True),
    reply("a7", "u5", [{"type": "text", "text": "Go on."}], message_id="m5"),
    reply("a8", "u5", [{"type": "text", "text": "API Error"}], message_id="m6", isApiErrorMessage=True),
]


def item(kind, **payload):
    return {
        "timestamp": "2026-01-01T00:00:00Z",
        "type": "response_item",
        "payload": {"type": kind, **payload},
    }


CODEX = [
    {"type": "session_meta", "payload": {"id": "c-1", "base_instructions": {"text": "Be brief."}}},
    {"type": "turn_context", "payload": {"model": "large-2"}},
    item("message", role="user", content=[{"type": "input_text", "text": "List the files."}]),
    {"type": "event_msg", "payload": {"type": "user_message", "message": "List the files."}},
    item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "Use ls."}]),
    item("function_call", name="Bash", arguments='{"command": "ls"}', call_id="1"),
    {
        "type": "event_msg",
        "payload": {
            "type": "token_count",
            "info": {"last_token_usage": {"input_tokens": 9, "cached_input_tokens": 4, "output_tokens": 2}},
        },
    },
    item("function_call_output", call_id="1", output="a.py"),
    item("message", role="assistant", content=[{"type": "output_text", "text": "There is a.py."}]),
    {"type": "compacted", "payload": {"message": "a.py was listed."}},
    item("message", role="user", content=[{"type": "input_text", "text": "Go on."}]),
    item("message", role="assistant", content=[{"type": "output_text", "text": "Done."}]),
]


def write(folder, rows, name="session.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def read_all(folder, rows, **settings):
    name = write(folder, rows)
    found = list(read_file(name, root=folder, settings=DataSettings(**settings)))
    assert not any(isinstance(row, ReadFault) for row in found), found
    return found


def left_out(folder, rows):
    name = write(folder, rows)
    results = [
        row.result
        for block in cut_blocks(name, root=folder)
        for row in read_block(block, settings=DataSettings())
    ]
    return {part.rule: part.count for part in results if isinstance(part, SkippedPart)}


def test_each_reply_of_claude_code_is_a_row_on_its_line(tmp_path):
    rows = read_all(tmp_path, CLAUDE)
    assert [(row.origin.line, row.reply.split("\n")[-1]) for row in rows] == [
        (3, "</tool_call>"),
        (7, "There is a.py."),
        (9, "Nothing."),
        (11, "Removed."),
        (13, "Go on."),
    ]
    assert {row.session for row in rows} == {"s-1"}
    assert all(row.trace == "s-1" for row in rows)


def test_parts_of_one_reply_on_several_lines_are_joined(tmp_path):
    first = read_all(tmp_path, CLAUDE)[0]
    assert first.reply == f"<think>\nUse ls.\n</think>\n\nI look.\n{CALL}"
    assert (first.finish_reason, first.model) == ("tool_calls", "large-1")
    assert (first.prompt_tokens, first.cached_tokens, first.reply_tokens) == (10, 7, 5)


def test_branches_hold_only_what_was_before_them(tmp_path):
    _, _, nothing, removed, compacted = read_all(tmp_path, CLAUDE)
    assert [turn.role for turn in nothing.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert nothing.messages[-1].content == "Thanks. And now?"
    assert removed.messages[-1].content == "Thanks. Remove it."
    assert removed.messages[:-1] == nothing.messages[:-1]
    assert [turn.content for turn in compacted.messages] == ["Summary: a.py was removed."]


def test_side_agents_are_conversations_of_their_own(tmp_path):
    side = [
        line("user", "x1", None, "Search.", isSidechain=True, agentId="searcher"),
        reply(
            "x2",
            "x1",
            [{"type": "text", "text": "Found."}],
            message_id="m9",
            isSidechain=True,
            agentId="searcher",
        ),
    ]
    row = read_all(tmp_path, [*CLAUDE, *side])[-1]
    assert (row.reply, row.group, len(row.messages)) == ("Found.", "searcher", 1)


def test_records_without_a_reply_are_counted_by_rule(tmp_path):
    assert left_out(tmp_path, CLAUDE) == {"api_error": 1, "other_line": 1}


def test_each_reply_of_codex_is_a_row_and_compaction_replaces_the_history(tmp_path):
    called, listed, done = read_all(tmp_path, CODEX)
    assert called.reply == f"<think>\nUse ls.\n</think>\n\n{CALL}"
    assert (called.model, called.prompt_tokens, called.cached_tokens, called.reply_tokens) == (
        "large-2",
        9,
        4,
        2,
    )
    assert [turn.role for turn in listed.messages] == ["system", "user", "assistant", "tool"]
    assert [turn.content for turn in done.messages] == ["Be brief.", "a.py was listed.", "Go on."]
    assert [row.origin.line for row in (called, listed, done)] == [5, 9, 12]
    assert {row.session for row in (called, listed, done)} == {"c-1"}


def test_replies_after_pictures_are_left_out_by_rule(tmp_path):
    picture = line("user", "u1", None, [{"type": "image", "source": {}}, {"type": "text", "text": "What?"}])
    rows = [picture, reply("a1", "u1", [{"type": "text", "text": "A cat."}], message_id="m")]
    assert left_out(tmp_path, rows) == {"not_text": 1}


def test_replies_behind_too_long_a_conversation_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(transcripts, "LONGEST_CONTEXT", 400)
    found = left_out(tmp_path, CLAUDE)
    assert found["too_much_context"] >= 3


@pytest.mark.parametrize("rows", [CLAUDE, CODEX])
def test_a_transcript_that_is_still_being_written_loses_only_its_last_line(tmp_path, rows):
    whole = read_all(tmp_path, rows)
    data = (tmp_path / "session.jsonl").read_bytes()
    (tmp_path / "session.jsonl").write_bytes(data[:-20])
    found = list(read_file("session.jsonl", root=tmp_path))
    [fault] = [row for row in found if isinstance(row, ReadFault)]
    assert (fault.origin.line, "still be being written" in fault.message) == (len(rows), True)
    assert [row for row in found if isinstance(row, Interaction)] == whole[: len(found) - 1]


def test_a_broken_line_does_not_stop_the_others(tmp_path):
    name = write(tmp_path, CLAUDE)
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    lines.insert(5, b'{"type": "assistant", \n')
    (tmp_path / name).write_bytes(b"".join(lines))
    found = list(read_file(name, root=tmp_path))
    assert [row.origin.line for row in found if isinstance(row, ReadFault)] == [6]
    assert len([row for row in found if isinstance(row, Interaction)]) == 5


def test_links_in_a_circle_end(tmp_path):
    rows = [line("user", "u1", "a1", "x"), reply("a1", "u1", [{"type": "text", "text": "y"}], message_id="m")]
    [row] = read_all(tmp_path, rows)
    assert (row.question, row.reply) == ("x", "y")


def test_the_format_can_be_forced(tmp_path):
    assert len(read_all(tmp_path, CODEX, format="codex")) == 3
    name = write(tmp_path, CODEX)
    found = list(read_file(name, root=tmp_path, settings=DataSettings(format="claude_code")))
    assert all(isinstance(row, ReadFault) for row in found)


@pytest.mark.parametrize("rows", [CLAUDE, CODEX])
def test_rows_of_a_transcript_do_not_depend_on_how_it_is_cut_into_blocks(tmp_path, rows):
    name = write(tmp_path, rows * 3)

    def read_with(size):
        blocks = list(cut_blocks(name, root=tmp_path, size=size))
        return len(blocks), [row for block in blocks for row in read_block(block, settings=DataSettings())]

    (many, small), (one, whole) = read_with(600), read_with(4 << 20)
    assert (many > 3, one) == (True, 1)
    assert small == whole, "hashes included"


@pytest.mark.parametrize("kind", ["claude_code", "codex"])
def test_a_line_that_is_nested_too_deeply_is_a_fault_of_that_line(tmp_path, kind):
    deep = json.loads("[" * 400 + "]" * 400)
    is_claude = kind == "claude_code"
    bad = line("user", "u9", "a7", deep) if is_claude else item("message", role="user", content=deep)
    rows = [*(CLAUDE if is_claude else CODEX), bad]
    found = list(read_file(write(tmp_path, rows), root=tmp_path))
    [fault] = [row for row in found if isinstance(row, ReadFault)]
    assert (fault.origin.line, "nested too deeply" in fault.message) == (len(rows), True)
    assert len(found) > 3
