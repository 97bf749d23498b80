"""Traces outside of OTLP: exports of Langfuse and Phoenix, and attributes of spans."""

import json

import pytest

from graftwork.data.ingest.blocks import ReadFault, SkippedPart, TraceScore
from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.read import find_format, read_row
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction, Origin

HERE = Origin(file="log.jsonl", line=7)
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call>'
CALLED = {
    "role": "assistant",
    "content": [{"type": "tool-call", "toolName": "find", "input": {"city": "Bern"}}],
}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
ASKED = [("system", "Be brief."), ("user", "Where?")]


def read(row):
    return list(read_row(row, HERE, settings=DataSettings()))


def take(row):
    [result] = read(row)
    assert isinstance(result, Interaction)
    return result


def turns(row):
    return [(message.role, message.content) for message in row.messages]


# Langfuse

OBSERVATIONS = [
    {"id": "o1", "type": "GENERATION", "input": TURNS, "output": {"role": "assistant", "content": "Here."}},
    {"id": "o2", "type": "SPAN", "input": "x", "output": "y"},
    {"id": "o3", "type": "GENERATION", "input": [{"role": "king"}], "output": "y"},
]
SCORES = [{"id": "s", "observationId": "o1", "name": "quality", "value": 0.5}]
TRACE = {"id": "t1", "sessionId": "c1", "timestamp": "2026-01-02T03:04:05Z", "input": "x", "output": "y"}


@pytest.mark.parametrize(
    "row",
    [
        {"trace": TRACE, "observations": OBSERVATIONS, "scores": SCORES},
        {"trace": {**TRACE, "scores": SCORES}, "observations": OBSERVATIONS},
        {**TRACE, "observations": OBSERVATIONS, "scores": SCORES},
    ],
)
def test_a_langfuse_trace_with_its_observations_is_read_call_by_call(row):
    assert find_format(row) == "langfuse"
    answered, skipped, fault, score = read(row)
    assert (turns(answered), answered.reply) == (ASKED, "Here.")
    assert (answered.id, answered.trace, answered.session) == ("o1", "t1", "c1")
    assert isinstance(skipped, SkippedPart)
    assert isinstance(fault, ReadFault)
    assert fault.message.startswith("`observations[2]`")
    assert isinstance(score, TraceScore)
    assert (score.trace, score.call, score.value) == ("t1", "o1", 0.5)


@pytest.mark.parametrize(
    "asked",
    [
        ["system: Be brief.", "user: Where?"],
        {"messages": ["system: Be brief.", "user: Where?"]},
        [json.dumps(turn) for turn in TURNS],
        json.dumps(TURNS),
    ],
)
@pytest.mark.parametrize("answered", ["Here: now.", "assistant: Here: now."])
def test_messages_that_are_text_are_read_by_their_roles(asked, answered):
    if answered.startswith("assistant") and "role" in str(asked):
        answered = {"role": "assistant", "content": "Here: now."}
    row = take({"id": "o", "traceId": "t", "type": "GENERATION", "input": asked, "output": answered})
    assert (turns(row), row.reply) == (ASKED, "Here: now.")


@pytest.mark.parametrize("asked", [["Note: where?"], {"messages": "Note: where?"}])
def test_text_without_a_role_is_what_the_user_asked(asked):
    row = take({"id": "o", "traceId": "t", "type": "GENERATION", "input": asked, "output": "user: x"})
    assert (turns(row), row.reply) == ([("user", "Note: where?")], "user: x")


# Spans as rows

INPUT = [
    {"message.role": "system", "message.content": "Be brief."},
    {"message.role": "user", "message.content": "Where?"},
]
OUTPUT = [
    {
        "message.role": "assistant",
        "message.tool_calls": [
            {"tool_call.function.name": "find", "tool_call.function.arguments": '{"city": "Bern"}'}
        ],
    }
]
NESTED_OUTPUT = {
    "message": {
        "role": "assistant",
        "tool_calls": [{"tool_call": {"function": {"name": "find", "arguments": {"city": "Bern"}}}}],
    }
}
FLAT = {
    "llm.model_name": "m1",
    "llm.input_messages": INPUT,
    "llm.output_messages": OUTPUT,
    "llm.token_count.prompt": 9,
    "llm.invocation_parameters": '{"max_tokens": 5}',
}
NESTED = {
    "llm": {
        "model_name": "m1",
        "input_messages": [{"message": turn} for turn in TURNS],
        "output_messages": [NESTED_OUTPUT],
        "token_count": {"prompt": 9},
        "invocation_parameters": {"max_tokens": 5},
    }
}
TIMES = {"start_time": "2026-01-02T03:04:05+00:00", "end_time": "2026-01-02T03:04:07+00:00"}
COLUMNS = {
    "context.trace_id": "t1",
    "context.span_id": "a1",
    "span_kind": "LLM",
    "status_code": "OK",
    **TIMES,
}


@pytest.mark.parametrize(
    "row",
    [
        {"context": {"trace_id": "t1", "span_id": "a1"}, "span_kind": "LLM", "attributes": FLAT, **TIMES},
        {"context": {"trace_id": "t1", "span_id": "a1"}, "span_kind": "llm", "attributes": NESTED, **TIMES},
        {**COLUMNS, **{f"attributes.{key}": value for key, value in FLAT.items()}},
        {
            **COLUMNS,
            **{f"attributes.{k}": json.dumps(v) if isinstance(v, list) else v for k, v in FLAT.items()},
        },
        {"trace_id": "t1", "span_id": "a1", "span_kind": "LLM", "attributes": json.dumps(NESTED), **TIMES},
    ],
)
def test_spans_of_phoenix_are_read_in_every_export(row):
    assert find_format(row) == "otlp"
    call = take(row)
    assert (turns(call), call.reply) == (ASKED, CALL)
    assert (call.trace, call.id, call.model) == ("t1", "a1", "m1")
    assert (call.prompt_tokens, call.max_tokens, call.duration_ms) == (9, 5, 2000)


@pytest.mark.parametrize("kind", ["CHAIN", "TOOL", "AGENT"])
def test_other_spans_of_phoenix_are_left_out(kind):
    [skipped] = read({**COLUMNS, "span_kind": kind, "attributes.input.value": "x"})
    assert skipped.rule == "other_span"


TOOL = {"type": "function", "name": "find", "inputSchema": {"type": "object"}}
AI_SDK = {
    "ai.operationId": "ai.streamText.doStream",
    "ai.model.id": "m1",
    "ai.prompt.messages": json.dumps([*TURNS, CALLED]),
    "ai.prompt.tools": [json.dumps(TOOL)],
    "ai.response.text": "Again.",
    "ai.response.toolCalls": json.dumps(
        [{"toolCallId": "1", "toolName": "find", "input": '{"city": "Bern"}'}]
    ),
    "ai.response.finishReason": "tool-calls",
    "ai.usage.promptTokens": 9,
    "ai.usage.completionTokens": 4,
}


@pytest.mark.parametrize(
    "row",
    [
        AI_SDK,
        {"attributes": AI_SDK},
        {"traceId": "t1", "spanId": "a1", "attributes": AI_SDK},
        {"context": {"trace_id": "t1", "span_id": "a1"}, "attributes": AI_SDK},
        {
            "resourceSpans": [
                {
                    "scopeSpans": [
                        {
                            "spans": [
                                {
                                    "attributes": [
                                        {"key": key, "value": {"stringValue": value}}
                                        for key, value in AI_SDK.items()
                                        if isinstance(value, str)
                                    ]
                                    + [
                                        {"key": "ai.usage.promptTokens", "value": {"intValue": "9"}},
                                        {"key": "ai.usage.completionTokens", "value": {"intValue": "4"}},
                                        {
                                            "key": "ai.prompt.tools",
                                            "value": {
                                                "arrayValue": {"values": [{"stringValue": json.dumps(TOOL)}]}
                                            },
                                        },
                                    ]
                                }
                            ]
                        }
                    ]
                }
            ]
        },
    ],
)
def test_attributes_of_vercels_ai_sdk_are_read_in_otlp_and_outside_of_it(row):
    assert find_format(row) == "otlp"
    call = take(row)
    assert turns(call)[0][1].startswith("Be brief.\n\n# Tools")
    assert '"name": "find"' in turns(call)[0][1]
    assert turns(call)[1:] == [("user", "Where?"), ("assistant", CALL)]
    assert (call.reply, call.finish_reason, call.model) == (f"Again.\n{CALL}", "tool_calls", "m1")
    assert (call.prompt_tokens, call.reply_tokens) == (9, 4)


def test_the_span_around_a_call_of_the_ai_sdk_is_left_out():
    row = {**AI_SDK, "ai.operationId": "ai.streamText", "gen_ai.request.model": "m1"}
    [skipped] = read(row)
    assert skipped.rule == "other_span"


@pytest.mark.parametrize(
    "more",
    [
        {"attributes": {"a": 1}},
        {"context": "x", "span_id": "1"},
        {"id": "1", "observations": [{"type": "note"}]},
    ],
)
def test_a_chat_row_with_keys_of_spans_stays_a_chat_row(more):
    row = {"messages": [*TURNS, {"role": "assistant", "content": "a"}], **more}
    assert find_format(row) == "chat"


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"role": "user", "content": "q"}, "under `messages`"),
        ({"kind": "request", "parts": []}, "under `messages`"),
        ({"custom_id": "1", "result": {"type": "succeeded"}}, "join them as `request`"),
    ],
)
def test_a_row_that_is_half_of_something_says_what_to_export(row, advice):
    with pytest.raises(BadRow, match=advice):
        read(row)
