"""What the audit says of tool calls, and which rows are dropped for them."""

import json

import pytest
from data_rows import make_row

from graftwork.data.audit.row_checks import AuditContext, check_row, find_fault, is_dropped, redact_row
from graftwork.data.prepare import audit_files
from graftwork.data.render.rows import list_trained
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Message
from graftwork.text.tool_calls import TextAndCalls, ToolCall, write_calls, write_tools

SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "format": "int32"}},
    "required": ["query"],
}
TOOL = {"type": "function", "function": {"name": "run_sql", "parameters": SCHEMA}}
ASKED = Message(role="user", content="How many rides?")


def call(arguments, name="run_sql"):
    return write_calls(TextAndCalls("", (ToolCall(name, arguments),)))


RIDES = call({"query": "SELECT id FROM rides"})


def row_of(reply, *turns, tools=(TOOL,), **fields):
    system = Message(role="system", content=write_tools(tools) or "Be brief.")
    messages = (system, ASKED, *(Message(role=role, content=text) for role, text in turns))
    return make_row("x", reply, **fields).model_copy(update={"messages": messages})


def judge(row):
    fault = find_fault(row, DataSettings())
    return None if fault is None else (fault.code, fault.reason)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (call('{"query": "SELECT id FROM bikes WHE'), "the arguments are not a JSON object"),
        (call(["SELECT"]), "the arguments are not a JSON object"),
        ("<tool_call>\n{'name': 'run_sql'}\n</tool_call>", "a call is not JSON with a name and arguments"),
        (call({}, name="drop_all"), "the prompt defines no tool drop_all"),
        (call({}), "the schema of run_sql refuses the arguments (query is missing)"),
        (
            call({"query": "SELECT 1", "limit": "5"}),
            "the schema of run_sql refuses the arguments (limit: type)",
        ),
    ],
)
def test_a_reply_with_a_broken_call_is_dropped_with_the_reason(reply, reason):
    assert judge(row_of(reply)) == ("broken_call", reason)
    assert is_dropped("broken_call", DataSettings())
    assert not is_dropped("broken_call", DataSettings(drop_broken_calls=False))


@pytest.mark.parametrize(
    "tools",
    [
        (),
        (TOOL,),
        ({"name": "run_sql", "input_schema": SCHEMA},),
        ({"name": "run_sql", "parameters": {"type": "OBJECT"}},),
        ({"name": "run_sql", "parameters": {"$ref": "https://example.org/schema"}},),
        ({"functionDeclarations": []},),
    ],
)
def test_a_good_call_is_no_fault_however_tools_are_defined(tools):
    assert judge(row_of(RIDES, tools=tools)) is None


def test_text_that_only_names_the_tags_is_no_broken_call():
    assert judge(row_of("Calls go between <tool_call> and </tool_call> tags.")) is None


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        ([("assistant", RIDES), ("tool", "[]"), ("assistant", RIDES), ("tool", "[]")], "repeated_call"),
        ([("assistant", RIDES), ("tool", "[]")], None),
        ([("assistant", RIDES), ("tool", "[]"), ("assistant", RIDES), ("tool", "[1]")], None),
        (
            [("assistant", RIDES), ("tool", "[]"), ("user", "Again."), ("assistant", RIDES), ("tool", "[]")],
            None,
        ),
        ([("tool", "[]")], "unmatched_call"),
        ([("assistant", RIDES), ("tool", "[]"), ("tool", "[]")], "unmatched_call"),
        ([("assistant", RIDES), ("user", "And?")], "unmatched_call"),
        ([("assistant", f"{RIDES}\n{RIDES}"), ("tool", "[]"), ("tool", "[]")], None),
    ],
)
def test_loops_and_results_that_do_not_belong_to_calls_are_found(turns, code):
    found = judge(row_of(RIDES, *turns))
    assert (None if found is None else found[0]) == code


def test_rows_with_unmatched_results_stay_unless_the_setting_drops_them():
    assert not is_dropped("unmatched_call", DataSettings())
    assert is_dropped("unmatched_call", DataSettings(drop_unmatched_calls=True))
    bad = row_of("Six.", ("tool", "6"), reward=-1.0)
    assert judge(bad)[0] == "rated_bad"


def test_no_note_on_a_call_quotes_a_secret():
    row = row_of(call('{"query": "password=hunter2secret0 WHE'))
    (note,) = [
        note
        for note in check_row(row, redact_row(row), context=AuditContext(settings=DataSettings()))
        if note.code == "broken_call"
    ]
    assert "hunter2secret0" not in note.excerpt


def test_the_audit_names_the_lines_of_broken_calls(tmp_path):
    def line(number, arguments):
        function = {"name": "run_sql", "arguments": arguments}
        asked = {"role": "user", "content": f"How many rides on day {number}?"}
        reply = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        return json.dumps({"messages": [asked, reply], "tools": [TOOL]})

    good = json.dumps({"query": "SELECT id FROM rides"})
    lines = [line(number, good[:-7] if number in (3, 5) else good) for number in range(12)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    audit = audit_files([str(tmp_path / "log.jsonl")])
    (finding,) = [finding for finding in audit.findings if finding.code == "broken_call"]
    assert [origin.line for origin in finding.rows] == [4, 6]
    assert finding.reasons == {"the arguments are not a JSON object": 2}
    assert finding.severity == "blocker"
    assert "drop_broken_calls" in finding.fix
    assert audit.usable < 11


LOOP = (
    ("assistant", call({"query": "SELECT id FROM rides"})),
    ("tool", "[[1]]"),
    ("assistant", call({"query": 5})),
    ("tool", "error: query must be text"),
)


def test_a_broken_call_before_the_reply_is_a_finding_and_drops_nothing():
    row = row_of("There is one ride.", *LOOP)
    (note,) = check_row(row, redact_row(row), context=AuditContext(settings=DataSettings()))
    assert note.code == "broken_earlier_call"
    assert note.reason == "the schema of run_sql refuses the arguments (query: type)"
    assert '"query": 5' in note.excerpt
    assert judge(row) is None


def test_a_broken_call_before_the_reply_is_context_and_not_trained_on():
    row = row_of("There is one ride.", *LOOP)
    every = DataSettings(train_on="every")
    assert [answer.reply for answer in list_trained(row, every)] == [LOOP[0][1], row.reply]
    assert len(list_trained(row, every.model_copy(update={"drop_broken_calls": False}))) == 3
    assert list_trained(row, DataSettings()) == [(row.messages, row.reply)]
