"""Traces in the corpus: scores are joined, retries are recognized, what is left out is reported."""

import json
import shutil
from collections import Counter

from trace_samples import FOLDER

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.data.prepare import audit_logs
from graftwork.data.settings import DataSettings


def observation(number, *, trace, question, answer="It is next to the river.", **more):
    return {
        "id": f"o{number}",
        "trace_id": trace,
        "type": "GENERATION",
        "input": json.dumps([{"role": "user", "content": question}]),
        "output": json.dumps({"role": "assistant", "content": answer}),
        **more,
    }


def build(tmp_path, files, **settings):
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    for name, rows in files.items():
        (logs / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    context = AuditContext(settings=DataSettings(logs=("logs",), **settings))
    return build_corpus(context, folder=tmp_path / "sifted", root=tmp_path, on_progress=lambda *_: None)


def rows_of(corpus):
    return [row for _, row in corpus.rows_at(range(corpus.rows))]


def test_scores_in_another_file_are_joined_with_their_level(tmp_path):
    calls = [
        observation(1, trace="t1", question="Where is it?"),
        observation(2, trace="t1", question="And when?"),
        observation(3, trace="t2", question="Why?"),
    ]
    score = {"name": "quality", "timestamp": "2026-01-01"}
    scores = [
        {**score, "id": "s1", "trace_id": "t1", "observation_id": "o1", "value": 0.25},
        {**score, "id": "s2", "trace_id": "t1", "observation_id": None, "value": 1},
        {**score, "id": "s3", "trace_id": "t1", "observation_id": None, "value": 0},
    ]
    corpus = build(tmp_path, {"observations.jsonl": calls, "scores.jsonl": scores})
    assert [(row.reward, row.reward_level) for row in rows_of(corpus)] == [
        (0.25, "call"),
        (0.5, "trace"),
        (None, None),
    ]


def test_calls_of_a_trace_that_is_scored_bad_are_left_out_unless_they_are_kept(tmp_path):
    calls = [observation(n, trace=f"t{n}", question=f"Where is room {n}?") for n in (1, 2)]
    scores = [
        {"id": f"s{n}", "trace_id": f"t{n}", "name": "quality", "timestamp": "2026-01-01", "value": n - 1}
        for n in (1, 2)
    ]
    for kept in (True, False):
        corpus = build(
            tmp_path, {"observations.jsonl": calls, "scores.jsonl": scores}, drop_rated_bad=not kept
        )
        assert corpus.column("passed").tolist() == [kept, True]


def test_the_same_call_made_again_in_a_trace_is_a_retry_and_in_another_trace_is_not(tmp_path):
    calls = [
        observation(1, trace="t1", question="Where is it?", answer="I do not know the way to it."),
        observation(2, trace="t1", question="Where is it?", answer="It is next to the river."),
        observation(3, trace="t2", question="Where is it?", answer="It is behind the hill."),
    ]
    corpus = build(tmp_path, {"observations.jsonl": calls}, conflicts="keep_all")
    assert list(corpus.withdrawn) == [0]
    assert "made the same call again" in corpus.withdrawn[0]


def test_a_span_whose_messages_are_in_log_records_is_not_counted_as_empty(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("genai_messages.otlp.jsonl", "genai_messages.otlp_logs.jsonl"):
        shutil.copy(FOLDER / name, tmp_path / "logs" / name)
    context = AuditContext(settings=DataSettings(logs=("logs",)))
    corpus = build_corpus(context, folder=tmp_path / "sifted", root=tmp_path, on_progress=lambda *_: None)
    counts = Counter()
    for part in corpus.left_out():
        counts[part.rule] += part.count
    # The seventh call failed: there is no reply in the log records.
    assert (corpus.rows, counts["content_in_other_file"], counts["no_content"]) == (6, 6, 1)


def test_the_audit_says_how_many_spans_had_no_content_and_what_was_left_out(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("genai.otlp.jsonl", "genai_events.otlp.jsonl"):
        shutil.copy(FOLDER / name, logs / name)
    context = AuditContext(settings=DataSettings(logs=("logs",)))
    audit = audit_logs(context, folder=tmp_path / "sifted", root=tmp_path)
    found = {finding.code: finding for finding in audit.findings}
    assert found["no_content"].count == 7
    assert found["no_content"].rows[0].file == "logs/genai_events.otlp.jsonl"
    assert found["left_out"].reasons == {
        "spans of agents, tools and other work": 8,
        "spans of agents that repeat the calls below them": 4,
    }
    assert found["truncated"].count == 2
