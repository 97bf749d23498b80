"""An agent of openai-agents on `graft serve`: its tools, its streams, its structured answers, and a release.

`make test-agents` installs the package, which stays apart.
"""

import asyncio
import json
from pathlib import Path
from typing import Literal

import pytest
import yaml
from openai import AsyncOpenAI
from pydantic import BaseModel
from serve_engines import embedded, llamacpp, serve_with
from test_tool_calls_flow import FIND, make_row
from test_upstream_api import serving as serving_upstream
from test_upstream_api import tool_base  # noqa: F401
from upstream_servers import ChatServer

import graftwork
from graftwork.files.dataset import read_rows
from graftwork.records.release import Release

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

MODELS = pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
ENGINES = pytest.mark.parametrize("engine", [embedded, llamacpp])


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path_factory):
    """No traces to OpenAI; converted files of this run stay in its folder."""
    agents.set_tracing_disabled(True)
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "gguf"))


def go(main):
    return asyncio.run(asyncio.wait_for(main(), 300))


def make_agent(client, api, *, asked, **more):
    @agents.function_tool
    def find(place: Literal["Bern", "Rome"]) -> str:
        """Finds a place."""
        asked.append(place)
        return f"{place} is there."

    model = getattr(agents, api)(model="base", openai_client=client)
    return agents.Agent(name="finder", instructions="Find it.", model=model, **{"tools": [find], **more})


@MODELS
def test_an_agent_calls_its_tool_and_answers_with_the_result(api, tool_base):  # noqa: F811
    async def main():
        server, asked = ChatServer(), []
        async with serving_upstream("endpoint", server, tool_base) as (_, client):
            agent = make_agent(client, api, asked=asked)
            server.arguments = ('{"place": "Bern"}', '{"place": "Rome"}')
            result = await agents.Runner.run(agent, "Where is it?")
            assert asked == ["Bern", "Rome"]
            assert result.final_output == "base-model: Rome is there."

            streamed = agents.Runner.run_streamed(agent, "Where is it?")
            kinds = [event.type async for event in streamed.stream_events()]
            assert streamed.final_output == "base-model: Rome is there."
            assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)

    go(main)


@MODELS
@ENGINES
def test_a_forced_tool_gets_arguments_of_its_schema(api, engine, tool_base):  # noqa: F811
    async def main():
        asked = []
        async with serve_with(engine, tool_base) as (_, client):
            settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
            agent = make_agent(
                client, api, asked=asked, model_settings=settings, tool_use_behavior="stop_on_first_tool"
            )
            result = await agents.Runner.run(agent, "Where is it?", max_turns=2)
            assert asked[0] in ("Bern", "Rome")
            assert result.final_output == f"{asked[0]} is there."

    go(main)


@MODELS
@ENGINES
def test_a_structured_answer_is_an_object_of_its_class(api, engine, tool_base):  # noqa: F811
    class Sure(BaseModel):
        sure: bool

    async def main():
        async with serve_with(engine, tool_base) as (_, client):
            agent = make_agent(client, api, asked=[], tools=[], output_type=Sure)
            result = await agents.Runner.run(agent, "Is it there?")
            assert isinstance(result.final_output, Sure)
            streamed = agents.Runner.run_streamed(agent, "Is it there?")
            assert [event async for event in streamed.stream_events()]
            assert isinstance(streamed.final_output, Sure)

    go(main)


@pytest.fixture(scope="module")
def released(tiny_base, tmp_path_factory):
    """A project whose log has tools, run as far as its release; the base's template has no form for them."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "logs").mkdir()
    rows = [make_row(number) for number in range(40)]
    (folder / "logs" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "project": "bikes",
        "base": str(tiny_base),
        "data": {"logs": ["logs/*.jsonl"], "test": 0.3, "validation": 0.1},
        "train": {"rank": 2, "epochs": 1, "batch_size": 4, "threads": 1},
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6, "metrics": ["tool_calls"]},
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    project = graftwork.open_project(folder)
    assert project.run().get("release", Release)
    return project, rows


@MODELS
def test_the_agent_that_made_the_log_runs_on_the_release(api, released):
    """The first request is a row's prompt, token by token; the call's result comes back as a message."""
    project, rows = released
    trained = {
        row.messages[-1].content: row.trained_from
        for split in ("train", "validation", "test")
        for row in read_rows(Path(project.prepare().folder), split)
    }
    asked = []

    async def find_bikes(_context, arguments):
        asked.append(json.loads(arguments))
        return '{"free": 3}'

    async def main(url):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            tool = agents.FunctionTool(
                name=FIND["name"],
                description=FIND["description"],
                params_json_schema=FIND["parameters"],
                on_invoke_tool=find_bikes,
            )
            agent = agents.Agent(
                name="rider",
                instructions="You help riders.",
                tools=[tool],
                model=getattr(agents, api)(model="champion", openai_client=client),
                model_settings=agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=200
                ),
                # The model knows no end: a text that reaches the limit is an error to the other model.
                tool_use_behavior="run_llm_again" if "Chat" in api else "stop_on_first_tool",
            )
            for row in rows[:6]:
                question = row["messages"][1]["content"]
                before = len(asked)
                result = await agents.Runner.run(agent, question, max_turns=8)
                first = result.raw_responses[0]
                assert first.usage.input_tokens == trained.get(question, first.usage.input_tokens)
                assert asked[before].keys() == {"station", "least"}
                assert any(item.type == "tool_call_output_item" for item in result.new_items)
                streamed = agents.Runner.run_streamed(agent, question, max_turns=8)
                assert [event async for event in streamed.stream_events()]
                assert any(item.type == "tool_call_output_item" for item in streamed.new_items)
        assert any(row["messages"][1]["content"] in trained for row in rows[:6])

    with project.serving() as url:
        go(lambda: main(url))
