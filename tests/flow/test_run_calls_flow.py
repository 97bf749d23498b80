"""A metric of the project that runs tool calls: from graft.yaml over the evaluation to a rule of the gate."""

import json
from pathlib import Path

import graftwork

RUN_SQL = {
    "name": "run_sql",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
METRIC = """
def same_value(case, text, environment):
    expected, given = environment.read_calls(case.reference), environment.read_calls(text)
    wanted = environment.run("run_sql.py", expected[0].arguments)
    assert wanted.ok, wanted.why
    found = environment.run("run_sql.py", given[0].arguments) if given else wanted
    return bool(given) and found.ok and found.value == wanted.value


def runs(case, text, environment):
    return environment.run("run_sql.py", environment.read_calls(case.messages[-1].content)[0].arguments).ok
"""
PROGRAM = """
import json, sqlite3
database = sqlite3.connect(":memory:")
database.executescript(open("bikes.sql").read())
print(json.dumps(database.execute(json.load(open("arguments.json"))["query"]).fetchall()))
"""
FIXTURE = "CREATE TABLE bikes (id INTEGER); INSERT INTO bikes VALUES (3), (4), (5);"


def make_row(number: int) -> dict[str, object]:
    query = f"SELECT id FROM bikes WHERE id = {number}"
    call = {"name": "run_sql", "arguments": json.dumps({"query": query})}
    # The question holds a call too, for a metric that runs it whatever the model answers.
    question = f'<tool_call>\n{{"name": "run_sql", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    messages = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
        },
    ]
    return {"id": str(number), "messages": messages, "tools": [{"type": "function", "function": RUN_SQL}]}


def test_calls_are_run_for_the_report_and_a_rule_of_the_gate(small_project: Path, change_settings):
    rows = [make_row(number) for number in range(24)]
    (small_project / "logs" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = small_project / "metrics"
    metrics.mkdir()
    for name, text in {"own.py": METRIC, "run_sql.py": PROGRAM, "bikes.sql": FIXTURE}.items():
        (metrics / name).write_text(text)
    files = {"files": ["metrics/run_sql.py", "metrics/bikes.sql"], "at_least": 1}
    checks = [{"name": name, "metric": f"metrics/own.py:{name}", **files} for name in ("same_value", "runs")]
    rules = [{"metric": check["name"], "over": 0.2} for check in checks]
    change_settings(
        small_project,
        data={"near_duplicate": 1.0},
        train={"epochs": 1},
        evaluate={"checks": checks},
        gate={"rules": rules},
    )
    project = graftwork.open_project(small_project)
    verdict = project.gate(update=True)
    report = project.evaluate().report
    measured = report.candidate.metrics
    assert [measured[name].failed for name in ("same_value", "runs")] == [0, 0]
    assert (measured["same_value"].value, measured["runs"].value) == (0.0, 1.0)
    assert measured["runs"].n == report.cases
    outcomes = {rule.metric: rule.outcome for rule in verdict.rules}
    assert (outcomes["same_value"], outcomes["runs"]) == ("fail", "pass")
