import json

import pytest
from data_rows import chat, write_log

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.read import FORMATS, read, read_row
from graftwork.data.settings import DataSettings, Mapping
from graftwork.records.interaction import Origin

HERE = Origin(file="log.jsonl", line=7)
CALL = '<tool_call>\n{"name": "find", "arguments": {"zürich": 1, "a": [2]}}\n</tool_call>'
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def take_all(row, **settings):
    return read_row(row, HERE, settings=DataSettings(**settings))


def take(row, **settings):
    [found] = take_all(row, **settings)
    return found


def turns(found):
    return [(message.role, message.content) for message in found.messages]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


# Keys next to the turns


@pytest.mark.parametrize(
    "row",
    [
        chat("q", "a", system="Be brief."),
        chat("q", "a", system=[{"type": "text", "text": "Be brief."}]),
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "system": "Be brief.",
        },
        {
            "system": "Be brief.",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
        },
    ],
)
def test_a_system_prompt_next_to_the_turns_leads_them(row):
    assert turns(take(row)) == [("system", "Be brief."), ("user", "q")]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (chat("<image>What is it?", "A cat.", images=["cat.jpg"]), "images"),
        (chat("What is said?", "Hello.", audios=["a.wav"]), "audios"),
        (chat("<video>What happens?", "A goal.", videos=["v.mp4"]), "videos"),
        (chat("What is it?", "A cat.", image={"path": "cat.jpg"}), "image"),
        (
            {
                "image": "cat.jpg",
                "conversations": [
                    {"from": "human", "value": "<image>\nIt?"},
                    {"from": "gpt", "value": "A cat."},
                ],
            },
            "image",
        ),
    ],
)
def test_a_row_with_media_files_is_refused_by_the_key_that_holds_them(row, key):
    with pytest.raises(BadRow, match=f"`{key}` holds .* files"):
        take(row)


@pytest.mark.parametrize(
    "more", [{"images": []}, {"image": "python:3.12"}, {"videos": None}, {"images": [None]}]
)
def test_a_row_whose_media_keys_hold_no_files_is_read(more):
    assert take(chat("Which base?", "Slim.", **more)).reply == "Slim."


@pytest.mark.parametrize(
    ("stated", "reward"),
    [
        ({"label": False}, 0.0),
        ({"label": True}, 1.0),
        ({"kto_tag": "false"}, 0.0),
        ({"reward": False}, 0.0),
        ({"label": False, "score": 0.7}, 0.7),
        ({"label": 0}, None),
        ({"label": "0"}, None),
        ({"label": "billing"}, None),
    ],
)
def test_labels_of_good_and_bad_replies_are_rewards(stated, reward):
    assert take(chat("q", "a", **stated)).reward == reward


# Chat, tools, reasoning


def test_tool_calls_are_written_in_the_tags_that_models_are_trained_on():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "find", "arguments": '{"zürich": 1, "a": [2]}'},
    }
    row = {
        "messages": [
            user("Find it."),
            assistant(None, tool_calls=[call]),
            {"role": "tool", "tool_call_id": "1", "name": "find", "content": "42"},
            assistant("Again:", tool_calls=[call, call]),
        ]
    }
    found = take(row)
    assert turns(found) == [("user", "Find it."), ("assistant", CALL), ("tool", "42")]
    assert found.reply == f"Again:\n{CALL}\n{CALL}"


def test_a_call_of_the_older_kind_and_arguments_as_an_object_read_alike():
    function = {"name": "find", "arguments": {"zürich": 1, "a": [2]}}
    for more in (
        {"function_call": function},
        {"tool_calls": [function]},
        {"tool_calls": [{"function": function}]},
    ):
        assert take({"messages": [user("q"), assistant(None, **more)]}).reply == CALL
    part = {"type": "tool_use", "name": "find", "input": {"zürich": 1, "a": [2]}}
    assert take({"messages": [user("q"), assistant([part])]}).reply == CALL


def test_arguments_that_are_no_json_stay_the_text_they_are():
    found = take({"messages": [user("q"), assistant(None, tool_calls=[{"name": "f", "arguments": "{oops"}])]})
    assert found.reply == '<tool_call>\n{"name": "f", "arguments": "{oops"}\n</tool_call>'


def test_results_of_tools_inside_a_users_message_are_turns_of_the_tool():
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}
    row = {
        "messages": [
            user("q"),
            assistant("a"),
            user([result, {"type": "text", "text": "and?"}]),
            assistant("b"),
        ]
    }
    assert turns(take(row))[2:] == [("tool", "42"), ("user", "and?")]


def test_definitions_of_tools_follow_the_system_prompt():
    row = chat("q", "a", tools=[FIND])
    [(role, block), _] = turns(take(row))
    assert role == "system"
    assert block.startswith("# Tools\n")
    assert f"<tools>\n{json.dumps(FIND)}\n</tools>" in block
    row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    assert turns(take(row))[0] == ("system", f"Be brief.\n\n{block}")
    row["messages"][0]["content"] = "Use these: <tools></tools>"
    assert turns(take(row))[0] == ("system", "Use these: <tools></tools>")
    assert turns(take(chat("q", "a", tools=[]))) == [("user", "q")]


@pytest.mark.parametrize(
    "reply",
    [
        assistant("Here.", reasoning_content="Look."),
        assistant("Here.", reasoning="Look.\n"),
        assistant("Here.", thinking="Look."),
        assistant([{"type": "thinking", "thinking": "Look."}, {"type": "text", "text": "Here."}]),
        assistant([{"type": "reasoning", "summary": [{"text": "Look."}]}, {"type": "text", "text": "Here."}]),
        assistant("<think>\nLook.\n</think>\n\nHere."),
        assistant("<think>\nLook.\n</think>\n\nHere.", reasoning_content="Look."),
    ],
)
def test_reasoning_of_the_reply_precedes_it_or_is_dropped(reply):
    row = {"messages": [user("q"), reply]}
    assert take(row).reply == "<think>\nLook.\n</think>\n\nHere."
    assert take(row, reasoning="drop").reply == "Here."


def test_reasoning_of_earlier_turns_is_left_out():
    row = {
        "messages": [
            *(user("q"), assistant("a", reasoning_content="hm")),
            *(user("r"), assistant("<think>hm</think>\nb"), user("s"), assistant("c")),
        ]
    }
    assert [text for role, text in turns(take(row)) if role == "assistant"] == ["a", "b"]


def test_reasoning_that_was_cut_off_stays_to_be_seen():
    assert take(chat("q", "<think>and then"), reasoning="drop").reply == "<think>and then"


def test_metadata_of_a_logged_row_is_kept():
    more = {
        "role": "coder", "domain": "files", "stage": "Stage 3", "session_id": 9, "split": "test",
        "model": "m", "success": False, "reward": "0.5", "duration_ms": "12.5", "max_tokens": "400",
        "customer": "acme", "metadata": {"region": "eu", "deep": {"x": 1}}, "errors": ["x"],
        "info": {"customer": {"id": 7, "too": {"deep": 1}}, "long": "x" * 201, "list": [1]},
    }  # fmt: skip
    found = take(chat("q", "a", **more))
    assert (found.group, found.domain, found.stage, found.session, found.split) == (
        "coder",
        "files",
        3,
        "9",
        "test",
    )
    assert (found.model, found.status, found.reward) == ("m", "failed", 0.5)
    assert (found.duration_ms, found.max_tokens) == (12.5, 400)
    assert found.extra == {
        "customer": "acme",
        "metadata.region": "eu",
        "metadata.deep.x": 1,
        "info.customer.id": 7,
        "errors": 1,
    }
    assert take(chat("q", "a", agent={"name": "guide"})).group == "guide"


@pytest.mark.parametrize(
    ("stated", "status"),
    [
        ({"status": True}, "success"), ({"success": False}, "failed"), ({"status": 200}, "success"),
        ({"status": 503}, "failed"), ({"success": "yes"}, "success"), ({}, None), ({"status": ""}, None),
        ({"status": "200"}, "success"), ({"status": "200 OK"}, "success"), ({"status": 200.0}, "success"),
        ({"status": "HTTP/1.1 201 Created"}, "success"), ({"status": "404 Not Found"}, "failed"),
        ({"status": "Done"}, "success"), ({"status": "finished"}, "success"), ({"status": "true"}, "success"),
        ({"status": "complete"}, "success"), ({"status": "Passed"}, "success"), ({"status": "no"}, "failed"),
        ({"status": " resolved "}, "success"), ({"status": "in review"}, "in review"),
        ({"status": "200 rows"}, "200 rows"), ({"status": {"code": 500}}, "failed"),
        ({"status": ["x"]}, None), ({"success": "partly"}, None), ({"ok": True}, "success"),
        ({"ok": False}, "failed"), ({"error": "it broke"}, "failed"), ({"exception": ["E"]}, "failed"),
        ({"error": True, "success": True}, "failed"), ({"error": "it broke", "status": "ok"}, "ok"),
        ({"error": None}, None), ({"error": ""}, None), ({"error": "None"}, None), ({"error": []}, None),
        ({"error": 0.02}, None), ({"error": False}, None),
    ],
)  # fmt: skip
def test_the_outcome_is_reported_in_words(stated, status):
    assert take(chat("q", "a", **stated)).status == status


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (2, 2),
        (2.0, 2),
        ("4", 4),
        ("stage_1", 1),
        ("planning", None),
        (True, None),
        (-1, None),
        ([], None),
        (1e99, None),
    ],
)
def test_a_stage_is_a_place_in_a_curriculum_or_none(stage, place):
    found = take(chat("q", "a", stage=stage))
    assert found.stage == place
    assert found.extra == ({"stage": stage} if stage == "planning" else {})


@pytest.mark.parametrize(
    ("fact", "stated", "taken"),
    [
        ("duration_ms", "12.5ms", 12.5), ("duration_ms", "1.5 s", 1500), ("duration_ms", "2 min", 120000),
        ("duration_ms", "long", None), ("duration_ms", "1_000", None), ("duration_ms", "3 parsecs", None),
        ("duration_ms", {"x": 1}, None), ("duration_ms", 10**400, None), ("max_tokens", 1e300, None),
        ("max_tokens", "many", None), ("model", {"name": "x"}, "x"), ("model", {"id": "y"}, "y"),
        ("model", ["x"], None), ("model", "a\0b", None), ("id", {"x": 1}, "log.jsonl:7"),
        ("session", ["s"], None), ("session", {"id": {"deep": 1}}, None), ("finish_reason", [1], None),
        ("reward", "good", None), ("split", {"x": 1}, None), ("stage", {"x": 1}, None), ("domain", [1], None),
    ],
)  # fmt: skip
def test_a_fact_that_cannot_be_used_is_not_stated_and_the_row_survives(fact, stated, taken):
    found = take(chat("q", "a", **{fact: stated}))
    assert (found.reply, getattr(found, fact)) == ("a", taken)


@pytest.mark.parametrize("agent", [[1], 1.5, True, {"role": ["x"]}, {}])
def test_an_odd_agent_is_no_role(agent):
    assert take(chat("q", "a", agent=agent)).group is None


@pytest.mark.parametrize("tools", ["none", "auto", [1], ["search"], True, 7, {}, [None], "[]"])
def test_an_invalid_tool_definition_is_left_out(tools):
    assert turns(take(chat("q", "a", tools=tools))) == [("user", "q")]
    assert "<tools>" in turns(take(chat("q", "a", tools=[tools, FIND])))[0][1]


def test_odd_facts_next_to_an_execution_or_a_response_do_no_harm():
    execution = {"output": "a", "duration_ms": "3s", "status": "200", "finish_reason": [1]}
    row = {"task": {"description": "q"}, "execution": execution, "llm": "m"}
    found = take(row)
    assert (found.reply, found.model, found.status, found.duration_ms) == ("a", "m", "success", 3000)
    assert take({**row, "llm": {"model": {"name": "n"}, "config": "x"}}).model == "n"
    assert take({**row, "execution": {"output": None, "error": "x"}}).status == "failed"
    response = {
        "model": {"x": 1},
        "id": [1],
        "choices": [{"message": assistant("a"), "finish_reason": {"x": 1}}],
    }
    found = take(
        {"request": {"messages": [user("q")], "model": "m", "max_tokens": "x"}, "response": response}
    )
    assert (found.reply, found.model, found.max_tokens, found.finish_reason) == ("a", "m", None, None)


def test_turns_after_the_last_reply_are_left_out():
    stated = [user("q"), assistant("a"), user("thanks"), {"role": "tool", "content": "x"}]
    for row in (
        {"messages": stated},
        {"conversations": stated},
        {"prompt": [user("q")], "completion": stated[1:]},
    ):
        found = take(row)
        assert (turns(found), found.reply) == ([("user", "q")], "a")
    found = take({"chosen": stated, "rejected": [user("q"), assistant("b"), user("no")]})
    assert (turns(found), found.reply, found.rejected) == ([("user", "q")], "a", "b")
    mapped = take({"log": stated, "out": "a"}, mapping=Mapping(messages="log", reply="out"))
    assert (turns(mapped), mapped.reply) == ([("user", "q")], "a")
    with pytest.raises(BadRow, match="user"):
        take({"messages": [assistant("Hello!"), user("q")]})


def test_no_more_of_nested_objects_is_kept_than_there_is_room_for():
    wide = {f"k{n}": {f"j{m}": m for m in range(9)} for n in range(9)}
    extra = take(chat("q", "a", info=wide, customer="acme")).extra
    assert len(extra) == 31
    assert extra["info.k0.j0"] == 0
    assert extra["customer"] == "acme"


# Prompt and completion, Alpaca, ShareGPT, preferences


def test_prompt_and_completion_may_be_messages():
    row = {"prompt": [user("q")], "completion": [assistant("a")], "system": "S"}
    found = take(row)
    assert (turns(found), found.reply) == ([("system", "S"), ("user", "q")], "a")
    assert take({"question": "q", "answer": None}).reply == ""


def test_alpaca_rows_keep_system_and_history():
    row = {"instruction": "Add", "input": "2 2", "output": "4", "system": "S", "history": [["q", "a"]]}
    found = take(row)
    assert turns(found) == [("system", "S"), ("user", "q"), ("assistant", "a"), ("user", "Add\n\n2 2")]
    assert found.reply == "4"


def test_sharegpt_rows_are_read_with_calls_and_observations():
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"zürich": 1, "a": [2]}}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "S",
        "tools": json.dumps([FIND]),
    }
    found = take(row)
    assert turns(found)[1:] == [("user", "q"), ("assistant", CALL), ("tool", "42")]
    assert turns(found)[0][1].startswith("S\n\n# Tools")
    assert found.reply == "a"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": "q", "chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        {"messages": [user("q")], "chosen": assistant("good"), "rejected": assistant("bad")},
    ],
)
def test_preference_pairs_keep_the_reply_that_lost(row):
    found = take(row)
    assert (turns(found), found.reply, found.rejected) == ([("user", "q")], "good", "bad")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"chosen": "a", "rejected": "b"}, "prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "same"),
        (
            {"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]},
            "same conversation",
        ),
        ({"instruction": " ", "output": "x"}, "instruction"),
        ({"instruction": "q", "output": "x", "history": ["q"]}, "history[0]"),
        ({"conversations": [{"from": "king", "value": "q"}]}, "conversations[0].from"),
        ({"custom_id": "1", "response": {"body": {"choices": []}}}, "custom_id"),
        ({"request": {"messages": [user("q")]}, "response": {"x": 1}}, "response"),
        ({"decisions": [{"situation": "q"}]}, "decisions[0].decision"),
        ({"decisions": []}, "no exchange"),
        ({"exchanges": [{"x": 1}]}, "exchanges[0]"),
        (
            {"messages": [user("q"), assistant([{"type": "text", "text": "a"}, {"type": "image"}])]},
            "content[1]",
        ),
    ],
)
def test_an_invalid_value_is_named_by_its_key(row, named):
    with pytest.raises(BadRow, match=named.replace("[", r"\[")):
        take_all(row)


# Requests and responses


def test_chat_completions_are_read_from_request_and_response():
    row = {
        "request": {"model": "asked", "messages": [user("q")], "max_completion_tokens": 64, "tools": [FIND]},
        "response": {
            "id": "r1",
            "model": "given",
            "choices": [{"message": assistant("a", reasoning_content="hm"), "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 64},
        },
        "latency_ms": 5,
    }
    found = take(row)
    assert (found.id, found.model, found.finish_reason, found.max_tokens) == ("r1", "given", "length", 64)
    assert found.reply == "<think>\nhm\n</think>\n\na"
    assert found.duration_ms == 5
    assert (found.prompt_tokens, found.reply_tokens, found.extra) == (3, 64, {})
    assert turns(found)[0][0] == "system"
    wrapped = {
        "request": {"body": json.dumps(row["request"])},
        "response": {"status": 200, "body": row["response"]},
    }
    assert take(wrapped).reply == found.reply


def test_results_of_a_batch_are_read_next_to_their_requests():
    row = {
        "custom_id": "c1",
        "body": {"messages": [user("q")]},
        "response": {"status_code": 200, "body": {"choices": [{"message": assistant("a")}]}},
        "error": None,
    }
    found = take(row)
    assert (found.id, found.reply, found.status) == ("c1", "a", None)


def test_the_responses_api_is_read():
    row = {
        "request": {
            "instructions": "S",
            "input": [
                user("q"),
                {"type": "function_call", "name": "find", "arguments": '{"zürich": 1, "a": [2]}'},
                {"type": "function_call_output", "output": "42"},
            ],
        },
        "response": {
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "a"}]},
            ],
        },
    }
    found = take(row)
    assert turns(found) == [("system", "S"), ("user", "q"), ("assistant", CALL), ("tool", "42")]
    assert (found.reply, found.finish_reason) == ("<think>\nhm\n</think>\n\na", "length")


@pytest.mark.parametrize(
    "failure",
    [
        {"response": {"error": {"code": 500}}},
        {"response": {"status_code": 429, "body": {"message": "slow down"}}},
        {"response": None, "error": {"message": "timed out"}},
        {"response": {"status": "failed", "output": []}},
    ],
)
def test_an_error_in_place_of_an_answer_is_a_failed_row(failure):
    found = take({"request": {"messages": [user("q")]}, **failure})
    assert (found.status, found.reply) == ("failed", "")


# Sessions


def test_every_exchange_of_a_session_is_an_interaction_of_its_row():
    row = {
        "session_id": "s1",
        "manager": "UFM",
        "domain": "federation",
        "stage": 2,
        "reward_signals": {"quality": 1.0, "speed": 0.0},
        "exchanges": [{"prompt": "q", "completion": "a", "reward": 0.9}],
        "decisions": [{"situation": "Split?", "decision": "Yes.", "reasoning": "Too big."}],
        "code_patterns": [
            {"task": "Read it", "code": "open()", "language": "python", "feedback": {"approved": False}}
        ],
        "feedback": [{"reviewer": "A", "comment": "no", "verdict": "rejected"}, {"approved": True}],
    }
    asked, decided, coded = take_all(row)
    assert [found.id for found in (asked, decided, coded)] == ["s1#1", "s1#2", "s1#3"]
    assert {found.origin for found in (asked, decided, coded)} == {HERE}
    assert {(f.session, f.group, f.domain, f.stage) for f in (asked, decided)} == {
        ("s1", "UFM", "federation", 2)
    }
    assert (asked.reward, decided.reward) == (0.9, 0.5)
    assert decided.reply == "<think>\nToo big.\n</think>\n\nYes."
    assert coded.reply == "```python\nopen()\n```"
    assert (asked.status, decided.status, coded.status) == ("success", "success", "rejected")


def test_a_rejection_by_a_reviewer_outranks_the_session():
    row = {
        "session": {"id": 5, "decisions": [{"question": "q", "answer": "a", "status": "success"}]},
        "status": "success",
    }
    assert take(row).status == "success"
    row["reviewer_feedback"] = {"reviewer": "A", "verdict": "changes requested"}
    found = take(row)
    assert (found.status, found.session, found.id) == ("rejected", "5", "5#1")


@pytest.mark.parametrize(
    ("signals", "reward"),
    [
        (0.5, 0.5), ([1, 0], 0.5), ({"total": 0.9, "speed": 0}, 0.9), ({"a": "1", "b": None}, 1.0),
        ([{"name": "overall", "value": 0.2}, {"name": "x", "value": 1}], 0.2), ({}, None), ([], None),
    ],
)  # fmt: skip
def test_reward_signals_are_one_reward(signals, reward):
    assert take({"decisions": [{"question": "q", "answer": "a"}], "rewards": signals}).reward == reward


# Choosing


def test_a_mapping_leads_to_the_values():
    row = {
        "event": {"turns": [{"say": "q"}, {"say": "a"}], "ok": True},
        "who.role": "guide",
        "payload": '{"n": "3", "score": 0.5}',
    }
    mapping = Mapping(
        question="event.turns.0.say", reply="event.turns.-1.say", role="who.role", stage="payload.n",
        reward="payload.score", status="event.ok", model="nowhere.to.be.found",
    )  # fmt: skip
    found = take(row, mapping=mapping)
    assert (found.question, found.reply, found.group, found.stage) == ("q", "a", "guide", 3)
    assert (found.reward, found.status, found.model) == (0.5, "success", None)
    with pytest.raises(BadRow, match=r"event\.turns"):
        take({"event": []}, mapping=mapping)


def test_a_mapping_of_messages_may_hold_the_reply_as_their_last():
    row = {"log": [user("q"), assistant("a")], "out": {"answer": 1}}
    found = take(row, mapping=Mapping(messages="log", reply="log.1.content", system="s"))
    assert (turns(found), found.reply) == ([("user", "q")], "a")
    assert take(row, mapping=Mapping(messages="log", reply="out")).reply == '{"answer": 1}'


def test_a_mapped_reply_that_is_null_is_an_empty_one():
    mapping = Mapping(question="q", reply="out.text", status="code")
    for row in ({"out": None}, {"out": {"text": None}}):
        found = take({"q": "q", "code": "503", **row}, mapping=mapping)
        assert (found.reply, found.status) == ("", "failed")
    for row in ({}, {"out": {}}, {"out": []}):
        with pytest.raises(BadRow, match=r"out\.text"):
            take({"q": "q", **row}, mapping=mapping)
    assert take({"q": "q", "out": {"text": "a"}, "error": "x"}, mapping=mapping).status == "failed"


def test_a_field_mapped_as_text_is_not_kept_twice():
    row = {"e": {"q": "q", "a": "a", "tenant": "acme"}}
    assert take(row, mapping=Mapping(question="e.q", reply="e.a")).extra == {"e.tenant": "acme"}


def test_a_named_format_goes_before_what_the_rows_look_like():
    row = {"messages": [user("x"), assistant("y")], "prompt": "q", "completion": "a"}
    assert take(row).reply == "y"
    assert take(row, format="completion").reply == "a"
    with pytest.raises(BadRow, match="no row of the format sharegpt"):
        take(row, format="sharegpt")


def test_every_format_that_can_be_named_says_what_it_expects():
    for shape in FORMATS.values():
        assert shape.expects
        assert not shape.fits({})


# Rows that are wrong in ways that only bytes can be


@pytest.mark.parametrize(
    ("raw", "code", "named"),
    [
        (b'{"prompt": "q", "completion": "a", "prompt": "r"}', "schema", "`prompt` occurs twice"),
        (b'{"prompt": "q", "completion": "a", "prompt" : "r"}', "schema", "`prompt` occurs twice"),
        (b'{"prompt":"q","completion":"a","x":{"y":1,"y":2}}', "schema", "`y` occurs twice"),
        (b'{"prompt": "q", "completion": "a", "x": NaN, "x": 1}', "schema", "`x` occurs twice"),
        (b'{"prompt": "q", "completion": NaN, ', "parse_error", "JSON"),
        (b'{"prompt": "\\ud800", "completion": ' + b"[" * 5000, "parse_error", "JSON"),
        (b'{"prompt": ' * 10000, "parse_error", "JSON"),
        (b'{"prompt": "q", "completion": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", "ok", ""),
        (b'{"prompt": "say \\"x\\": 1", "completion": "{\\"a\\":1,\\"a\\":2}", "k\\\\": 1}', "ok", ""),
        (b'{"prompt": "q\\u0000", "completion": "a"}', "schema", "NUL"),
    ],
)  # fmt: skip
def test_a_row_that_only_a_lenient_parser_would_take_is_a_fault(tmp_path, raw, code, named):
    good = json.dumps(chat("q", "a")).encode()
    (tmp_path / "log.jsonl").write_bytes(raw + b"\n" + good + b"\n")
    first, second = read(["log.jsonl"], root=tmp_path)
    assert (first.code if isinstance(first, ReadFault) else "ok") == code
    assert named in getattr(first, "message", "")
    assert second.origin.line == 2


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_counts_as_not_stated(tmp_path, number):
    row = f'{{"prompt": "q", "completion": "a", "reward": {number}, "x": [{number}], "y": {{"z": {number}}}}}'
    (tmp_path / "log.jsonl").write_text(row)
    [found] = read(["log.jsonl"], root=tmp_path)
    assert (found.reply, found.reward, found.extra) == ("a", None, {})


def test_half_a_surrogate_pair_becomes_the_sign_for_what_cannot_be_read(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(
        b'{"prompt": "q \\ud83d\\ude00", "completion": "a \\ud83d b \\uDE00"}'
    )
    [found] = read(["log.jsonl"], root=tmp_path)
    assert (found.question, found.reply) == ("q \U0001f600", "a \ufffd b \ufffd")


@pytest.mark.parametrize("depth", [200, 500, 980, 1015, 1100, 100_000])
def test_no_depth_of_nesting_crashes_the_reader(tmp_path, depth):
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    asked = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", '
    rows = [
        b'{"prompt": "q", "completion": "a", "y": 1, "y": ' + deep + b"}",
        asked + b'"tool_calls": [{"name": "f", "arguments": ' + deep + b"}]}]}",
        json.dumps(chat("q", "a")).encode(),
    ]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(rows))
    repeated, called, good = read(["log.jsonl"], root=tmp_path)
    assert isinstance(repeated, ReadFault)
    assert isinstance(called, ReadFault) or depth < 1100
    assert good.reply == "a"


def test_the_settings_reach_the_rows_of_files(tmp_path):
    write_log(tmp_path / "log.jsonl", [{"q": "Where?", "a": "<think>hm</think>Here."}])
    settings = DataSettings(mapping=Mapping(question="q", reply="a"), reasoning="drop")
    [found] = read(["log.jsonl"], root=tmp_path, settings=settings)
    assert (found.question, found.reply) == ("Where?", "Here.")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 3}}, (7, 3, None, None)),
        ({"usage": {"input_tokens": 7, "output_tokens": 3}, "cost": 0.25}, (7, 3, None, 0.25)),
        ({"prompt_tokens": "7", "completion_tokens": 3, "total_cost": "0.5"}, (7, 3, None, 0.5)),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}}, (7, None, 5, None)),
        (
            {
                "usage": {
                    "input_tokens": 7,
                    "cache_read_input_tokens": 5,
                    "cache_creation_input_tokens": 2,
                    "output_tokens": 1,
                }
            },
            (14, 1, 5, None),
        ),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "x"}, "cost": -2}, (None, None, None, None)),
        ({"usage": 5}, (None, None, None, None)),
    ],
)
def test_tokens_and_cost_of_a_call_are_kept_on_its_row(row, expected):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    [read] = read_row({"messages": turns, **row}, Origin(file="f", line=1), settings=DataSettings())
    assert (read.prompt_tokens, read.reply_tokens, read.cached_tokens, read.cost) == expected
