import json
import os

import pytest
from data_rows import chat, write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.data.audit.row_checks import find_fault
from graftwork.data.ingest.blocks import ReadFault, too_long
from graftwork.data.ingest.files import find_sources
from graftwork.data.ingest.read import read, read_file, read_row
from graftwork.data.settings import DataSettings
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.interaction import Capture, Interaction, Origin

GOOD = json.dumps(chat("Where?", "Here.")).encode()


def read_bytes(tmp_path, data):
    (tmp_path / "log.jsonl").write_bytes(data)
    return list(read(["log.jsonl"], root=tmp_path))


def codes(results):
    return [(r.origin.line, r.code if isinstance(r, ReadFault) else "ok") for r in results]


def test_chat_rows_keep_what_the_log_says(tmp_path):
    row = {
        "id": "r1",
        "session": "s1",
        "agent": {"role": "guide"},
        "model": "m",
        "status": "success",
        "finish_reason": "stop",
        "duration_ms": 12,
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {"role": "assistant", "content": "Here."},
        ],
    }
    write_log(tmp_path / "log.jsonl", [row])
    [found] = read(["log.jsonl"], root=tmp_path)
    assert isinstance(found, Interaction)
    assert (found.id, found.group, found.session, found.model) == ("r1", "guide", "s1", "m")
    assert (found.status, found.finish_reason, found.duration_ms) == ("success", "stop", 12)
    assert [m.role for m in found.messages] == ["system", "user"]
    assert (found.question, found.reply) == ("Where?", "Here.")
    assert str(found.origin) == "log.jsonl:1"


def test_rows_of_a_multi_agent_tool_are_read(tmp_path):
    row = {
        "id": "x",
        "task": {"description": "Sort it"},
        "agent": {"role": "coder"},
        "llm": {"provider": "p", "model": None, "config": {"max_tokens": 500}},
        "execution": {
            "status": "failure",
            "duration_ms": 3,
            "input_messages": [{"role": "user", "content": "Task: Sort it"}],
            "output": None,
            "errors": ["it broke"],
        },
    }
    write_log(tmp_path / "log.jsonl", [row])
    [found] = read(["log.jsonl"], root=tmp_path)
    assert (found.reply, found.status, found.group, found.max_tokens) == ("", "failure", "coder", 500)
    assert found.model == "p"
    assert found.extra == {"errors": 1}


def test_prompts_with_completions_are_read(tmp_path):
    rows = [{"prompt": "2+2?", "completion": "4"}, {"instruction": "Add", "input": "2 2", "output": "4"}]
    write_log(tmp_path / "log.jsonl", rows)
    first, second = read(["log.jsonl"], root=tmp_path)
    assert (first.question, first.reply) == ("2+2?", "4")
    assert second.question == "Add\n\n2 2"


def test_captures_come_back_as_interactions(tmp_path):
    capture = Capture(
        id="c1",
        at="2025-01-01T00:00:00Z",
        session="s",
        model="champion",
        release="abc",
        request={"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 64},
        reply="Here.",
        finish_reason="length",
        prompt_tokens=3,
        reply_tokens=2,
        first_token_ms=1.0,
        total_ms=2.0,
        disconnected=True,
    )
    (tmp_path / "log.jsonl").write_text(capture.model_dump_json() + "\n")
    [found] = read(["log.jsonl"], root=tmp_path)
    assert (found.id, found.reply, found.finish_reason, found.max_tokens) == ("c1", "Here.", "length", 64)
    assert found.status == "disconnected"


@pytest.mark.parametrize(("correction", "code"), [(None, "truncated"), ("It is open.", None)])
def test_a_served_answer_that_broke_off_is_no_example(correction, code):
    row = {
        "id": "c1",
        "at": "2025-01-01T00:00:00Z",
        "session": "s",
        "model": "champion",
        "release": "abc",
        "request": {"messages": [{"role": "user", "content": "Is it open?"}]},
        "reply": "It",
        "finish_reason": "error",
        "prompt_tokens": 0,
        "reply_tokens": 0,
        "first_token_ms": 1.0,
        "total_ms": 2.0,
        "correction": correction,
    }
    [found] = read_row(row, Origin(file="captured.jsonl", line=1), settings=DataSettings())
    fault = find_fault(found, DataSettings())
    assert (fault and fault.code) == code


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "last"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "user"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, "tool"),
        (chat("a\0b", "x"), "NUL"),
        ({"text": "x"}, "no known shape (keys: text)"),
        ([1, 2], "object"),
        ({"request": {"messages": []}, "reply": "x"}, "id"),
    ],
)
def test_a_wrong_type_is_a_fault_that_names_the_key(tmp_path, row, named):
    write_log(tmp_path / "log.jsonl", [row, chat("Where?", "Here.")])
    fault, good = read(["log.jsonl"], root=tmp_path)
    assert fault.code == "schema"
    assert named in fault.message
    assert isinstance(good, Interaction)


def test_bad_lines_are_named_and_the_good_rows_survive(tmp_path):
    lines = [GOOD, b"{not json", b"", GOOD[:-3], b"\xff\xfe\x00", b'{"a": "\x00"}', b'{"a": "\xc3("}', GOOD]
    found = codes(read_bytes(tmp_path, b"\r\n".join(lines)))
    assert found == [
        (1, "ok"),
        (2, "parse_error"),
        (4, "parse_error"),
        (5, "encoding"),
        (6, "encoding"),
        (7, "encoding"),
        (8, "ok"),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    assert codes(read_bytes(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n")) == [(1, "ok")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_utf16_with_its_mark_is_read(tmp_path, encoding, end):
    row = json.dumps(chat("Where \U0001f600?", "Here é."), ensure_ascii=False)
    results = read_bytes(tmp_path, f"\ufeff{row}{end}{{broken{end}{row}{end}".encode(encoding))
    assert codes(results) == [(1, "ok"), (2, "parse_error"), (3, "ok")]
    assert (results[0].question, results[0].reply) == ("Where \U0001f600?", "Here é.")


def test_utf16_that_is_cut_inside_a_character_loses_only_its_last_row(tmp_path):
    whole = f"\ufeff{GOOD.decode()}\n{GOOD.decode()}".encode("utf-16-le")
    assert codes(read_bytes(tmp_path, whole[:-1])) == [(1, "ok"), (2, "parse_error")]


def test_one_json_array_is_read_with_its_line_numbers(tmp_path):
    data = json.dumps([chat("a?", "b."), chat("c?", "d."), {"x": 1}], indent=1).encode()
    results = read_bytes(tmp_path, data)
    assert [code for _, code in codes(results)] == ["ok", "ok", "schema"]
    first, second, _ = [line for line, _ in codes(results)]
    assert data.decode().splitlines()[first - 1].strip().startswith("{")
    assert second > first


def test_the_rows_before_a_broken_place_in_an_array_survive(tmp_path):
    results = read_bytes(tmp_path, b"[" + GOOD + b",\n" + GOOD + b",\n{broken")
    assert codes(results) == [(1, "ok"), (2, "ok"), (3, "parse_error")]


def test_an_array_with_one_element_a_line_loses_only_the_broken_one(tmp_path):
    results = read_bytes(tmp_path, b"[\n" + GOOD + b",\n{broken,\n" + GOOD + b"\n]\n")
    assert codes(results) == [(2, "ok"), (3, "parse_error"), (4, "ok")]


def test_deep_nesting_is_a_fault(tmp_path):
    assert codes(read_bytes(tmp_path, b"[{" + b'"a":[' * 5000 + b"\n")) == [(1, "parse_error")]


@given(st.lists(st.one_of(st.binary(max_size=60), st.just(GOOD)), max_size=8))
@settings(max_examples=150)
def test_no_bytes_crash_the_reader(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("bytes") / "log.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        results = list(read_file(path.name, root=path.parent))
    except GraftError:
        data = b"\n".join(lines)
        wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = data.decode("utf-16" if wide else "utf-8-sig", errors="replace")
        assert not text.strip(" \t\r\n\v\f")
        return
    assert all(isinstance(result, Interaction | ReadFault) for result in results)


KEYS = (
    *("messages", "role", "content", "execution", "output", "agent", "llm", "config", "request", "reply"),
    *("prompt", "completion", "input_messages", "task", "status", "id", "max_tokens", "duration_ms"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)


@given(st.lists(JSON, min_size=1, max_size=5))
@settings(max_examples=80)
def test_no_json_crashes_the_reader(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("json") / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, chat("Where?", "Here.")]))
    results = list(read_file(path.name, root=path.parent))
    assert all(isinstance(result, Interaction | ReadFault) for result in results)
    assert isinstance(results[-1], Interaction)
    assert results[-1].origin.line == len(rows) + 1


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"[]"])
def test_an_empty_file_is_the_users_mistake(tmp_path, content):
    with pytest.raises(UserError, match="empty"):
        read_bytes(tmp_path, content)


def test_a_missing_file_and_a_folder_are_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(read(["nowhere.jsonl"], root=tmp_path))
    with pytest.raises(UserError, match="folder"):
        list(read(["."], root=tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = write_log(tmp_path / "log.jsonl", [chat("a", "b")])
    path.chmod(0)
    with pytest.raises(EnvironmentFailure, match="permission"):
        list(read(["log.jsonl"], root=tmp_path))


def test_globs_are_resolved_in_order_and_files_come_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_log(tmp_path / name, [chat("a", "b")])
    assert find_sources(["*.jsonl", "a.jsonl"], root=tmp_path) == ("a.jsonl", "b.jsonl")
    with pytest.raises(UserError, match="no file matches"):
        find_sources(["*.csv"], root=tmp_path)
    with pytest.raises(UserError, match="no log file"):
        find_sources([])


def test_a_fault_never_quotes_the_row(tmp_path):
    secret = "sk-proj-" + "aB3dE5fG7hJ9kL1mN3pQ5"
    lines = [
        *(f'{{"messages": "{secret}"}}', f'{{"{secret}": 1}}', f'{{"x": "{secret}"'),
        *(f'{{"{"a" * 105}": 1, "{secret}": 1}}', f'{{"{"x" * 45} {secret}": 1, "{"x" * 45} {secret}": 2}}'),
        f'{{"decisions": [{{"{secret}": "q"}}]}}',
    ]
    faults = read_bytes(tmp_path, "\n".join(lines).encode())
    assert len(faults) == len(lines)
    for fault in faults:
        assert secret[:12] not in fault.message


@pytest.mark.parametrize(("size", "said"), [((32 << 20) + 1, "more than 32 MiB"), (40 << 20, "40 MiB")])
def test_a_row_just_over_the_limit_is_not_said_to_have_the_size_that_is_allowed(size, said):
    message = too_long(1, size, longest=32 << 20).message
    assert message == f"the row has {said}, and one row may have 32 MiB"
