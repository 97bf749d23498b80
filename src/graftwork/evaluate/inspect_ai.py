"""Logs of inspect-ai, read (`.json`, `.eval`) and written (version 2).

Marks are read as inspect-ai reads them: C is 1, P a half, I and N are 0; a scorer with several marks
becomes several metrics; epochs are repeats. Ids of a written log come from its content: the same evaluation
gives the same log.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftwork.evaluate.foreign_runs import (
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
    read_members,
    section,
    standard_error,
    text_of,
    whole_number,
)
from graftwork.records.base import fingerprint
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Answer, Case, Metric

TOOL = "inspect-ai"
MARKS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHED = "attachment://"


def read_inspect(path: Path) -> ForeignRun:
    if path.suffix == ".eval":
        header, samples = _read_archive(path)
    else:
        header = read_document(path)
        listed = header.get("samples") if isinstance(header, dict) else None
        samples = listed if isinstance(listed, list) else []
    if not is_inspect(header):
        raise not_as_expected(
            "this is not a log of inspect-ai", why="it has neither `eval` nor `status`", where=str(path)
        )
    spec = header["eval"]
    settings = {name: spec.get(name) for name in ("task", "task_version", "created", "model")}
    settings |= {**section(spec, "packages"), **section(spec, "model_generate_config")}
    notes = []
    if header.get("status") != "success":
        notes.append(f"The run ended as {header.get('status')}: only what was finished is here.")
    failed = sum(isinstance(sample, dict) and bool(sample.get("error")) for sample in samples)
    if failed:
        notes.append(f"{failed} of {len(samples)} samples ended with an error and have no marks.")
    if not samples:
        notes.append("The log holds no samples: there is nothing to show case by case.")
    return ForeignRun(
        tool=TOOL,
        subject=str(spec.get("model") or "model"),
        file=str(path),
        samples=tuple(
            _read_sample(sample, Origin(file=str(path), line=number))
            for number, sample in enumerate(samples, 1)
            if isinstance(sample, dict)
        ),
        settings=plain_settings(settings),
        notes=tuple(notes),
    )


def is_inspect(header: Any) -> bool:
    return isinstance(header, dict) and isinstance(header.get("eval"), dict) and "status" in header


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


def _read_sample(sample: dict[str, Any], origin: Origin) -> ForeignSample:
    attached, output = section(sample, "attachments"), section(sample, "output")
    usage, metadata = section(output, "usage"), section(sample, "metadata")
    facts = section(metadata, OWN_KEY)

    def resolve(text: str) -> str:
        """The log stores long texts separately, by their hash."""
        stored = attached.get(text.removeprefix(_ATTACHED)) if text.startswith(_ATTACHED) else None
        return stored if isinstance(stored, str) else text

    target, choices = sample.get("target"), output.get("choices")
    target = target[0] if isinstance(target, list) and target else target
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    text = output.get("completion")
    if not isinstance(text, str):
        text = text_of(section(choice, "message").get("content"))
    name = str(sample.get("id"))
    scores: dict[str, float | None] = {}
    marks = sample.get("scores")
    for scorer, score in marks.items() if isinstance(marks, dict) else ():
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            scores |= {f"{scorer}/{key}": read_mark(mark) for key, mark in value.items()}
        elif not isinstance(value, list):
            scores[str(scorer)] = read_mark(value)
    return ForeignSample(
        case=Case(
            id=name,
            origin=origin_of(facts, origin),
            messages=tuple(Message(role=m.role, content=resolve(m.content)) for m in _asked(sample)),
            reference=resolve(target if isinstance(target, str) else ""),
            group=named(facts, "group") or named(metadata, "group") or named(metadata, "role"),
            domain=named(facts, "domain") or named(metadata, "domain"),
            session=named(facts, "session") or named(metadata, "session"),
        ),
        answer=Answer(
            case_id=name,
            text=resolve(text),
            tokens=whole_number(usage.get("output_tokens")),
            prompt_tokens=whole_number(usage.get("input_tokens")),
            finish_reason="length" if choice.get("stop_reason") in ("max_tokens", "model_length") else "stop",
            seconds=max(0.0, number_of(output.get("time")) or number_of(sample.get("total_time")) or 0.0),
            repeat=max(0, whole_number(sample.get("epoch")) - 1),
        ),
        scores=scores,
    )


def _asked(sample: dict[str, Any]) -> tuple[Message, ...]:
    """The input, after the system turns that the solver put before it."""
    prompt = sample.get("input")
    messages = make_messages(prompt) if isinstance(prompt, list) else ()
    if isinstance(prompt, str):
        messages = (Message(role="user", content=prompt),)
    if any(message.role == "system" for message in messages):
        return messages
    opening = []
    for message in make_messages(sample.get("messages")):
        if message.role != "system":
            break
        opening.append(message)
    return (*opening, *messages)


def read_mark(value: Any) -> float | None:
    if not isinstance(value, str):
        return number_of(value)
    if value in MARKS or value.lower() in MARKS:
        return MARKS.get(value, MARKS.get(value.lower()))
    try:
        return number_of(float(value))
    except ValueError:
        return None


LOG_VERSION = 2


def write_inspect(export: SubjectExport) -> dict[str, Any]:
    metrics = graded_metrics(export.subject)
    cases = {case.id: case for case in export.cases}
    samples = [
        _sample(export, cases[answer.case_id], answer, metrics)
        for answer in sorted(export.answers, key=lambda answer: answer.repeat)
        if answer.case_id in cases
    ]
    scores = []
    for name, metric in metrics.items():
        values = [value for value in metric.scores.values() if value is not None]
        scores.append(
            {
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
        )
    stats: dict[str, Any] = {"started_at": export.when, "completed_at": export.when, "model_usage": {}}
    return {
        "version": LOG_VERSION,
        "status": "success",
        "eval": _spec(export, metrics),
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": {}}], "config": {}},
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": scores,
        },
        "stats": stats,
        "samples": samples,
    }


def _spec(export: SubjectExport, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    identity = fingerprint([export.cases_hash, export.subject.subject, export.when])
    repeats = 1 + max((answer.repeat for answer in export.answers), default=0)
    config = export.subject.generation.settings
    renamed = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_new_tokens": "max_tokens"}
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
        "model": f"{OWN_KEY}/{export.subject.subject}",
        "model_generate_config": {
            theirs: config[ours]
            for ours, theirs in renamed.items()
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
