"""A log as inspect-ai reads it: `inspect view`, `read_eval_log`, `inspect log convert`.

In: one subject's answers and grades. Out: the document of a version 2 log. Ids are drawn from the
content, so that the same evaluation gives the same log.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.evaluate.exchange.exported import Export, graded_metrics, own_facts, standard_error
from graftwork.evaluate.exchange.foreign import OWN_KEY
from graftwork.records.base import fingerprint
from graftwork.records.report import Answer, Case, Metric

LOG_VERSION = 2


def write_inspect(export: Export) -> dict[str, Any]:
    metrics = graded_metrics(export.subject)
    cases = {case.id: case for case in export.cases}
    samples = [
        _sample(export, cases[answer.case_id], answer, metrics)
        for answer in sorted(export.answers, key=lambda answer: answer.repeat)
        if answer.case_id in cases
    ]
    model = f"{OWN_KEY}/{export.subject.subject}"
    stats: dict[str, Any] = {"started_at": export.when, "completed_at": export.when, "model_usage": {}}
    return {
        "version": LOG_VERSION,
        "status": "success",
        "eval": _spec(export, metrics, model),
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": {}}], "config": {}},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [_result(name, metric) for name, metric in metrics.items()],
        },
        "stats": stats,
        "samples": samples,
    }


def _spec(export: Export, metrics: Mapping[str, Metric], model: str) -> dict[str, Any]:
    identity = fingerprint([export.cases_hash, export.subject.subject, export.when])
    repeats = 1 + max((answer.repeat for answer in export.answers), default=0)
    config = export.subject.generation.settings
    known = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_new_tokens": "max_tokens"}
    return {
        "eval_id": identity[:22],
        "run_id": identity[22:44],
        "created": export.when,
        "task": export.task,
        "task_id": fingerprint([export.task, export.cases_hash])[:22],
        "task_version": 0,
        "task_attribs": {},
        "task_args": {},
        "dataset": {
            "name": export.task,
            "samples": len(export.cases),
            "sample_ids": [case.id for case in export.cases],
            "shuffled": False,
        },
        "model": model,
        "model_generate_config": {
            theirs: config[ours]
            for ours, theirs in known.items()
            if isinstance(config.get(ours), int | float)
        },
        "model_args": {},
        "config": {"epochs": repeats},
        "packages": {OWN_KEY: export.version},
        "scorers": [
            {"name": name, "options": {}, "metrics": [{"name": "mean", "options": {}}], "metadata": {}}
            for name in metrics
        ],
        "metadata": {OWN_KEY: {"cases_hash": export.cases_hash, "subject": export.subject.subject}},
    }


def _result(name: str, metric: Metric) -> dict[str, Any]:
    values = [value for value in metric.scores.values() if value is not None]
    return {
        "name": name,
        "scorer": name,
        "scored_samples": len(values),
        "unscored_samples": len(metric.scores) - len(values),
        "params": {},
        "metrics": {
            "mean": {"name": "mean", "value": sum(values) / len(values), "params": {}},
            "stderr": {"name": "stderr", "value": standard_error(values), "params": {}},
        },
    }


def _sample(export: Export, case: Case, answer: Answer, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    model = f"{OWN_KEY}/{export.subject.subject}"
    said = {"role": "assistant", "content": answer.text, "source": "generate", "model": model}
    turns = [{"role": message.role, "content": message.content} for message in case.messages]
    usage = {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
    return {
        "id": case.id,
        "epoch": answer.repeat + 1,
        "input": turns,
        "target": case.reference,
        "messages": [*turns, said],
        "output": {
            "model": model,
            "choices": [
                {
                    "message": said,
                    "stop_reason": "max_tokens" if answer.finish_reason == "length" else "stop",
                }
            ],
            "completion": answer.text,
            "usage": usage,
            "time": answer.seconds,
        },
        "scores": {
            name: {"value": metric.scores[case.id], "answer": answer.text}
            for name, metric in metrics.items()
            if metric.scores.get(case.id) is not None
        },
        "metadata": {OWN_KEY: own_facts(case)},
        "store": {},
        "events": [],
        "model_usage": {model: usage},
        "attachments": {},
    }
