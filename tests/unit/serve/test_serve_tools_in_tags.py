"""Tools on a base whose template has no form for calls: requests are asked as the log was trained."""

import json
from functools import partial

import pytest
from serve_engines import embedded, llamacpp, serve_with
from serve_harness import ListSink
from tool_template import FIND, PLACE, TOOLS

from graftwork.data.ingest.read import read_row
from graftwork.data.settings import DataSettings
from graftwork.engines.process import ReplyText
from graftwork.engines.protocol import GenerateRequest
from graftwork.model.chat.template import ChatTemplate
from graftwork.records.interaction import Origin

STRICT = {"type": "function", "function": {"strict": True, **TOOLS[0]["function"]}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"place":"Zürich"}'}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "It is there."},
    {"role": "tool", "tool_call_id": "c2", "content": '{"again": true}'},
    {"role": "user", "content": "Look once more."},
]
CHAT = {"messages": ASKED, "tools": [STRICT, TOOLS[1]]}
ANTHROPIC = [{"name": "find", "description": "Finds it.", "input_schema": FIND}]
FLAT = [{"type": "function", **TOOLS[0]["function"]}]


@pytest.fixture(params=[embedded, llamacpp])
def serving(request, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "gguf"))
    return partial(serve_with, request.param)


def trained_prompt(base, row):
    """The tokens that training puts before the reply of a logged row."""
    (row,) = read_row(row, Origin(file="log", line=1), settings=DataSettings())
    rendered = ChatTemplate.from_folder(base).render(row.messages, row.reply)
    return list(rendered.tokens[: rendered.trained_from])


def note_prompts(house):
    engine, seen = house.stub, []
    template = engine._prompts.template
    prompt = template.prompt
    template.prompt = lambda messages: seen.append(prompt(messages)) or seen[-1]
    return seen


def test_the_request_that_made_the_log_is_asked_as_it_was_trained(run, serving, tiny_base):
    async def main():
        async with serving(tiny_base) as (house, client):
            seen = note_prompts(house)
            reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            expected = trained_prompt(tiny_base, {**CHAT, "messages": [*ASKED, reply]})
            for choice in ("auto", "required"):
                seen.clear()
                await client.chat.completions.create(model="base", **CHAT, tool_choice=choice, max_tokens=90)
                assert seen[0] == expected

    run(main)


@pytest.mark.parametrize("tools", [ANTHROPIC, FLAT, TOOLS[:1]])
def test_tools_of_every_api_are_trained_as_chat_requests_have_them(tiny_base, tools):
    asked = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
    expected = trained_prompt(tiny_base, {"messages": asked, "tools": TOOLS[:1]})
    assert trained_prompt(tiny_base, {"messages": asked, "tools": tools}) == expected


def test_forced_calls_follow_their_schema_whole_and_streamed(run, serving, tiny_base):
    async def main():
        sink = ListSink()
        async with serving(tiny_base, sink) as (house, client):
            choice = {"type": "function", "function": {"name": "find"}}
            ask = {"model": "base", **CHAT, "tool_choice": choice}
            whole = (await client.chat.completions.create(**ask)).choices[0]
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
            (call,) = whole.message.tool_calls
            assert json.loads(call.function.arguments)["place"] in PLACE["enum"]
            chunks = [c.choices[0] async for c in await client.chat.completions.create(**ask, stream=True)]
            parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
            assert (parts[0].id is not None, parts[0].function.name) == (True, "find")
            assert "".join(part.function.arguments for part in parts) == call.function.arguments
            assert chunks[-1].finish_reason == "tool_calls"
            await house.close_captures()
            assert sink.captures[0].reply.startswith('<tool_call>\n{"name": "find", "arguments": {"place"')

    run(main)


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_in_tags_are_read_with_the_text_before_them(tiny_base, parallel):
    form = ChatTemplate.from_folder(tiny_base).tool_form
    request = GenerateRequest(
        model="base", tools=tuple(TOOLS), parallel_tool_calls=parallel, messages=(), max_tokens=9
    )
    text, written = ReplyText(request, form), "I look.\n"
    calls = [{"name": "find", "arguments": {"place": "Bern"}}, {"name": "wait", "arguments": {}}]
    written += "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    sent = "".join(text.push(written[:end]) for end in range(len(written) + 1))
    rest, made = text.finish()
    assert sent + rest == "I look."
    listed = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in made]
    assert listed == calls[: None if parallel else 1]
