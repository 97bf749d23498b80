"""An agent of openai-agents on `graft serve`: its tools, its streams and its structured answers.

`make test-agents` installs the package, which stays apart.
"""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel
from serve_engines import embedded, llamacpp, serve_with
from test_upstream_api import serving as serving_upstream
from test_upstream_api import tool_base  # noqa: F401
from upstream_servers import ChatServer

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
