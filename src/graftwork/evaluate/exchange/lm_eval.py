"""Results of lm-eval, read and written: `results_*.json` with `samples_*.jsonl` next to it if any.

Metrics are named by task where there are several tasks, and by filter where a task has several. lm-eval
knows one response per document: of several the first one is written, with the grades averaged over all.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.evaluate.exchange.common import (
    MOST_BYTES,
    OWN_KEY,
    ForeignRun,
    ForeignSample,
    ForeignTotal,
    SubjectExport,
    graded_metrics,
    make_messages,
    named,
    not_as_expected,
    number_of,
    own_facts,
    parse,
    read_document,
    section,
    standard_error,
    too_large,
    whole_number,
)
from graftwork.files.disk import explain_os_error
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Case, Metric

TOOL = "lm-eval"
_NO_METRICS = ("alias", "name", "sample_len", "sample_count", "samples")
_DATE = r"\d{4}-\d\d-\d\dT[\d.-]+"
_RESULTS = re.compile(rf"^.*_({_DATE})\.json$")
_SAMPLES = re.compile(rf"^samples_(.+)_({_DATE})\.jsonl$")


def read_lm_eval(path: Path) -> ForeignRun:
    """A samples file is read with the results next to it, and the other way round."""
    if path.suffix == ".jsonl":
        named = _SAMPLES.match(path.name)
        results = path.with_name(f"results_{named.group(2)}.json") if named else None
        header = read_document(results) if results is not None and results.is_file() else {}
        known = header if isinstance(header, dict) else {}
        return _assemble(path, known, [(named.group(1) if named else "task", path)])
    header = read_document(path)
    if not is_lm_eval(header):
        raise not_as_expected(
            "these are no results of lm-eval", why="there is no `results` by task", where=str(path)
        )
    return _assemble(path, header, _samples_beside(path, header))


def is_lm_eval(header: Any) -> bool:
    return isinstance(header, dict) and isinstance(header.get("results"), dict) and "eval" not in header


def _samples_beside(path: Path, header: dict[str, Any]) -> list[tuple[str, Path]]:
    date = _RESULTS.match(path.name)
    if date is None:
        return []
    found = [(task, path.with_name(f"samples_{task}_{date.group(1)}.jsonl")) for task in header["results"]]
    return [(task, file) for task, file in found if "/" not in task and file.is_file()]


def _assemble(path: Path, header: dict[str, Any], files: list[tuple[str, Path]]) -> ForeignRun:
    rows = [(task, row) for task, file in files for row in _read_rows(file)]
    several = len({task for task, _ in rows}) > 1
    filters: dict[str, set[str]] = {}
    for task, row in rows:
        filters.setdefault(task, set()).add(str(row.get("filter", "none")))
    samples: dict[tuple[str, int], ForeignSample] = {}
    for task, row in rows:
        sample = _read_row(task, row, several=several, filtered=len(filters[task]) > 1)
        place = (sample.id, sample.repeat)
        if place in samples:
            # The same document once more, behind another filter.
            sample = samples[place].model_copy(update={"scores": {**samples[place].scores, **sample.scores}})
        samples[place] = sample
    notes: tuple[str, ...] = ()
    if not files:
        notes = (
            "There is no samples file next to the results, so they can be shown and not compared in pairs: "
            "run lm-eval with --log_samples.",
        )
    return ForeignRun(
        tool=TOOL,
        subject=_subject(header),
        file=str(path),
        samples=tuple(samples.values()),
        totals=() if samples else _read_totals(header),
        settings=_settings(header),
        notes=notes,
    )


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise too_large(path)
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise explain_os_error(error, path) from error
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse(line, where=f"{path}:{place}")
        if not isinstance(row, dict) or "doc_id" not in row:
            raise not_as_expected(
                "this is no sample of lm-eval", why="it has no `doc_id`", where=f"{path}:{place}"
            )
        yield row


def _read_row(task: str, row: dict[str, Any], *, several: bool, filtered: bool) -> ForeignSample:
    own = section(section(row, "doc"), OWN_KEY)
    prefix = f"{task}:" if several else ""
    suffix = f",{row.get('filter')}" if filtered else ""
    listed = row.get("metrics")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    target = row.get("target")
    return ForeignSample(
        id=named(own, "id") or (f"{task}/{row['doc_id']}" if several else str(row["doc_id"])),
        messages=make_messages(own.get("messages")) or _asked(row),
        reference=target if isinstance(target, str) else json.dumps(target, ensure_ascii=False),
        text=_said(row),
        scores={f"{prefix}{name}{suffix}": number_of(row.get(name)) for name in names},
        repeat=whole_number(own.get("repeat")),
        tokens=whole_number(own.get("tokens")),
        prompt_tokens=whole_number(own.get("prompt_tokens")),
        seconds=max(0.0, number_of(own.get("seconds")) or 0.0),
        truncated=own.get("truncated") is True,
        group=named(own, "group") or (task if several else None),
        domain=named(own, "domain"),
        session=named(own, "session"),
        origin_file=named(own, "file") or "",
        origin_line=whole_number(own.get("line")),
    )


def _asked(row: dict[str, Any]) -> tuple[Message, ...]:
    """The prompt of the first request: text, or a chat written as JSON."""
    asked = _argument(row, 0, "arg_0")
    if isinstance(asked, list):
        asked = asked[0] if len(asked) == 1 else json.dumps(asked, ensure_ascii=False)
    if not isinstance(asked, str):
        return ()
    if asked.startswith("[{"):
        try:
            turns = make_messages(json.loads(asked))
        except (ValueError, RecursionError):
            turns = ()
        if turns:
            return turns
    return (Message(role="user", content=asked),)


def _argument(row: dict[str, Any], request: int, name: str) -> Any:
    return section(section(row, "arguments"), f"gen_args_{request}").get(name)


def _said(row: dict[str, Any]) -> str:
    responses = row.get("filtered_resps")
    if not isinstance(responses, list) or not responses:
        return ""
    if all(isinstance(choice, list | tuple) and len(choice) == 2 for choice in responses):
        weights = [_float(choice[0]) for choice in responses]
        best = max(range(len(responses)), key=lambda i: weights[i])
        choice = _argument(row, best, "arg_1")
        return choice.strip() if isinstance(choice, str) else ""
    first = responses[0][0] if isinstance(responses[0], list) and responses[0] else responses[0]
    return first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)


def _float(value: Any) -> float:
    try:
        number = number_of(float(value))
    except (TypeError, ValueError):
        number = None
    return number if number is not None else float("-inf")


def _read_totals(header: dict[str, Any]) -> tuple[ForeignTotal, ...]:
    tasks, counts = section(header, "results"), section(header, "n-samples")
    found = []
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
            found.append(ForeignTotal(metric=metric, value=number, stderr=stderr, n=n))
    return tuple(found)


def _subject(header: dict[str, Any]) -> str:
    return named(header, "model_name") or named(section(header, "config"), "model") or "model"


def _settings(header: dict[str, Any]) -> dict[str, Any]:
    config = section(header, "config")
    known = {name: config.get(name) for name in ("model", "limit", "random_seed", "numpy_seed")}
    known |= {"lm_eval": header.get("lm_eval_version"), "date": header.get("date")}
    return {name: value for name, value in known.items() if isinstance(value, str | int | float | bool)}


class LmEvalFiles(NamedTuple):
    """`folder` is the model's, as lm-eval makes one for each."""

    folder: str
    results_name: str
    samples_name: str
    results: dict[str, Any]
    samples: list[dict[str, Any]]


def write_lm_eval(export: SubjectExport) -> LmEvalFiles:
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
    export: SubjectExport,
    task: str,
    metrics: Mapping[str, Metric],
    *,
    folder: str,
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
