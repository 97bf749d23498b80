"""A log with tools on a base whose template knows none: trained, deployed, and asked as the log was made."""

import json
from pathlib import Path

from openai import OpenAI

import graftwork
from graftwork.files.dataset import read_rows
from graftwork.records.release import Release

PLACES = ("harbor", "museum", "old mill", "market", "garden", "north gate", "library")
FIND = {
    "name": "find_bikes",
    "description": "Count the free bikes of a station.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"station": {"type": "string", "maxLength": 12}, "least": {"enum": [0, 1, 2, 3, 4]}},
        "required": ["station", "least"],
        "additionalProperties": False,
    },
}


def make_row(number: int) -> dict[str, object]:
    station = f"{PLACES[number % len(PLACES)]} {number}"
    arguments = json.dumps({"station": station, "least": number % 5})
    call = {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "find_bikes", "arguments": arguments},
    }
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You help riders."},
        {"role": "user", "content": f"Are there {number % 5} bikes at the {station}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    if number % 3 == 0:
        messages += [
            {"role": "tool", "tool_call_id": f"c{number}", "content": f'{{"free": {number}}}'},
            {"role": "assistant", "content": f"There are {number} at the {station}."},
        ]
    return {"id": str(number), "messages": messages, "tools": [{"type": "function", "function": FIND}]}


def test_the_requests_that_made_the_log_are_answered_on_the_prompts_that_were_trained(
    small_project: Path, change_settings
):
    rows = [make_row(number) for number in range(40)]
    (small_project / "logs" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    change_settings(
        small_project, train={"epochs": 1}, evaluate={"metrics": ["tool_calls", "tool_calls_valid"]}
    )
    project = graftwork.open_project(small_project)
    release = project.run().get("release", Release)
    folder = small_project / ".graft" / "releases" / release.id
    assert "# Tools" in (folder / "chat_template.jinja").read_text()
    trained = {
        row.messages[-1].content: row.trained_from
        for split in ("train", "validation")
        for row in read_rows(Path(project.prepare().folder), split)
    }
    matched = 0
    with project.serving() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for row in rows[:4]:
            asked = row["messages"][:-1]
            sent = {"model": "champion", "messages": asked, "tools": row["tools"]}
            answer = client.chat.completions.create(**sent, max_tokens=4)
            matched += trained.get(asked[-1]["content"]) == answer.usage.prompt_tokens
            only = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
            forced = client.chat.completions.create(**sent, **only)
            (call,) = forced.choices[0].message.tool_calls
            assert json.loads(call.function.arguments).keys() == {"station", "least"}
    assert matched == sum(row["messages"][-2]["content"] in trained for row in rows[:4]) > 0
