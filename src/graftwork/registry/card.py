"""The model card of a release, written from its records and from nothing else. Pure.

It names neither the release's own id nor its time: it is one of the files that the id is made of.
"""

import json
from collections.abc import Mapping

from graftwork.model.base import loadable_name, note_on_weights
from graftwork.records.report import Metric, Report
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict
from graftwork.registry.release import Lineage


def write_card(
    lineage: Lineage,
    *,
    project: str,
    base: str,
    parent: str | None,
    licence: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> str:
    """README.md in the form that the Hugging Face Hub shows as a model card."""
    sections = (
        _front_matter(base, licence),
        f"# {project}: a LoRA adapter on {base}",
        "Made by Graftwork. `manifest.json` names every file with its hash, and the data, plan, run, "
        "report and verdict behind them.",
        "## May it be served?",
        _verdict_lines(lineage.verdict),
        "## What was measured",
        _metric_table(lineage.report),
        "## How it was trained",
        _training_lines(lineage.outcome),
        "## What it was trained on",
        _data_lines(lineage),
        "## Where it comes from",
        f"- parent release: {parent or 'none'}\n- run: {lineage.outcome.run_id}\n"
        f"- model: {lineage.dataset.model}\n"
        f"- adapter hash: `{lineage.outcome.adapter_hash}`\n"
        f"- template: `{lineage.dataset.template_fingerprint}`\n"
        f"- tokenizer: `{lineage.dataset.tokenizer_fingerprint}`",
        "## How far the plan was off",
        _residual_lines(lineage.outcome),
        "## Licence and versions",
        _licence_lines(base, licence, versions or {}),
        "## How to load it",
        _usage(base),
    )
    return "\n\n".join(sections) + "\n"


def _front_matter(base: str, licence: str | None) -> str:
    # JSON strings are YAML strings: a colon in a model's name cannot break the header.
    stated = f"license: {json.dumps(licence)}\n" if licence else ""
    named = json.dumps(loadable_name(base))
    return f"---\nbase_model: {named}\nlibrary_name: peft\n{stated}tags:\n- lora\n- graftwork\n---"


def _verdict_lines(verdict: Verdict) -> str:
    lines = [f"**{verdict.decision.replace('_', ' ')}**: {verdict.reason}", ""]
    lines += [f"- {rule.outcome}: {rule.sentence}" for rule in verdict.rules]
    return "\n".join(lines)


def _metric_table(report: Report) -> str:
    lines = [
        f"{report.cases} held-out cases; base and adapter answered the same ones. "
        f"Look number {report.looks} at this test set.",
        "",
        f"| metric | {_cell(report.baseline.subject)} | {_cell(report.candidate.subject)} |",
        "|---|---|---|",
    ]
    for name, metric in report.candidate.metrics.items():
        before = report.baseline.metrics.get(name)
        lines.append(f"| {_cell(name)} | {_show(before)} | {_show(metric)} |")
    return "\n".join(lines)


def _show(metric: Metric | None) -> str:
    if metric is None or not metric.n:
        return "not measured"
    if metric.kind == "rate":
        return f"{metric.value:.1%} ({metric.low:.1%} to {metric.high:.1%}, n = {metric.n})"
    unit = f" {metric.unit}" if metric.unit else ""
    return f"{metric.value:.4g}{unit} ({metric.low:.4g} to {metric.high:.4g}, n = {metric.n})"


def _training_lines(outcome: TrainOutcome) -> str:
    lines = [
        f"- {outcome.trainable_parameters:,} trainable parameters, {outcome.steps} steps, "
        f"{outcome.epochs:g} epochs",
        f"- loss {outcome.first_loss:.4f} at the first step, {outcome.final_loss:.4f} at the last",
    ]
    if outcome.validation_loss_before is not None and outcome.validation_loss_after is not None:
        lines.append(
            f"- validation loss {outcome.validation_loss_before:.4f} before, "
            f"{outcome.validation_loss_after:.4f} after"
        )
    lines.append(
        f"- {outcome.seconds:.0f} s, {outcome.tokens_per_second:.0f} tokens/s, "
        f"peak memory {outcome.peak_memory_gib:.2f} GiB, {outcome.restarts} restarts"
    )
    lines.append(f"- base weights unchanged: sha256 `{outcome.base_hash_after}` before and after")
    return "\n".join(lines)


def _residual_lines(outcome: TrainOutcome) -> str:
    if not outcome.residuals:
        return "Not measured."
    rows = [
        f"| {_cell(one.name)} | {one.planned.value:.4g} ({one.planned.low:.4g} to {one.planned.high:.4g}) "
        f"| {one.actual:.4g} |"
        for one in outcome.residuals
    ]
    return "\n".join(("| figure | planned | came out |", "|---|---|---|", *rows))


def _licence_lines(base: str, licence: str | None, versions: Mapping[str, str]) -> str:
    lines = [f"- licence of the base {base}: {licence or 'its files do not state one; look it up'}"]
    lines += [f"- {name} {number}" for name, number in sorted(versions.items())]
    return "\n".join(lines)


def _data_lines(lineage: Lineage) -> str:
    dataset = lineage.dataset
    lines = [f"- content hash `{dataset.content_hash}`"]
    lines += [
        f"- {name}: {split.rows} rows, {split.trained_tokens:,} trained tokens"
        for name, split in dataset.splits.items()
    ]
    left_out, redacted = sum(dataset.dropped.values()), sum(dataset.redactions.values())
    lines.append(f"- {left_out} rows left out, {redacted} values redacted")
    lines += [f"- from {file.file}: {file.rows} rows, sha256 `{file.sha256}`" for file in dataset.inputs]
    return "\n".join(lines)


def _usage(base: str) -> str:
    # A name is written as a Python string, so that none can end the example early.
    note, where = note_on_weights(base), repr(base)
    said = ""
    if note:
        said = f"**The base is not the official one:** {note}.\n\n"
        where = '"path/to/base"  # written by `graft release export --base path/to/base`'
    name, _, comment = where.partition("  # ")
    return (
        f"{said}```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({name}){'  # ' + comment if comment else ''}\n"
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n'
        "```"
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
