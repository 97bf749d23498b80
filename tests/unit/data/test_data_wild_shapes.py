"""Shapes that public tools and datasets write, after their schemas."""

import json

import pytest

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.read import find_format, read_file, read_row
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction, Origin

HERE = Origin(file="log.jsonl", line=7)
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call>'
ARGUMENTS = {"city": "Bern"}


def read(row, **settings):
    return list(read_row(row, HERE, settings=DataSettings(**settings)))


def take(row):
    [result] = read(row)
    assert isinstance(result, Interaction)
    return result


def turns(row):
    return [(message.role, message.content) for message in row.messages]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


# Datasets


@pytest.mark.parametrize(
    "row",
    [
        {
            "conversations": [
                {"from": "human", "value": "p"},
                {"from": "gpt", "value": "r"},
                {"from": "human", "value": "q"},
            ],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {
            "messages": [user("p"), assistant("r"), user("q")],
            "chosen": assistant("good"),
            "rejected": assistant("bad"),
        },
        {
            "input": {"messages": [user("p"), assistant("r"), user("q")], "parallel_tool_calls": True},
            "preferred_output": [assistant("good")],
            "non_preferred_output": [assistant("bad")],
        },
    ],
)
def test_preference_files_with_message_objects_keep_both_sides(row):
    pair = take(row)
    assert find_format(row) == "preference"
    assert turns(pair) == [("user", "p"), ("assistant", "r"), ("user", "q")]
    assert (pair.reply, pair.rejected) == ("good", "bad")


def test_openai_preferences_keep_the_tools_of_their_input():
    tool = {"type": "function", "function": {"name": "find"}}
    pair = take(
        {
            "input": {"messages": [user("q")], "tools": [tool]},
            "preferred_output": [assistant("good")],
            "non_preferred_output": [assistant("bad")],
        }
    )
    assert '"name": "find"' in pair.messages[0].content


@pytest.mark.parametrize(
    "part", [{"type": "text", "value": "a"}, {"type": "text", "text": {"value": "a", "annotations": []}}]
)
def test_content_parts_with_a_value_are_text(part):
    assert take({"messages": [user("q"), assistant([part])]}).reply == "a"


def test_prompt_and_text_are_a_completion():
    row = take({"prompt": "q", "text": "a"})
    assert (turns(row), row.reply) == ([("user", "q")], "a")


@pytest.mark.parametrize("more", [{}, {"version": 2, "name": "x", "tags": ["a"]}])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_around_a_list_of_rows_is_read_row_by_row(tmp_path, more, indent):
    samples = [{"messages": [user(f"q{n}"), assistant(f"a{n}")]} for n in range(3)]
    samples[1]["messages"] = "broken"
    (tmp_path / "log.json").write_text(json.dumps({**more, "samples": samples}, indent=indent))
    for settings in (DataSettings(), DataSettings(format="chat")):
        first, fault, last = read_file("log.json", root=tmp_path, settings=settings)
        assert (first.reply, last.reply) == ("a0", "a2")
        assert first.id != last.id
        assert isinstance(fault, ReadFault)
        assert fault.message.startswith("`samples[1]`: `messages`")
    assert find_format({**more, "samples": samples}) == "chat"


@pytest.mark.parametrize("key", ["conversations", "conversation"])
def test_a_list_of_whole_conversations_is_no_list_of_turns(key):
    row = {"messages": [user("q"), assistant("a")]}
    asked = {
        "request": {"model": "m", "messages": [user("q")]},
        "response": {"choices": [{"message": assistant("a")}]},
    }
    for inner in (row, asked):
        assert [result.reply for result in read({"version": 3, key: [inner, inner]})] == ["a", "a"]
    assert find_format({key: [{"from": "human", "value": "q"}]}) == "sharegpt"


# Conversations of other APIs and libraries

GEMINI = [
    {"role": "user", "parts": [{"text": "Where?"}]},
    {"role": "model", "parts": [{"functionCall": {"name": "find", "args": ARGUMENTS}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "find", "response": {"found": 1}}}]},
    {"role": "model", "parts": [{"text": "Look.", "thought": True}, {"text": "Here."}]},
]
PYDANTIC_AI = [
    {
        "kind": "request",
        "parts": [
            {"part_kind": "system-prompt", "content": "Be brief."},
            {"part_kind": "user-prompt", "content": "Where?"},
        ],
    },
    {
        "kind": "response",
        "parts": [{"part_kind": "tool-call", "tool_name": "find", "args": json.dumps(ARGUMENTS)}],
    },
    {
        "kind": "request",
        "parts": [{"part_kind": "tool-return", "tool_name": "find", "content": {"found": 1}}],
    },
    {
        "kind": "response",
        "parts": [{"part_kind": "thinking", "content": "Look."}, {"part_kind": "text", "content": "Here."}],
    },
]
BEDROCK = [
    {"role": "user", "content": [{"text": "Where?"}]},
    {"role": "assistant", "content": [{"toolUse": {"toolUseId": "1", "name": "find", "input": ARGUMENTS}}]},
    {"role": "user", "content": [{"toolResult": {"toolUseId": "1", "content": [{"json": {"found": 1}}]}}]},
    {
        "role": "assistant",
        "content": [{"reasoningContent": {"reasoningText": {"text": "Look."}}}, {"text": "Here."}],
    },
]
AI_SDK = [
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {
        "role": "assistant",
        "content": [{"type": "tool-call", "toolCallId": "1", "toolName": "find", "input": ARGUMENTS}],
    },
    {
        "role": "tool",
        "content": [
            {
                "type": "tool-result",
                "toolCallId": "1",
                "toolName": "find",
                "output": {"type": "json", "value": {"found": 1}},
            }
        ],
    },
    {
        "role": "assistant",
        "content": [{"type": "reasoning", "text": "Look."}, {"type": "text", "text": "Here."}],
    },
]
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "function_call", "call_id": "1", "name": "find", "arguments": json.dumps(ARGUMENTS)},
    {"type": "function_call_output", "call_id": "1", "output": '{"found": 1}'},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Here."}]},
]
DIALECTS = [GEMINI, PYDANTIC_AI, BEDROCK, AI_SDK, RESPONSES]
ASKED = [("user", "Where?"), ("assistant", CALL), ("tool", '{"found": 1}')]
ANSWERED = "<think>\nLook.\n</think>\n\nHere."


@pytest.mark.parametrize("listed", DIALECTS)
def test_calls_results_and_reasoning_are_read_under_the_names_of_every_library(listed):
    row = take({"messages": listed})
    assert [turn for turn in turns(row) if turn[0] != "system"] == ASKED
    assert row.reply == ANSWERED


@pytest.mark.parametrize("listed", DIALECTS)
def test_the_input_and_output_of_an_observation_are_read_alike(listed):
    cut = -2 if listed is RESPONSES else -1
    row = take(
        {
            **{"id": "o", "traceId": "t", "type": "GENERATION"},
            **{"input": listed[:cut], "output": listed[cut:] if listed is RESPONSES else listed[cut]},
        }
    )
    assert [turn for turn in turns(row) if turn[0] != "system"] == ASKED
    assert row.reply == ANSWERED


def test_calls_that_the_responses_api_lists_one_by_one_are_one_reply():
    call = {"type": "function_call", "name": "find", "arguments": ARGUMENTS}
    row = take({"messages": [user("q"), {"type": "reasoning", "summary": []}, call, call]})
    assert (turns(row), row.reply) == ([("user", "q")], f"{CALL}\n{CALL}")


def test_instructions_of_pydantic_ai_are_the_system_prompt():
    asked = {
        "kind": "request",
        "instructions": "Be brief.",
        "parts": [{"part_kind": "user-prompt", "content": "q"}],
    }
    listed = [asked, PYDANTIC_AI[-1], asked, PYDANTIC_AI[-1]]
    assert [role for role, _ in turns(take({"messages": listed}))] == ["system", "user", "assistant", "user"]


def test_tuning_files_of_gemini_are_chats():
    declared = {"name": "find", "parameters": {"type": "object"}}
    row = take(
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": GEMINI,
            "tools": [{"functionDeclarations": [declared]}],
        }
    )
    assert turns(row)[0][1].startswith("Be brief.\n\n# Tools")
    assert '"name": "find"' in turns(row)[0][1]
    assert (turns(row)[1:], row.reply) == (ASKED, ANSWERED)


def test_requests_and_responses_of_gemini_are_read():
    row = take(
        {
            "request": {"contents": GEMINI[:1], "systemInstruction": {"parts": [{"text": "Be brief."}]}},
            "response": {
                "candidates": [{"content": GEMINI[-1], "finishReason": "MAX_TOKENS"}],
                "usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 5},
            },
        }
    )
    assert turns(row) == [("system", "Be brief."), ("user", "Where?")]
    assert (row.reply, row.finish_reason) == (ANSWERED, "length")
    assert (row.prompt_tokens, row.reply_tokens) == (3, 5)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (
            {"messages": [user("q")], "max_tokens": 9},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}], "stop_reason": "end_turn"},
        ),
        (
            {"messages": [user([{"text": "q"}])], "system": [{"text": "s"}]},
            {"output": {"message": assistant([{"text": "a"}])}, "stopReason": "end_turn"},
        ),
        ({"prompt": "q"}, {"generation": "a", "stop_reason": "stop"}),
        ({"inputText": "q"}, {"results": [{"outputText": "a", "completionReason": "FINISH"}]}),
    ],
)
def test_batches_of_bedrock_are_read_with_their_record_id(asked, answered):
    row = take({"recordId": "r1", "modelInput": asked, "modelOutput": answered})
    assert (row.id, turns(row)[-1], row.reply) == ("r1", ("user", "q"), "a")
    assert row.status is None


def test_a_failed_record_of_a_bedrock_batch_is_a_failed_row():
    row = take({"recordId": "r1", "modelInput": {"prompt": "q"}, "error": {"errorCode": 400}})
    assert (row.status, row.reply) == ("failed", "")


# Trajectories

TRAJECTORY = {
    "schema_version": "ATIF-v1.5",
    "session_id": "s1",
    "agent": {
        "name": "helper",
        "version": "1.0",
        "model_name": "m1",
        "tool_definitions": [{"type": "function", "function": {"name": "find"}}],
    },
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "Where?"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "1", "function_name": "find", "arguments": ARGUMENTS}],
            "observation": {"results": [{"source_call_id": "1", "content": '{"found": 1}'}]},
            "metrics": {"prompt_tokens": 9},
        },
        {"step_id": 4, "source": "agent", "message": "Here.", "reasoning_content": "Look."},
    ],
    "final_metrics": {"total_steps": 4},
}


def test_a_trajectory_of_an_agent_is_a_conversation():
    row = take(TRAJECTORY)
    assert turns(row)[0][1].startswith("Be brief.\n\n# Tools")
    assert (turns(row)[1:], row.reply) == (ASKED, ANSWERED)
    assert (row.session, row.group, row.model) == ("s1", "helper", "m1")


@pytest.mark.parametrize("stated", [{"is_copied_context": True}, {"llm_call_count": 0}])
def test_steps_that_the_model_did_not_write_are_context(stated):
    steps = [{**step, **stated} for step in TRAJECTORY["steps"][:3]]
    row = take({**TRAJECTORY, "steps": [*steps, TRAJECTORY["steps"][3]]})
    assert row.turn_weights == (0.0, None)
