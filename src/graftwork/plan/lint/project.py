"""Check a configuration file: read it, find the model and the GPU, apply all rules.

Input: a path and what the command line adds. Output: findings, the most severe first, in the order of the
file. Reads files; the rules themselves are pure and are in `rules_*.py`.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.files.config_text import MOST_BYTES, read_config_text
from graftwork.model.shape import adapter_parameters, linear_names, total_parameters
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import CatalogModel, find_model
from graftwork.plan.lint import rules_device, rules_learning, rules_training
from graftwork.plan.lint.configuration import (
    ConfigLocation,
    Configuration,
    LintContext,
    LintFinding,
    LintRule,
    WrittenConfig,
    detect,
    read_foreign,
    read_graft,
    read_written,
)
from graftwork.plan.lint.rules_device import least_minutes, peaks_of
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError
from graftwork.records.plan import ModelShape

RULES: tuple[LintRule, ...] = tuple(
    rule
    for module in (rules_training, rules_device, rules_learning)
    for rule in vars(module).values()
    if isinstance(rule, LintRule)
)
GRAVITY = {"error": 0, "warning": 1, "note": 2}


def lint(config: Configuration, context: LintContext) -> tuple[LintFinding, ...]:
    findings = []
    for rule in RULES:
        for hit in rule.check(config, context):
            fields = tuple(field.removeprefix("=") for field in hit.fields)
            direct = hit.fields[0].startswith("=")
            findings.append(
                LintFinding(
                    rule=rule.id,
                    severity=rule.severity,
                    what=hit.what,
                    why=hit.why,
                    fix=hit.fix,
                    where=config.where(*fields),
                    key=fields[0] if direct else config.key(*fields),
                    source=rule.source,
                )
            )
    return most_severe_first(findings)


def most_severe_first(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    def order(finding: LintFinding) -> tuple[int, int]:
        line = finding.where.rsplit(":", 1)[-1]
        return GRAVITY[finding.severity], int(line) if line.isdigit() else 0

    return tuple(sorted(findings, key=order))


TOO_LONG = re.compile(r"(\d+) tokens, (?:more than|data\.)\s?max_tokens")
"""Message of the preparation about rows that were left out for their length."""
_MOST_BYTES_OF_LENGTHS = 256 << 20
CPU_NAMES = ("cpu", "none", "processor")


class LintOptions(NamedTuple):
    """What the command line adds to the file; it overrides the file."""

    rows: int | None = None
    gpu: str | None = None
    gpus: int | None = None
    ram_gib: float | None = None
    model: str | None = None
    data_model: str | None = None
    deployed_model: str | None = None
    lengths: str | None = None
    catalog: Path | None = None
    """A folder of the user's own facts."""


OPTIONS = {
    "rows": ("rows", "--rows"),
    "gpu": ("gpu", "--gpu"),
    "gpus": ("gpus", "--gpus"),
    "ram_gib": ("ram_gib", "--ram"),
    "model": ("model", "--model"),
    "data_model": ("data_model", "--data-model"),
    "deployed_model": ("deployed_model", "--deployed-model"),
}


class Linted(Record):
    """What was checked, and the findings."""

    file: str
    kind: str
    model: str | None
    gpu: str | None
    findings: tuple[LintFinding, ...]
    unknown: tuple[str, ...] = ()
    """What could not be checked for lack of a fact, and the option that provides it."""

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)


def lint_file(path: Path, options: LintOptions) -> Linted:
    source = read_written(_read(path), file=str(path))
    lengths = read_lengths(options.lengths)
    if detect(source) == "graft":
        looks = [
            _look(path, config, lengths or own_lengths, options)
            for config, own_lengths in _read_project(path, source)
        ]
    else:
        looks = [_look(path, read_foreign(source), lengths, options)]
    # Models of a project share most of their settings: a problem of several is reported once.
    findings = {
        (finding.rule, finding.where, finding.what): finding for look in looks for finding in look.findings
    }
    unknown = dict.fromkeys(gap for look in looks for gap in look.unknown)
    return looks[0].model_copy(
        update={"findings": most_severe_first(findings.values()), "unknown": tuple(unknown)}
    )


def _look(path: Path, config: Configuration, lengths: tuple[int, ...], options: LintOptions) -> Linted:
    config = _add(config, options)
    model = _find_model(config.model, near=path.parent, overlay=options.catalog)
    config = _by_full_names(config, overlay=options.catalog)
    gpu = find_gpu(config.gpu, overlay=options.catalog) if config.gpu is not None else None
    if config.deadline_minutes is not None and config.expected_minutes is None and model and gpu:
        expected = least_minutes(config, model, gpu, lengths)
        config = config.model_copy(update={"expected_minutes": expected})
    context = LintContext(gpu=gpu, on_cpu=config.on_cpu and gpu is None, lengths=lengths)
    if model is not None:
        context = context.model_copy(
            update={
                "shape": model.shape,
                "parameters": total_parameters(model.shape),
                "trainable": _trainable(config, model.shape),
                "peaks": peaks_of(config, model, lengths) if gpu is not None else None,
            }
        )
    return Linted(
        file=str(path),
        kind=config.kind,
        model=config.model,
        gpu=gpu.name if gpu else ("CPU" if context.on_cpu else None),
        findings=lint(config, context),
        unknown=tuple(_unknown(config, context)),
    )


def read_lengths(stated: str | None) -> tuple[int, ...]:
    """Tokens of rows: one number, or a file with one per line, plain or as JSON with `tokens` or `length`."""
    if stated is None:
        return ()
    if stated.isdigit():
        return (_length(int(stated)),)
    path = Path(stated)
    text = _read(path, most_bytes=_MOST_BYTES_OF_LENGTHS)
    try:
        entries: Iterable[Any] = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else (json.loads(line) for line in text.splitlines() if line.strip())
        )
        lengths = tuple(_length(entry) for entry in entries)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path.name} does not hold lengths",
            why=f"expected one number per line, or JSON with `tokens` or `length`: {error}",
            fix="`graft data prepare` counts the tokens of a project's rows; or write one number per line",
            where=str(path),
        ) from error
    return lengths


def _length(entry: Any) -> int:
    if isinstance(entry, dict):
        value = entry["tokens"] if "tokens" in entry else entry["length"]
        entry = len(value) if isinstance(value, list) else value
    if int(entry) < 1:
        raise UserError(f"a row cannot have {entry} tokens", fix="leave it out", where="--lengths")
    return int(entry)


def _read_project(path: Path, source: WrittenConfig) -> Iterator[tuple[Configuration, tuple[int, ...]]]:
    """Read each model of the project as resolved, and the lengths of its rows if they are prepared. These are
    the rows of its newest dataset, including those that were left out for their length.
    """
    from graftwork.files.dataset import MANIFEST, iterate_drops, iterate_rows, read_manifest
    from graftwork.project.folder import ProjectFolder
    from graftwork.project.load import load_settings

    whole = load_settings(path)
    project = ProjectFolder(root=path.parent.absolute(), settings=whole)
    folders: dict[str, Path] = {}
    manifests = project.datasets.glob(f"*/{MANIFEST}") if project.datasets.is_dir() else ()
    for manifest in sorted(manifests, key=lambda manifest: (manifest.stat().st_mtime, manifest)):
        with suppress(GraftError):
            folders[read_manifest(manifest.parent).model] = manifest.parent
    for name in whole.all_models:
        settings = whole.of_model(name)
        config = read_graft(settings.model_dump(mode="json"), source, model=name)
        folder = folders.get(name)
        if folder is None:
            yield config, ()
            continue
        trained = [len(row.tokens) for row in iterate_rows(folder, "train")]
        left_out = (TOO_LONG.search(drop.reason) for drop in iterate_drops(folder))
        rows = {
            "rows": min(len(trained), settings.train.max_rows or len(trained)),
            "test_rows": sum(1 for _ in iterate_rows(folder, "test")),
        }
        lengths = (*trained, *(int(match.group(1)) for match in left_out if match))
        yield config.model_copy(update=rows), lengths


def _add(config: Configuration, options: LintOptions) -> Configuration:
    values: dict[str, Any] = {}
    locations = dict(config.places)
    for name, (field, option) in OPTIONS.items():
        value = getattr(options, name)
        if value is not None:
            values[field] = value
            locations[field] = ConfigLocation(key=option)
    gpu = values.get("gpu", config.gpu)
    if gpu is not None and gpu.lower() in CPU_NAMES:
        values["gpu"], values["on_cpu"] = None, True
    elif "gpu" in values:
        values["on_cpu"] = False
    return config.model_copy(update={**values, "places": locations})


def _find_model(name: str | None, *, near: Path, overlay: Path | None) -> CatalogModel | None:
    """None if no catalog has it: rules that need its size are skipped, and the result notes that."""
    if name is None:
        return None
    folder = near / name
    try:
        return find_model(str(folder) if (folder / "config.json").is_file() else name, overlay=overlay)
    except UserError:
        return None


def _by_full_names(config: Configuration, *, overlay: Path | None) -> Configuration:
    """Models by the names of the Hub, where the catalog calls them otherwise. Its aliases do not
    count: a base and its instruct version share a shape, not their weights."""
    full: dict[str, str] = {}
    for field in ("model", "data_model", "deployed_model"):
        name = getattr(config, field)
        model = _find_model(name, near=Path(), overlay=overlay)
        if model is not None and name.lower() == model.name.lower():
            full[field] = model.hf_id
    return config.model_copy(update=full)


def _trainable(config: Configuration, shape: ModelShape) -> int | None:
    if config.rank is None or config.method in (None, "full"):
        return None
    names = linear_names(shape)
    targets = config.targets or names
    if targets in (("all-linear",), ("all",)):
        targets = names
    if not set(targets) <= set(names):
        return None
    return adapter_parameters(
        shape, rank=config.rank, targets=targets, layers=shape.layers, method=config.method
    )


def _unknown(config: Configuration, context: LintContext) -> Iterable[str]:
    if config.rows is None and config.max_steps is None:
        yield "how many rows there are, and so how many steps: --rows N"
    if context.parameters is None:
        name = f" ({config.model} is in no catalog)" if config.model else ""
        yield f"how large the model is{name}: --model NAME or a config.json"
    if context.gpu is None and not context.on_cpu:
        yield "what it runs on: --gpu NAME, or --gpu cpu"
    if not context.lengths:
        yield "how long the rows are: --lengths FILE"


def _read(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    if not path.exists():
        raise UserError(
            f"there is no file {path.name}",
            fix="specify a configuration, or a file of lengths",
            where=str(path),
        )
    return read_config_text(path, most_bytes=most_bytes)
