"""Results and samples as lm-eval writes them.

In: one subject's answers and grades. Out: the results document, the lines of the samples file, and
what both are called. lm-eval knows one response a document: of several the first one is written, with
the grades averaged over all.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from graftwork.evaluate.exchange.exported import Export, graded_metrics, own_facts, standard_error
from graftwork.evaluate.exchange.foreign import OWN_KEY
from graftwork.records.report import Answer, Case, Metric


class LmEvalFiles(NamedTuple):
    """`folder` is the model's, as lm-eval makes one for each."""

    folder: str
    results_name: str
    samples_name: str
    results: dict[str, Any]
    samples: list[dict[str, Any]]


def write_lm_eval(export: Export) -> LmEvalFiles:
    task = re.sub(r"\W", "_", export.task)
    metrics = graded_metrics(export.subject)
    answers = {answer.case_id: answer for answer in sorted(export.answers, key=lambda a: -a.repeat)}
    samples = [
        _sample(place, case, answers[case.id], metrics)
        for place, case in enumerate(export.cases)
        if case.id in answers
    ]
    folder = re.sub(r"[\"<>:/|\\?*\[\]]+", "__", export.subject.subject)
    date = datetime.fromisoformat(export.when).replace(tzinfo=None).isoformat().replace(":", "-")
    hashes = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    return LmEvalFiles(
        folder=folder.strip(".") or "model",
        results_name=f"results_{date}.json",
        samples_name=f"samples_{task}_{date}.jsonl",
        results=_results(export, task, metrics, folder=folder, task_hash=_hash(hashes), count=len(samples)),
        samples=samples,
    )


def _results(
    export: Export, task: str, metrics: Mapping[str, Metric], *, folder: str, task_hash: str, count: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {"alias": task, "sample_len": count}
    for name, metric in metrics.items():
        values = [value for value in metric.scores.values() if value is not None]
        figures[f"{name},none"] = sum(values) / len(values)
        figures[f"{name}_stderr,none"] = standard_error(values)
    settings = export.subject.generation.settings
    return {
        "results": {task: figures},
        "group_subtasks": {task: []},
        "configs": {task: {"task": task, "output_type": "generate_until", "metadata": {"version": 1.0}}},
        "versions": {task: 1.0},
        "n-shot": {task: 1 if settings.get("worked_example") else 0},
        "higher_is_better": {task: {name: name != "truncated" for name in metrics}},
        "n-samples": {task: {"original": len(export.cases), "effective": count}},
        "config": {"model": OWN_KEY, "model_args": {"subject": export.subject.subject}, "limit": None},
        "git_hash": None,
        "date": datetime.fromisoformat(export.when).timestamp(),
        "model_source": OWN_KEY,
        "model_name": export.subject.subject,
        "model_name_sanitized": folder,
        "task_hashes": {task: task_hash},
        OWN_KEY: {"version": export.version, "cases_hash": export.cases_hash, "settings": settings},
    }


def _sample(place: int, case: Case, answer: Answer, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    prompt = json.dumps([m.model_dump(mode="json") for m in case.messages], ensure_ascii=False)
    facts = {
        "id": case.id,
        "messages": [message.model_dump(mode="json") for message in case.messages],
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "seconds": answer.seconds,
        "truncated": answer.finish_reason == "length",
        **own_facts(case),
    }
    doc = {"question": case.messages[-1].content if case.messages else "", OWN_KEY: facts}
    graded = {name: m.scores[case.id] for name, m in metrics.items() if m.scores.get(case.id) is not None}
    return {
        "doc_id": place,
        "doc": doc,
        "target": case.reference,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
        "resps": [[answer.text]],
        "filtered_resps": [answer.text],
        "filter": "none",
        "metrics": list(graded),
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(case.reference),
        **graded,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
