"""Publish an evaluated adapter: check it, write its model card, name it by its content, store and index it.

Publishing the same content again changes nothing. Does not decide whether the release goes live. The card is
one of the files that the release id is made of: it contains neither the id nor the time, and its wording is
part of the format.
"""

import json
import re
from pathlib import Path

from graftwork.model.base import loadable_name, note_on_weights
from graftwork.records.release import Release
from graftwork.records.report import Metric, Report
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import ReleaseIndex
from graftwork.registry.manifest import Lineage, ReleaseContext, describe_text, make_release
from graftwork.registry.peft import inspect_adapter
from graftwork.registry.store import ReleaseStore


def write_card(lineage: Lineage, context: ReleaseContext) -> str:
    """README.md in the form that the Hugging Face Hub shows as a model card."""
    base, licence = context.base, context.licence
    dataset, outcome, verdict = lineage.dataset, lineage.outcome, lineage.verdict
    dropped, redacted = sum(dataset.dropped.values()), sum(dataset.redactions.values())
    # JSON strings are YAML strings, so a colon in a model name cannot break the header.
    stated = f"license: {json.dumps(licence)}\n" if licence else ""
    base_name = json.dumps(loadable_name(base))
    residuals = [
        f"| {_cell(figure.name)} | {figure.planned.value:.4g} "
        f"({figure.planned.low:.4g} to {figure.planned.high:.4g}) | {figure.actual:.4g} |"
        for figure in outcome.residuals
    ]
    sections = (
        f"---\nbase_model: {base_name}\nlibrary_name: peft\n{stated}tags:\n- lora\n- graftwork\n---",
        f"# {context.project}: a LoRA adapter on {base}",
        "Made by Graftwork. `manifest.json` names every file with its hash, and the data, plan, run, "
        "report and verdict behind them.",
        "## May it be served?",
        f"**{verdict.decision.replace('_', ' ')}**: {verdict.reason}\n\n"
        + "\n".join(f"- {rule.outcome}: {rule.sentence}" for rule in verdict.rules),
        "## What was measured",
        _metric_table(lineage.report),
        "## How it was trained",
        _training_lines(outcome),
        "## What it was trained on",
        "\n".join(
            (
                f"- content hash `{dataset.content_hash}`",
                *(
                    f"- {name}: {split.rows} rows, {split.trained_tokens:,} trained tokens"
                    for name, split in dataset.splits.items()
                ),
                f"- {dropped} rows left out, {redacted} values redacted",
                *(f"- from {file.file}: {file.rows} rows, sha256 `{file.sha256}`" for file in dataset.inputs),
            )
        ),
        "## Where it comes from",
        f"- parent release: {context.parent or 'none'}\n- run: {outcome.run_id}\n"
        f"- model: {dataset.model}\n"
        f"- adapter hash: `{outcome.adapter_hash}`\n"
        f"- template: `{dataset.template_fingerprint}`\n"
        f"- tokenizer: `{dataset.tokenizer_fingerprint}`",
        "## How far the plan was off",
        "\n".join(("| figure | planned | came out |", "|---|---|---|", *residuals))
        if residuals
        else "Not measured.",
        "## License and versions",
        "\n".join(
            (
                f"- licence of the base {base}: {licence or 'its files do not state one; look it up'}",
                *(f"- {name} {number}" for name, number in sorted(context.versions.items())),
            )
        ),
        "## How to load it",
        _usage(base),
    )
    return "\n\n".join(sections) + "\n"


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


def _usage(base: str) -> str:
    # The name is written as a Python string, so that it cannot end the example early.
    note, where = note_on_weights(base), repr(base)
    warning = ""
    if note:
        warning = f"**The base is not the official one:** {note}.\n\n"
        where = '"path/to/base"  # written by `graft release export --base path/to/base`'
    name, _, comment = where.partition("  # ")
    return (
        f"{warning}```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({name}){'  # ' + comment if comment else ''}\n"
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n'
        "```"
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


TEMPLATE_FILE = "chat_template.jinja"
"""Where a base has no form for tool calls: its template with the form that was trained."""


def publish(
    store: ReleaseStore,
    index: ReleaseIndex,
    *,
    lineage: Lineage,
    context: ReleaseContext,
    adapter_folder: Path,
    version: str | None = None,
) -> Release:
    """Make the release in the store, then add it to the index, with `version` or the next one by rule."""
    adapter_files = inspect_adapter(adapter_folder, expected_hash=lineage.outcome.adapter_hash)
    texts = {
        "README.md": write_card(lineage, context),
        "dataset.json": lineage.dataset.to_json(),
        "outcome.json": lineage.outcome.to_json(),
        "plan.json": lineage.plan.to_json(),
        "report.json": lineage.report.to_json(),
        "verdict.json": lineage.verdict.to_json(),
    }
    if context.tool_template is not None:
        texts[TEMPLATE_FILE] = context.tool_template
    release = make_release(
        lineage,
        context,
        files=(*adapter_files, *(describe_text(name, text) for name, text in texts.items())),
    )
    sources: dict[str, Path | bytes] = {file.path: adapter_folder / file.path for file in adapter_files}
    sources |= {name: text.encode() for name, text in texts.items()}
    # The lock covers both, so that garbage collection never sees the new folder without its index entry.
    with store.shared_lock():
        stored = store.put(release, sources=sources)
        index.add(stored, version=version)
    return stored


_CARDS = ("README.md", "MODEL_CARD.md")
_TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
_KNOWN = (
    ("apache license", "apache-2.0"),
    ("mit license", "mit"),
    ("gnu affero general public license", "agpl-3.0"),
    ("gnu lesser general public license", "lgpl-3.0"),
    ("gnu general public license", "gpl-3.0"),
    ("mozilla public license", "mpl-2.0"),
)
_MAX_NAME = 80
_MAX_READ = 65536


def find_licence(folder: Path) -> str | None:
    """The license of a base model as its card, its config or a license file states it.

    None if no file states one: it is never guessed from the name of the model.
    """
    licence = next(filter(None, (_in_card(folder / name) for name in _CARDS)), None)
    licence = licence or _in_config(folder / "config.json")
    licence = licence or next(filter(None, (_in_text(folder / name) for name in _TEXTS)), None)
    return licence[:_MAX_NAME] if licence else None


def _in_card(path: Path) -> str:
    head = re.match(r"---\n(.*?)\n---", _read(path), re.DOTALL)
    stated = dict(
        re.findall(r"^(license(?:_name)?):[ \t]*(\S[^\n]*)$", head[1] if head else "", re.MULTILINE)
    )
    licence = _plain(stated.get("license", ""))
    if licence == "other":
        # The next key has the name.
        return _plain(stated.get("license_name", "")) or licence
    return licence


def _in_config(path: Path) -> str:
    try:
        config = json.loads(_read(path) or "{}")
    except ValueError:
        return ""
    stated = config.get("license") if isinstance(config, dict) else None
    return _plain(stated) if isinstance(stated, str) else ""


def _in_text(path: Path) -> str:
    text = _read(path)
    beginning = " ".join(text[:2000].lower().split())
    licences = (licence for phrase, licence in _KNOWN if phrase in beginning)
    return next(licences, None) or next((line.strip() for line in text.splitlines() if line.strip()), "")


def _plain(value: str) -> str:
    return value.strip().strip("\"'").strip()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            return handle.read(_MAX_READ).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""
