"""Traces as logs, on files that the real libraries wrote (tests/data/traces/produce.py)."""

import json

import pytest
from trace_samples import HERE, TOOL_CALL, by_question, load_lines, read, read_sample, rows_of

from graftwork.data.ingest.blocks import ReadFault, SkippedPart, TraceScore
from graftwork.data.ingest.read import find_format
from graftwork.data.ingest.spans import unflatten
from graftwork.records.interaction import Interaction

SPANS = ["genai.otlp.jsonl", "openinference.otlp.jsonl", "langfuse.otlp.jsonl", "console.json"]
CALLS = [*SPANS, "langsmith.jsonl", "litellm.jsonl", "mlflow.jsonl"]
LOGS = ["genai_events.otlp_logs.jsonl", "genai_messages.otlp_logs.jsonl"]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_a_model_becomes_one_row_and_nothing_else_does(name):
    rows = by_question(rows_of(name))
    assert {question: len(found) for question, found in rows.items()} == {
        "Where is the station?": 1,
        "How is the weather in Bern?": 2,
        "Stream it.": 1,
        "Stream half.": 1,
        "Tell me everything.": 1,
        "Fail.": 1,
    }


@pytest.mark.parametrize("name", [*CALLS, *LOGS])
def test_the_plain_call_keeps_its_messages_and_reply(name):
    [row] = by_question(rows_of(name))["Where is the station?"]
    assert [(turn.role, turn.content) for turn in row.messages] == [
        ("system", "Answer briefly."),
        ("user", "Where is the station?"),
    ]
    assert row.reply == "The station is next to the river."
    assert row.trace is not None


@pytest.mark.parametrize("name", [*CALLS, *LOGS])
def test_tool_calls_and_their_results_read_the_same_from_every_format(name):
    first, second = by_question(rows_of(name))["How is the weather in Bern?"]
    assert first.reply == TOOL_CALL
    assert second.reply == "It is sunny in Bern."
    assert [turn.role for turn in second.messages] == ["system", "user", "assistant", "tool"]
    assert second.messages[2].content == TOOL_CALL
    assert second.messages[3].content == '{"sky": "sunny"}'


@pytest.mark.parametrize("name", ["openinference.otlp.jsonl", "langfuse.otlp.jsonl", "langsmith.jsonl"])
def test_tool_definitions_are_kept_where_the_trace_has_them(name):
    first, _ = by_question(rows_of(name))["How is the weather in Bern?"]
    assert '"name": "get_weather"' in first.messages[0].content
    assert "<tools>" in first.messages[0].content


@pytest.mark.parametrize("name", CALLS)
def test_tokens_model_and_times_are_kept(name):
    [row] = by_question(rows_of(name))["Where is the station?"]
    assert (row.prompt_tokens, row.reply_tokens) == (21, 9)
    assert row.model in ("small-1", "small-1-2026")
    assert row.duration_ms is not None
    assert row.duration_ms > 0
    assert row.max_tokens == 50


@pytest.mark.parametrize("name", ["openinference.otlp.jsonl", "langsmith.jsonl", "litellm.jsonl"])
def test_cached_tokens_are_kept_where_the_trace_has_them(name):
    [row] = by_question(rows_of(name))["Where is the station?"]
    assert row.cached_tokens == 4


def test_the_cost_that_a_gateway_states_is_kept():
    [row] = by_question(rows_of("litellm.jsonl"))["Where is the station?"]
    assert row.cost == pytest.approx(3.9e-05)


@pytest.mark.parametrize("name", ["genai.otlp.jsonl", "openinference.otlp.jsonl", "langsmith.jsonl"])
def test_half_a_stream_is_marked_incomplete(name):
    [row] = by_question(rows_of(name))["Stream half."]
    assert (row.reply, row.finish_reason, row.status) == ("You said", "incomplete", None)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_failed_is_a_row_with_status_failed(name):
    [row] = by_question(rows_of(name))["Fail."]
    assert (row.reply, row.status) == ("", "failed")


@pytest.mark.parametrize("name", [name for name in CALLS if name != "langfuse.otlp.jsonl"])
def test_a_reply_at_the_token_limit_says_so(name):
    [row] = by_question(rows_of(name))["Tell me everything."]
    assert row.finish_reason == "length"


@pytest.mark.parametrize("name", ["openinference.otlp.jsonl", "langsmith.jsonl", "mlflow.jsonl"])
def test_the_session_is_kept(name):
    assert {row.session for row in rows_of(name)} == {"session-7"}


def test_assessments_of_mlflow_become_rewards_of_their_trace():
    rated = [row for row in rows_of("mlflow.jsonl") if row.reward is not None]
    assert [(row.question, row.reward, row.reward_level) for row in rated] == [
        ("Where is the station?", 1.0, "trace")
    ]


@pytest.mark.parametrize("name", ["genai_events.otlp.jsonl", "genai_messages.otlp.jsonl"])
def test_spans_without_content_are_counted_and_are_no_rows(name):
    found = [result for line in load_lines(name) for result in read(line)]
    counts = {}
    for result in found:
        assert isinstance(result, SkippedPart)
        counts[result.rule] = counts.get(result.rule, 0) + result.count
    assert counts["no_content"] >= 6
    assert counts["other_span"] == 6


def test_stored_completions_and_responses_are_read_with_their_questions():
    first, second = rows_of("openai_stored.jsonl")
    assert first.question == second.question == "Where is the station?"
    assert first.reply == second.reply == "The station is next to the river."
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")


def test_a_stored_answer_without_its_question_is_named():
    row = load_lines("openai_stored.jsonl")[1]
    del row["input"]
    assert find_format(row) == "openai_stored"
    with pytest.raises(ValueError, match="join it under `input`"):
        read(row)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "otlp") for name in ("genai.otlp.jsonl", "openinference.otlp.jsonl", *LOGS)),
        ("mlflow.jsonl", "mlflow"),
        ("langsmith.jsonl", "langsmith"),
        ("litellm.jsonl", "litellm"),
        ("openai_stored.jsonl", "openai_stored"),
    ],
)
def test_each_format_is_recognized_by_itself(name, expected):
    assert {find_format(row) for row in load_lines(name)} == {expected}
    assert read_sample(name) == read_sample(name, format=expected)


# Single spans


def otlp(*spans, **resource):
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in resource.items()]
    scopes = [{"scope": {"name": "x"}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": scopes}]}


def attribute(value):
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"stringValue": value if isinstance(value, str) else json.dumps(value)}


def span(*, span_id="a1", trace="t1", events=(), status=None, **attributes):
    listed = [
        {"key": key, "value": attribute(value)} for key, value in attributes.pop("facts", attributes).items()
    ]
    return {
        "traceId": trace,
        "spanId": span_id,
        "name": "chat",
        "startTimeUnixNano": "1000000000",
        "endTimeUnixNano": "1500000000",
        "attributes": listed,
        "events": list(events),
        "status": status or {},
    }


ASKED = [{"role": "user", "parts": [{"type": "text", "content": "Where?"}]}]
SAID = [{"role": "assistant", "parts": [{"type": "text", "content": "Here."}], "finish_reason": "stop"}]
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": ASKED, "gen_ai.output.messages": SAID}


def event(name, **attributes):
    listed = [{"key": key.replace("__", "."), "value": attribute(value)} for key, value in attributes.items()]
    return {"name": name, "attributes": listed}


def test_current_conventions_keep_reasoning_calls_results_and_instructions():
    asked = [
        *ASKED,
        {"role": "assistant", "parts": [{"type": "tool_call", "name": "find", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": {"b": 2}}]},
    ]
    said = [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "Hm."}, {"type": "text", "content": "There."}],
        }
    ]
    facts = {
        **CHAT,
        "gen_ai.input.messages": asked,
        "gen_ai.output.messages": said,
        "gen_ai.system_instructions": [{"type": "text", "content": "Be brief."}],
        "gen_ai.tool.definitions": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
        "gen_ai.conversation.id": "c-1",
        "gen_ai.agent.name": "guide",
        "gen_ai.usage.input_tokens": 5,
    }
    [row] = read(otlp(span(facts=facts)))
    assert row.reply == "<think>\nHm.\n</think>\n\nThere."
    assert [turn.role for turn in row.messages] == ["system", "user", "assistant", "tool"]
    assert row.messages[0].content.startswith("Be brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}' in (
        row.messages[0].content
    )
    assert row.messages[3].content == '{"b": 2}'
    assert (row.session, row.group, row.prompt_tokens, row.duration_ms) == ("c-1", "guide", 5, 500.0)


def test_events_per_message_on_the_span_are_read():
    events = [
        event("gen_ai.system.message", content="Be brief."),
        event("gen_ai.user.message", content="Where?"),
        event("gen_ai.choice", index=0, finish_reason="length", message={"content": "Here"}),
    ]
    facts = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    [row] = read(otlp(span(events=events, facts=facts)))
    assert ([turn.role for turn in row.messages], row.reply) == (["system", "user"], "Here")
    assert (row.finish_reason, row.model) == ("length", "m")


def test_prompt_and_completion_events_are_read():
    events = [
        event("gen_ai.content.prompt", gen_ai__prompt=[{"role": "user", "content": "Where?"}]),
        event("gen_ai.content.completion", gen_ai__completion=[{"role": "assistant", "content": "Here."}]),
    ]
    [row] = read(otlp(span(events=events, facts={"gen_ai.operation.name": "chat"})))
    assert (row.question, row.reply) == ("Where?", "Here.")


def test_numbered_prompts_and_completions_are_read():
    facts = {
        "llm.request.type": "chat",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "Where?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "gen_ai.completion.0.tool_calls.0.name": "find",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"a": 1}',
        "gen_ai.usage.prompt_tokens": 3,
    }
    [row] = read(otlp(span(facts=facts)))
    assert row.reply == '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    assert (row.finish_reason, row.prompt_tokens) == ("tool_calls", 3)


def test_messages_on_the_span_of_an_agent_count_only_without_calls_below_it():
    agent = {**CHAT, "gen_ai.operation.name": "invoke_agent"}
    bare = {"gen_ai.operation.name": "chat"}
    alone = read(otlp(span(facts=agent), span(span_id="b", facts=bare)))
    assert [type(result) for result in alone] == [Interaction, SkippedPart]
    both = read(otlp(span(facts=agent), span(span_id="b", facts=CHAT)))
    assert [row.id for row in both if isinstance(row, Interaction)] == ["b"]
    assert [left.rule for left in both if isinstance(left, SkippedPart)] == ["repeats_other_span"]


def test_a_span_that_cannot_be_read_is_named_and_does_not_stop_the_others():
    broken = span(facts={**CHAT, "gen_ai.input.messages": [{"role": "user", "parts": 5}]})
    wrong = {**span(facts=CHAT), "attributes": [{"key": 7}]}
    found = read(otlp(broken, span(span_id="good", facts=CHAT), "no span", wrong))
    assert [row.id for row in found if isinstance(row, Interaction)] == ["good"]
    faults = [fault for fault in found if isinstance(fault, ReadFault)]
    assert [fault.message.split(":")[0] for fault in faults] == [
        f"`resourceSpans[0].scopeSpans[0].spans[{place}]`" for place in (0, 2, 3)
    ]
    assert {fault.origin for fault in faults} == {HERE}


def test_scores_of_langfuse_stand_apart_with_their_level():
    score = {"id": "s", "trace_id": "t", "name": "quality", "value": 0.5, "timestamp": "2026-01-01"}
    [whole] = read({**score, "observation_id": None})
    [own] = read({**score, "observation_id": "o"})
    assert isinstance(whole, TraceScore)
    assert (whole.trace, whole.call, whole.value) == ("t", None, 0.5)
    assert own.call == "o"


def test_an_observation_of_langfuse_keeps_what_its_export_states():
    row = {
        "id": "o",
        "trace_id": "t",
        "type": "GENERATION",
        "session_id": "s",
        "input": json.dumps([{"role": "user", "content": "Where?"}]),
        "output": json.dumps({"role": "assistant", "content": "Here."}),
        "provided_model_name": "m",
        "model_parameters": json.dumps({"max_tokens": 9}),
        "usage_details": json.dumps({"input": 5, "output": 3}),
        "total_cost": 0.25,
        "latency": 1.5,
        "time_to_first_token": 0.5,
    }
    [read_row] = read(row)
    assert (read_row.question, read_row.reply, read_row.model) == ("Where?", "Here.", "m")
    assert (read_row.prompt_tokens, read_row.reply_tokens, read_row.cost) == (5, 3, 0.25)
    assert (read_row.duration_ms, read_row.first_token_ms, read_row.max_tokens) == (1500, 500, 9)
    assert (read_row.session, read_row.trace, read_row.id) == ("s", "t", "o")
    [tool] = read({**row, "type": "TOOL"})
    assert (tool.rule, tool.count) == ("other_span", 1)


def test_runs_of_langchain_are_read_from_their_serialized_messages():
    human = {"lc": 1, "type": "constructor", "id": ["x", "HumanMessage"], "kwargs": {"content": "Where?"}}
    answer = {
        "lc": 1,
        "type": "constructor",
        "id": ["x", "AIMessage"],
        "kwargs": {"content": "", "tool_calls": [{"name": "find", "args": {"a": 1}, "id": "1"}]},
    }
    row = {
        "id": "r",
        "run_type": "llm",
        "trace_id": "t",
        "inputs": {"messages": [[human]]},
        "outputs": {"generations": [[{"text": "", "message": answer}]]},
        "feedback_stats": {"correct": {"n": 2, "avg": 0.5}},
    }
    [found] = read(row)
    assert found.reply == '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    assert (found.question, found.reward, found.reward_level) == ("Where?", 0.5, "call")


def test_a_request_of_helicone_keeps_cost_latency_session_and_scores():
    row = {
        "request_id": "q",
        "request_body": {"model": "m", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4},
        "response_body": {"choices": [{"message": {"content": "Here."}, "finish_reason": "stop"}]},
        "response_status": 200,
        "response_model": "m-1",
        "delay_ms": 120,
        "time_to_first_token": 30,
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_cache_read_tokens": 3,
        "costUSD": 0.01,
        "request_properties": {"Helicone-Session-Id": "s"},
        "scores": {"helpful": 1},
    }
    [found] = read(row)
    assert (found.question, found.reply, found.finish_reason) == ("Where?", "Here.", "stop")
    assert (found.prompt_tokens, found.cached_tokens, found.reply_tokens, found.cost) == (7, 3, 2, 0.01)
    assert (found.duration_ms, found.first_token_ms, found.session) == (120, 30, "s")
    assert (found.model, found.max_tokens, found.reward) == ("m-1", 4, 1.0)
    [failed] = read({**row, "response_status": 500, "response_body": {"error": "x"}})
    assert failed.status == "failed" or failed.reply


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"p.0.a": 1, "p.1.a": 2}, [{"a": 1}, {"a": 2}]),
        ({"p.10.a": 1, "p.9.a": 2}, [{"a": 2}, {"a": 1}]),
        ({"p.0.a.0.b": 1, "p.0.a.1.b": 2}, [{"a": [{"b": 1}, {"b": 2}]}]),
        ({"p.0": 1, "p.0.a": 2}, [{"a": 2}]),
        ({"p.x": 1}, []),
        ({}, []),
    ],
)
def test_numbered_keys_become_lists_in_the_order_of_their_numbers(keys, expected):
    assert unflatten(keys, "p") == expected
