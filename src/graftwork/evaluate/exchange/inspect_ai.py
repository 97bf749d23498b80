"""Logs of inspect-ai, read (`.json`, `.eval`) and written (version 2).

Marks are read as inspect-ai reads them: C is 1, P a half, I and N are 0; a scorer with several marks
becomes several metrics; epochs are repeats. Ids of a written log come from its content: the same evaluation
gives the same log.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.evaluate.exchange.common import (
    OWN_KEY,
    ForeignRun,
    ForeignSample,
    SubjectExport,
    graded_metrics,
    make_messages,
    named,
    not_as_expected,
    number_of,
    own_facts,
    parse,
    read_document,
    read_members,
    section,
    standard_error,
    text_of,
    whole_number,
)
from graftwork.records.base import fingerprint
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Case, Metric

TOOL = "inspect-ai"
MARKS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHED = "attachment://"


def read_inspect(path: Path) -> ForeignRun:
    header, samples = _read_archive(path) if path.suffix == ".eval" else _read_json(path)
    if not is_inspect(header):
        raise not_as_expected(
            "this is no log of inspect-ai", why="it has neither `eval` nor `status`", where=str(path)
        )
    spec = header["eval"]
    read = tuple(_read_sample(sample) for sample in samples if isinstance(sample, dict))
    return ForeignRun(
        tool=TOOL,
        subject=str(spec.get("model") or "model"),
        file=str(path),
        samples=read,
        settings=_settings(spec),
        notes=_notes(header, samples),
    )


def is_inspect(header: Any) -> bool:
    return isinstance(header, dict) and isinstance(header.get("eval"), dict) and "status" in header


def _read_json(path: Path) -> tuple[Any, list[Any]]:
    document = read_document(path)
    samples = document.get("samples") if isinstance(document, dict) else None
    return document, samples if isinstance(samples, list) else []


def _read_archive(path: Path) -> tuple[Any, list[Any]]:
    header: Any = None
    samples = []
    for name, content in read_members(path, wanted=("header.json", "_journal/start.json", "samples/")):
        value = parse(content, where=f"{path}:{name}")
        if name.startswith("samples/"):
            samples.append(value)
        elif name == "header.json":
            header = value
        elif header is None and isinstance(value, dict):
            # Without a header the run was cut off; its beginning still says who was asked.
            header = {"status": "started", **value}
    return header, samples


def _read_sample(sample: dict[str, Any]) -> ForeignSample:
    attached, output = section(sample, "attachments"), section(sample, "output")
    usage, metadata = section(output, "usage"), section(sample, "metadata")
    own = section(metadata, OWN_KEY)
    target = sample.get("target")
    target = target[0] if isinstance(target, list) and target else target
    return ForeignSample(
        id=str(sample.get("id")),
        messages=tuple(_attach(m, attached) for m in _asked(sample)),
        reference=_resolve(target if isinstance(target, str) else "", attached),
        text=_resolve(_said(output), attached),
        scores=_read_scores(sample.get("scores")),
        repeat=max(0, whole_number(sample.get("epoch")) - 1),
        tokens=whole_number(usage.get("output_tokens")),
        prompt_tokens=whole_number(usage.get("input_tokens")),
        seconds=max(0.0, number_of(output.get("time")) or number_of(sample.get("total_time")) or 0.0),
        truncated=_stop_reason(output) in ("max_tokens", "model_length"),
        group=named(own, "group") or named(metadata, "group") or named(metadata, "role"),
        domain=named(own, "domain") or named(metadata, "domain"),
        session=named(own, "session") or named(metadata, "session"),
        origin_file=named(own, "file") or "",
        origin_line=whole_number(own.get("line")),
    )


def _asked(sample: dict[str, Any]) -> tuple[Message, ...]:
    """The input, behind the system turns that the solver put before it."""
    given = sample.get("input")
    asked = make_messages(given) if isinstance(given, list) else ()
    if isinstance(given, str):
        asked = (Message(role="user", content=given),)
    if any(message.role == "system" for message in asked):
        return asked
    opening = []
    for message in make_messages(sample.get("messages")):
        if message.role != "system":
            break
        opening.append(message)
    return (*opening, *asked)


def _said(output: dict[str, Any]) -> str:
    if isinstance(output.get("completion"), str):
        return str(output["completion"])
    choice = _first_choice(output)
    return text_of(section(choice, "message").get("content"))


def _stop_reason(output: dict[str, Any]) -> Any:
    return _first_choice(output).get("stop_reason")


def _first_choice(output: dict[str, Any]) -> dict[str, Any]:
    choices = output.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _read_scores(scores: Any) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for scorer, score in scores.items() if isinstance(scores, dict) else ():
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            found |= {f"{scorer}/{key}": read_mark(mark) for key, mark in value.items()}
        elif not isinstance(value, list):
            found[str(scorer)] = read_mark(value)
    return found


def read_mark(value: Any) -> float | None:
    if not isinstance(value, str):
        return number_of(value)
    if value in MARKS or value.lower() in MARKS:
        return MARKS.get(value, MARKS.get(value.lower()))
    try:
        return number_of(float(value))
    except ValueError:
        return None


def _resolve(text: str, attached: dict[str, Any]) -> str:
    """The log stores long texts separately, by their hash."""
    found = attached.get(text.removeprefix(_ATTACHED)) if text.startswith(_ATTACHED) else None
    return found if isinstance(found, str) else text


def _attach(message: Message, attached: dict[str, Any]) -> Message:
    return Message(role=message.role, content=_resolve(message.content, attached))


def _settings(spec: dict[str, Any]) -> dict[str, Any]:
    known = {name: spec.get(name) for name in ("task", "task_version", "created", "model")}
    known |= {**section(spec, "packages"), **section(spec, "model_generate_config")}
    return {name: value for name, value in known.items() if isinstance(value, str | int | float | bool)}


def _notes(header: dict[str, Any], samples: list[Any]) -> tuple[str, ...]:
    notes = []
    if header.get("status") != "success":
        notes.append(f"The run ended as {header.get('status')}: only what was finished is here.")
    failed = sum(isinstance(sample, dict) and bool(sample.get("error")) for sample in samples)
    if failed:
        notes.append(f"{failed} of {len(samples)} samples ended with an error and have no marks.")
    if not samples:
        notes.append("The log holds no samples: there is nothing to show case by case.")
    return tuple(notes)


LOG_VERSION = 2


def write_inspect(export: SubjectExport) -> dict[str, Any]:
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


def _spec(export: SubjectExport, metrics: Mapping[str, Metric], model: str) -> dict[str, Any]:
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


def _sample(
    export: SubjectExport, case: Case, answer: Answer, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    model = f"{OWN_KEY}/{export.subject.subject}"
    assistant = {"role": "assistant", "content": answer.text, "source": "generate", "model": model}
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
        "messages": [*turns, assistant],
        "output": {
            "model": model,
            "choices": [
                {
                    "message": assistant,
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
