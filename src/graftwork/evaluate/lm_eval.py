"""Results of lm-eval, read and written: `results_*.json` with `samples_*.jsonl` next to it if any.

Metrics are named by task where there are several tasks, and by filter where a task has several. lm-eval
knows one response per document: of several the first one is written, with the grades averaged over all.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from statistics import NormalDist
from typing import Any

from graftwork.evaluate.foreign_runs import (
    MOST_BYTES,
    OWN_KEY,
    ForeignRun,
    ForeignSample,
    SubjectExport,
    graded_metrics,
    make_messages,
    named,
    not_as_expected,
    number_of,
    origin_of,
    own_facts,
    parse,
    plain_settings,
    read_document,
    section,
    standard_error,
    too_large,
    whole_number,
    write_json,
)
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.files.disk import explain_os_error
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Answer, Case, Metric

TOOL = "lm-eval"
_NO_METRICS = ("alias", "name", "sample_len", "sample_count", "samples")
_DATE = r"\d{4}-\d\d-\d\dT[\d.-]+"
_RESULTS = re.compile(rf"^.*_({_DATE})\.json$")
_SAMPLES = re.compile(rf"^samples_(.+)_({_DATE})\.jsonl$")


def read_lm_eval(path: Path) -> ForeignRun:
    """A samples file is read with the results next to it, and vice versa."""
    if path.suffix == ".jsonl":
        match = _SAMPLES.match(path.name)
        results = path.with_name(f"results_{match.group(2)}.json") if match else None
        header = read_document(results) if results is not None and results.is_file() else {}
        results_header = header if isinstance(header, dict) else {}
        return _assemble(path, results_header, [(match.group(1) if match else "task", path)])
    header = read_document(path)
    if not is_lm_eval(header):
        raise not_as_expected(
            "these are not lm-eval results", why="it has no `results` by task", where=str(path)
        )
    date = _RESULTS.match(path.name)
    files: list[tuple[str, Path]] = []
    if date is not None:
        files = [
            (task, file)
            for task in header["results"]
            if "/" not in task and (file := path.with_name(f"samples_{task}_{date.group(1)}.jsonl")).is_file()
        ]
    return _assemble(path, header, files)


def is_lm_eval(header: Any) -> bool:
    return isinstance(header, dict) and isinstance(header.get("results"), dict) and "eval" not in header


def _assemble(path: Path, header: dict[str, Any], files: list[tuple[str, Path]]) -> ForeignRun:
    rows = [(task, row, origin) for task, file in files for row, origin in _read_rows(file)]
    several = len({task for task, _, _ in rows}) > 1
    filters: dict[str, set[str]] = {}
    for task, row, _ in rows:
        filters.setdefault(task, set()).add(str(row.get("filter", "none")))
    samples: dict[tuple[str, int], ForeignSample] = {}
    for task, row, origin in rows:
        sample = _read_row(task, row, origin, several=several, filtered=len(filters[task]) > 1)
        key = (sample.case.id, sample.answer.repeat)
        if key in samples:
            # The same document once more, after another filter.
            sample = samples[key].model_copy(update={"scores": {**samples[key].scores, **sample.scores}})
        samples[key] = sample
    notes: tuple[str, ...] = ()
    if not files:
        notes = (
            "There is no samples file next to the results, so they can be shown and not compared in pairs: "
            "run lm-eval with --log_samples.",
        )
    config = section(header, "config")
    settings = {name: config.get(name) for name in ("model", "limit", "random_seed", "numpy_seed")}
    settings |= {"lm_eval": header.get("lm_eval_version"), "date": header.get("date")}
    return ForeignRun(
        tool=TOOL,
        subject=named(header, "model_name") or named(config, "model") or "model",
        file=str(path),
        samples=tuple(samples.values()),
        totals=() if samples else _read_totals(header),
        settings=plain_settings(settings),
        notes=notes,
    )


def _read_rows(path: Path) -> Iterator[tuple[dict[str, Any], Origin]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise too_large(path)
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise explain_os_error(error, path) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse(line, where=f"{path}:{number}")
        if not isinstance(row, dict) or "doc_id" not in row:
            raise not_as_expected(
                "this is not a sample of lm-eval", why="it has no `doc_id`", where=f"{path}:{number}"
            )
        yield row, Origin(file=str(path), line=number)


def _read_row(
    task: str, row: dict[str, Any], origin: Origin, *, several: bool, filtered: bool
) -> ForeignSample:
    facts = section(section(row, "doc"), OWN_KEY)
    prefix = f"{task}:" if several else ""
    suffix = f",{row.get('filter')}" if filtered else ""
    listed = row.get("metrics")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    target = row.get("target")
    name = named(facts, "id") or (f"{task}/{row['doc_id']}" if several else str(row["doc_id"]))
    return ForeignSample(
        case=Case(
            id=name,
            origin=origin_of(facts, origin),
            messages=make_messages(facts.get("messages")) or _asked(row),
            reference=target if isinstance(target, str) else json.dumps(target, ensure_ascii=False),
            group=named(facts, "group") or (task if several else None),
            domain=named(facts, "domain"),
            session=named(facts, "session"),
        ),
        answer=Answer(
            case_id=name,
            text=_said(row),
            tokens=whole_number(facts.get("tokens")),
            prompt_tokens=whole_number(facts.get("prompt_tokens")),
            finish_reason="length" if facts.get("truncated") is True else "stop",
            seconds=max(0.0, number_of(facts.get("seconds")) or 0.0),
            repeat=whole_number(facts.get("repeat")),
        ),
        scores={f"{prefix}{metric}{suffix}": number_of(row.get(metric)) for metric in names},
    )


def _asked(row: dict[str, Any]) -> tuple[Message, ...]:
    """The prompt of the first request: text, or a chat written as JSON."""
    prompt = _argument(row, 0, "arg_0")
    if isinstance(prompt, list):
        prompt = prompt[0] if len(prompt) == 1 else json.dumps(prompt, ensure_ascii=False)
    if not isinstance(prompt, str):
        return ()
    if prompt.startswith("[{"):
        try:
            turns = make_messages(json.loads(prompt))
        except (ValueError, RecursionError):
            turns = ()
        if turns:
            return turns
    return (Message(role="user", content=prompt),)


def _argument(row: dict[str, Any], request: int, name: str) -> Any:
    return section(section(row, "arguments"), f"gen_args_{request}").get(name)


def _said(row: dict[str, Any]) -> str:
    responses = row.get("filtered_resps")
    if not isinstance(responses, list) or not responses:
        return ""
    if all(isinstance(choice, list | tuple) and len(choice) == 2 for choice in responses):
        weights = []
        for weight, _ in responses:
            try:
                number = number_of(float(weight))
            except (TypeError, ValueError):
                number = None
            weights.append(float("-inf") if number is None else number)
        best = max(range(len(responses)), key=lambda i: weights[i])
        choice = _argument(row, best, "arg_1")
        return choice.strip() if isinstance(choice, str) else ""
    first = responses[0][0] if isinstance(responses[0], list) and responses[0] else responses[0]
    return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)


def _read_totals(header: dict[str, Any]) -> tuple[Metric, ...]:
    tasks, counts = section(header, "results"), section(header, "n-samples")
    totals = []
    for task, figures in tasks.items():
        if not isinstance(figures, dict):
            continue
        n = whole_number(section(counts, task).get("effective")) or whole_number(figures.get("sample_len"))
        for key, value in figures.items():
            name, _, filtered = key.partition(",")
            number = number_of(value)
            if key in _NO_METRICS or name.endswith("_stderr") or number is None:
                continue
            stderr = number_of(figures.get(f"{name}_stderr,{filtered}"))
            label = name if filtered in ("none", "") else key
            metric = f"{task}:{label}" if len(tasks) > 1 else label
            totals.append(_total_metric(metric, number, stderr=stderr, n=n))
    return tuple(totals)


def _total_metric(name: str, value: float, *, stderr: float | None, n: int) -> Metric:
    """A share that is a whole number of cases gets its exact interval; else its reported standard error."""
    successes = value * n
    if n and 0 <= value <= 1 and math.isclose(successes, round(successes), abs_tol=1e-6):
        low, high = clopper_pearson(round(successes), n=n)
        return Metric(
            name=name,
            kind="rate",
            value=value,
            low=low,
            high=high,
            n=n,
            successes=round(successes),
            method="exact (Clopper and Pearson)",
        )
    spread = NormalDist().inv_cdf(0.975) * (stderr or 0.0)
    return Metric(
        name=name,
        kind="number",
        value=value,
        low=value - spread,
        high=value + spread,
        n=max(1, n),
        method="the other tool's standard error" if stderr else "",
    )


def write_lm_eval(export: SubjectExport) -> dict[str, str]:
    """The text of each file, by its path below the folder of results."""
    task = re.sub(r"\W", "_", export.task)
    metrics = graded_metrics(export.subject)
    answers = {answer.case_id: answer for answer in sorted(export.answers, key=lambda a: -a.repeat)}
    samples = [
        _sample(number, case, answers[case.id], metrics)
        for number, case in enumerate(export.cases)
        if case.id in answers
    ]
    hashes = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples)
    results = _results(export, task, metrics, task_hash=_hash(hashes), count=len(samples))
    folder = export.folder.strip(".") or "model"
    return {
        f"{folder}/results_{export.date}.json": write_json(results, indent=2),
        f"{folder}/samples_{task}_{export.date}.jsonl": "".join(write_json(s) + "\n" for s in samples),
    }


def _results(
    export: SubjectExport,
    task: str,
    metrics: Mapping[str, Metric],
    *,
    task_hash: str,
    count: int,
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
        "model_name_sanitized": export.folder,
        "task_hashes": {task: task_hash},
        OWN_KEY: {"version": export.version, "cases_hash": export.cases_hash, "settings": settings},
    }


def _sample(number: int, case: Case, answer: Answer, metrics: Mapping[str, Metric]) -> dict[str, Any]:
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
        "doc_id": number,
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
