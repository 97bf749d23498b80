"""Exports of Langfuse and LangSmith as CSV and Parquet, with the column types that their exporters write."""

import csv
import decimal
import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.data.ingest.blocks import SkippedPart
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_block
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction

BEGAN = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
TURNS = [{"role": "system", "content": 'Say "why", too.'}, {"role": "user", "content": "Where, and\nwhen?"}]
ANSWER = {"role": "assistant", "content": "In Oslo, at noon."}
LANGFUSE = [
    {
        "id": "o1",
        "trace_id": "t1",
        "project_id": "p",
        "environment": "default",
        "type": "GENERATION",
        "parent_observation_id": "o0",
        "session_id": "s1",
        "start_time": BEGAN,
        "end_time": BEGAN + timedelta(seconds=2),
        "name": "chat",
        "level": "DEFAULT",
        "status_message": None,
        "input": json.dumps(TURNS),
        "output": json.dumps(ANSWER),
        "provided_model_name": "gpt-4o",
        "model_parameters": '{"max_tokens": 50}',
        "usage_details": {"input": 12, "output": 5, "total": 17},
        "cost_details": {"total": decimal.Decimal("0.000125000000")},
        "total_cost": decimal.Decimal("0.000125000000"),
        "latency": 2.0,
        "time_to_first_token": 0.5,
        "tags": ["a", "b"],
        "tool_definitions": {},
    },
    {"id": "o0", "trace_id": "t1", "type": "SPAN", "input": "x", "output": "y"},
    {
        "id": "o2",
        "trace_id": "t2",
        "type": "GENERATION",
        "input": "Plain question?",
        "output": None,
        "level": "ERROR",
        "status_message": "timeout",
    },
]
SCORES = [
    {
        "id": "s1",
        "trace_id": "t1",
        "observation_id": "o1",
        "name": "quality",
        "value": 0.75,
        "string_value": "",
    }
]
LANGSMITH = [
    {
        "id": "r1",
        "tenant_id": "x",
        "session_id": "project-1",
        "trace_id": "t1",
        "parent_run_id": None,
        "dotted_order": "20260102T030405678000Zr1",
        "name": "ChatOpenAI",
        "run_type": "llm",
        "status": "success",
        "is_root": False,
        "start_time": BEGAN,
        "end_time": BEGAN + timedelta(milliseconds=1500),
        "first_token_time": BEGAN + timedelta(milliseconds=250),
        "error": None,
        "extra": json.dumps({"metadata": {"thread_id": "c1", "ls_model_name": "gpt-4o"}}),
        "inputs": json.dumps({"messages": TURNS}),
        "outputs": json.dumps({"choices": [{"message": ANSWER, "finish_reason": "stop"}]}),
        "feedback_stats": '{"correct": {"n": 1, "avg": 0.5}}',
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "total_tokens": 17,
        "total_cost": decimal.Decimal("0.000125"),
        "tags": ["x"],
    },
    {"id": "r0", "trace_id": "t1", "run_type": "chain", "inputs": "{}", "outputs": "{}", "name": "agent"},
]
TYPES = {
    **dict.fromkeys(("start_time", "end_time", "first_token_time"), pa.timestamp("us", tz="UTC")),
    **dict.fromkeys(("latency", "time_to_first_token", "value"), pa.float64()),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), pa.int64()),
    "usage_details": pa.map_(pa.string(), pa.uint64()),
    "cost_details": pa.map_(pa.string(), pa.decimal128(38, 12)),
    "tool_definitions": pa.map_(pa.string(), pa.string()),
    "total_cost": pa.decimal128(38, 12),
    "tags": pa.list_(pa.string()),
    "is_root": pa.bool_(),
}


def write_parquet(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {
        name: pa.array([row.get(name) for row in rows], TYPES.get(name, pa.string())) for name in names
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def write_csv(path, rows):
    def cell(value):
        if isinstance(value, dict | list):
            return json.dumps(value, default=str)
        if isinstance(value, datetime):
            return value.isoformat()
        return {None: "", True: "true", False: "false"}.get(value, value)

    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        writer.writerows([cell(row.get(name)) for name in names] for row in rows)


WRITERS = {"csv": write_csv, "parquet": write_parquet}


def read_all(path):
    return [
        row.result
        for block in cut_blocks(path.name, root=path.parent)
        for row in read_block(block, settings=DataSettings())
    ]


@pytest.mark.parametrize("container", WRITERS)
def test_observations_of_langfuse_are_the_same_rows_in_every_container(tmp_path, container):
    path = tmp_path / f"observations.{container}"
    WRITERS[container](path, LANGFUSE)
    found = read_all(path)
    answered, failed = (row for row in found if isinstance(row, Interaction))
    assert [(turn.role, turn.content) for turn in answered.messages] == [
        ("system", 'Say "why", too.'),
        ("user", "Where, and\nwhen?"),
    ]
    assert (answered.reply, answered.model, answered.session) == ("In Oslo, at noon.", "gpt-4o", "s1")
    assert (answered.prompt_tokens, answered.reply_tokens, answered.cost) == (12, 5, 0.000125)
    assert (answered.duration_ms, answered.first_token_ms, answered.max_tokens) == (2000, 500, 50)
    assert (failed.status, failed.question) == ("failed", "Plain question?")
    assert [part.rule for part in found if isinstance(part, SkippedPart)] == ["other_span"]


@pytest.mark.parametrize("container", WRITERS)
def test_scores_of_langfuse_in_another_file_are_joined(tmp_path, container):
    WRITERS[container](tmp_path / f"observations.{container}", LANGFUSE)
    WRITERS[container](tmp_path / f"scores.{container}", SCORES)
    context = AuditContext(settings=DataSettings(logs=(".",)))
    corpus = build_corpus(context, folder=tmp_path / ".sifted", root=tmp_path, on_progress=lambda *_: None)
    rows = [row for _, row in corpus.rows_at(range(corpus.rows))]
    assert [(row.reward, row.reward_level) for row in rows] == [(0.75, "call"), (None, None)]


@pytest.mark.parametrize("container", WRITERS)
def test_runs_of_langsmith_are_the_same_rows_in_every_container(tmp_path, container):
    path = tmp_path / f"runs.{container}"
    WRITERS[container](path, LANGSMITH)
    row, left_out = read_all(path)
    assert (row.question, row.reply, row.model) == ("Where, and\nwhen?", "In Oslo, at noon.", "gpt-4o")
    assert (row.session, row.trace, row.finish_reason) == ("c1", "t1", "stop")
    assert (row.prompt_tokens, row.reply_tokens, row.cost) == (12, 5, 0.000125)
    assert (row.duration_ms, row.first_token_ms) == pytest.approx((1500, 250), abs=0.001)
    assert (row.reward, row.reward_level) == (0.5, "call")
    assert left_out.rule == "other_span"
