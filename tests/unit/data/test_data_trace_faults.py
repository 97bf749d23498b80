"""Bad input among traces: each fault has its file, line and rule, and what is good is read."""

import gzip
import json

import pytest
import zstandard

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.read import read_file
from graftwork.data.prepare import audit_logs
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction


def attribute(key, value):
    return {"key": key, "value": {"stringValue": value}}


def span(number, **changes):
    def message(role, text):
        return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])

    facts = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": message("user", f"Where is house {number}?"),
        "gen_ai.output.messages": message("assistant", f"In street {number}."),
    }
    held = {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "parentSpanId": "f" * 16,
        "attributes": [attribute(key, value) for key, value in facts.items()],
    }
    return {**held, **changes}


def batch(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(folder, name, data):
    (folder / name).write_bytes(data)
    found = list(read_file(name, root=folder))
    faults = [row for row in found if isinstance(row, ReadFault)]
    return [row.reply for row in found if isinstance(row, Interaction)], faults


def test_spans_whose_parents_are_missing_are_rows_all_the_same(tmp_path):
    replies, faults = read(tmp_path, "t.jsonl", lines(batch(span(1), span(2)), batch(span(3))))
    assert replies == ["In street 1.", "In street 2.", "In street 3."]
    assert not faults


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attributes": "text"}, "`attributes` must be a list"),
        ({"events": {"a": 1}}, "`events` must be a list"),
        ({"attributes": [{"key": 3}]}, r"`attributes\[0\].key` must be text"),
        ({"status": [2]}, "`status` must be an object"),
    ],
)
def test_a_span_with_a_wrong_type_is_named_by_its_path_and_stops_no_other(tmp_path, changes, why):
    replies, [fault] = read(
        tmp_path, "t.jsonl", lines(batch(span(1)), batch(span(2), span(3, **changes), span(4)))
    )
    assert replies == ["In street 1.", "In street 2.", "In street 4."]
    assert (fault.origin.file, fault.origin.line) == ("t.jsonl", 2)
    assert fault.message.startswith("`resourceSpans[0].scopeSpans[0].spans[1]`: ")
    with pytest.raises(ValueError, match=why):
        raise ValueError(fault.message)


def test_a_trace_file_that_is_still_being_written_loses_its_last_line_alone(tmp_path):
    data = lines(batch(span(1)), batch(span(2)), batch(span(3)))
    replies, [fault] = read(tmp_path, "t.jsonl", data[:-40])
    assert replies == ["In street 1.", "In street 2."]
    assert (fault.origin.line, "may still be being written" in fault.message) == (3, True)


@pytest.mark.parametrize(
    ("name", "pack"), [("t.jsonl.gz", gzip.compress), ("t.jsonl.zst", zstandard.compress)]
)
def test_of_a_compressed_file_that_is_cut_off_the_rows_before_are_read(tmp_path, name, pack):
    many = lines(*(batch(span(number)) for number in range(3000)))
    packed = pack(many)
    replies, [fault] = read(tmp_path, name, packed[: len(packed) * 2 // 3])
    assert 500 < len(replies) < 3000
    assert replies == [f"In street {number}." for number in range(len(replies))]
    assert fault.origin.line == len(replies) + 1
    assert "ends too early; the rows before are read" in fault.message


def test_the_formats_of_a_folder_may_differ_from_file_to_file_and_line_to_line(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]}
    observation = {"id": "o", "trace_id": "t", "type": "GENERATION", "input": "What?", "output": "A lamp."}
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.jsonl").write_bytes(lines(batch(span(1)), chat, {"foo": 1}))
    (logs / "b.json").write_text(json.dumps([observation, chat]))
    (logs / "notes.txt").write_text("not a log")
    context = AuditContext(settings=DataSettings(logs=("logs",)))
    audit = audit_logs(context, folder=tmp_path / "sifted", root=tmp_path)
    [schema] = [finding for finding in audit.findings if finding.code == "schema"]
    assert [(str(example.origin), example.excerpt[:28]) for example in schema.examples] == [
        ("logs/a.jsonl:3", "no known shape (keys: foo); ")
    ]
    assert audit.rows == 5
