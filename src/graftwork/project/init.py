"""The graft.yaml that a new project starts from: what was found in its log, each setting with its reason.

Input: logs, or nothing where there is no log yet; a base, or the machine that one is chosen for. Output: YAML
with comments, the own fields of the log with what they are taken for, and the bases that were weighed.
"""

import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from graftwork.data.audit.row_checks import find_fault, is_dropped
from graftwork.data.ingest.fields import TIME_FIELDS, read_day, say_status
from graftwork.data.ingest.files import STANDARD_INPUT
from graftwork.data.ingest.read import Sample, sample_rows
from graftwork.data.settings import DataSettings
from graftwork.files.disk import write_atomic
from graftwork.model.base import EMBEDDED, find_base, is_ready
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.probe import probe_device
from graftwork.model.shape import read_config_shape
from graftwork.plan.bases import (
    DEFAULT_MINUTES,
    BaseNeed,
    BaseProposal,
    choose_base,
    refuse_unless_it_fits,
    weigh_bases,
)
from graftwork.plan.catalog.bases import TaskNeed, find_base_row, list_bases, model_of, name_in_settings
from graftwork.plan.catalog.models import CatalogModel, find_model
from graftwork.plan.fit.project import named_machine
from graftwork.project.load import PROJECT_FILE, load_settings
from graftwork.project.propose import (
    CHARACTERS_PER_TOKEN,
    KINDS,
    USUAL_CONTEXT,
    Kind,
    Proposal,
    measure_size,
    propose,
)
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.hardware import Machine
from graftwork.records.interaction import Interaction
from graftwork.records.plan import DeviceFacts
from graftwork.text.language import guess_language
from graftwork.text.wording import take_figure, take_score
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.data.prepare import CleanLog

Meaning = Literal["status", "session", "time", "score", "user", "cost", "nothing"]
_NAMES: dict[Meaning, str] = {
    "status": r"outcome|result|state|status(?:_code)?|resolution|success|ok",
    "session": r"(?:conversation|session|thread|chat|dialog(?:ue)?|ticket|call)(?:_?id)?",
    "score": r"(?:user_?)?(?:stars?|rating|score|csat|nps|thumbs?|feedback|satisfaction)(?:_?score)?",
    "user": r"(?:end_?)?(?:user|customer|client|account)(?:_?id|_?name)?",
    "cost": r".*(?:cost|price)(?:_?usd)?",
}
_TYPED: dict[str, Meaning] = {"status": "status", "session": "session", "reward": "score"}
MAPPED: dict[Meaning, str] = {"status": "status", "session": "session", "score": "reward"}
_WITH_PATHS = {"chat", "sharegpt", "preference", "alpaca", "completion", "openai_log"}
FAILED_STATUSES = ("failed", "failure", "error", "timeout", "cancelled")
MOST_SHOWN = 5
FEW_STATUSES = 12
FEW_IDS = 10


class OwnField(Record):
    """A field of the rows, and its interpretation."""

    name: str
    taken_for: Meaning
    rows: int
    values: tuple[str, ...]
    """The most frequent values, if there are only a few."""
    mapped: bool = False
    """Whether `data.mapping` names it."""
    note: str = ""


def find_own_fields(rows: Sequence[Interaction], *, formats: Iterable[str]) -> tuple[OwnField, ...]:
    """The fields besides the texts, in the order of the log. Other formats have no paths of their own."""
    can_map = set(formats) <= _WITH_PATHS
    values: dict[str, list[Any]] = {}
    typed = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in _TYPED}
    for row in rows:
        for name, value in row.extra.items():
            values.setdefault(name, []).append(value)
    fields = [
        _describe(name, _TYPED[name], field_values, note="recognized by its key")
        for name, field_values in typed.items()
        if field_values
    ]
    meanings = {field.taken_for for field in fields}
    known_statuses = {*DataSettings().keep_status, "success", *FAILED_STATUSES}
    for name, field_values in values.items():
        meaning = _guess(name, field_values)
        mapped = can_map and meaning in MAPPED and meaning not in meanings
        note = ""
        if (
            meaning == "score"
            and mapped
            and 2 * sum((take_score(v) or 0) <= 0 for v in field_values) > len(field_values)
        ):
            mapped, note = (
                False,
                "not mapped: most are 0 or less, so a 0 may mean that nobody rated the reply",
            )
        if meaning == "status" and mapped:
            # Neither a success nor a failure by their words: their rows would be dropped.
            statuses = {say_status(value) or "" for value in field_values}
            if unknown := sorted(word for word in statuses if word.casefold() not in known_statuses):
                listed = ", ".join(unknown[:MOST_SHOWN])
                mapped, note = False, f"not mapped: data.keep_status would have to name {listed}"
        if meaning == "time" and name not in TIME_FIELDS:
            note = "not read: the log's time is read from `timestamp` or `created_at`"
        if meaning == "nothing" and _names_several_rows(name, field_values):
            note = "names several rows: data.split_by keeps them together"
        if mapped:
            meanings.add(meaning)
        fields.append(_describe(name, meaning, field_values, mapped=mapped, note=note))
    return tuple(fields)


def _guess(name: str, values: Sequence[Any]) -> Meaning:
    last = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).casefold()
    named_meaning = next(
        (meaning for meaning, pattern in _NAMES.items() if re.fullmatch(pattern, last)), None
    )
    if name in TIME_FIELDS or (
        named_meaning is None
        and all(isinstance(value, str) and read_day(value) is not None for value in values)
    ):
        return "time"
    if last in ("at", "when", "time", "datetime", "epoch") and all(
        read_day(value) is not None for value in values
    ):
        return "time"
    if named_meaning == "score" and any(take_score(value) is None for value in values):
        return "nothing"
    if named_meaning == "cost" and any(take_figure(value) is None for value in values):
        return "nothing"
    if named_meaning == "status" and len(set(map(str, values))) > FEW_STATUSES:
        return "nothing"
    return named_meaning or "nothing"


def _names_several_rows(name: str, values: Sequence[Any]) -> bool:
    """Return whether an id occurs in several rows and not in most: such rows must not be split."""
    distinct = len(set(map(str, values)))
    is_id = re.fullmatch(r"(?:.*[._])?(?:id|uuid|ref|key)|.*[a-z](?:Id|Ref|Key)", name)
    return is_id is not None and distinct >= FEW_IDS and 1.2 * distinct <= len(values) <= 50 * distinct


def _describe(
    name: str, meaning: Meaning, values: Sequence[Any], *, mapped: bool = False, note: str = ""
) -> OwnField:
    counted = Counter(str(value) for value in values)
    few = len(counted) <= FEW_STATUSES and meaning != "session"
    frequent = tuple(value[:40] for value, _ in counted.most_common(MOST_SHOWN)) if few else ()
    return OwnField(name=name, taken_for=meaning, rows=len(values), values=frequent, mapped=mapped, note=note)


def data_settings(rows: Sequence[Interaction], fields: Sequence[OwnField]) -> dict[str, Any]:
    """The settings under `data:` for this interpretation of the fields."""
    mapping = {MAPPED[field.taken_for]: field.name for field in fields if field.mapped}
    worst = find_scale(rows, fields)
    return {
        **({"mapping": mapping} if mapping else {}),
        **({"rated_bad_below": worst} if worst is not None else {}),
    }


def find_scale(rows: Sequence[Interaction], fields: Sequence[OwnField]) -> float | None:
    """The middle of a scale from 1, such as 1 to 5: a score below it is rated bad. None for another score."""
    score = next((field for field in fields if field.mapped and field.taken_for == "score"), None)
    if score is None:
        return None
    scores = {take_score(row.extra[score.name]) for row in rows if score.name in row.extra}
    whole = sorted(value for value in scores if value is not None and value.is_integer())
    if len(whole) < len(scores) or len(whole) < 3 or whole[0] < 1 or whole[-1] not in (5, 7, 10):
        return None
    return (1 + whole[-1]) / 2


HEAD = """\
# yaml-language-server: $schema=graft.schema.json
# `graft schema > graft.schema.json` lets your editor complete and check this file.
"""
STARTER = (
    HEAD
    + """\
# `graft init LOG` reads your log and proposes metrics and rules that fit it; this file is without them.
project: {name}
base: smollm2-135m-instruct     # the embedded model; or the path of a model folder

data:
  logs: [{logs}]
  # system_prompt: |            # in place of the logged one
  #   You answer in JSON …
  test: 0.2                     # share of the question groups that is held out
  validation: 0.1

train:
  rank: 8
  alpha: 16
  epochs: 2
  learning_rate: 5.0e-4
  # upper_layers: 15            # adapt only the upper layers: faster on a CPU

evaluate:
  max_new_tokens: 96

gate:                           # a rate counts by the lower bound of its interval
  rules:
    - {{metric: json_valid, over: 0.95}}
  primary: answer_match         # and here it must beat the base

serve:
"""
)
PORT = "  port: 8080\n"
COMMENT_AT = 44
VALIDATION = 0.06
FEW_ROWS, MANY_ROWS = 400, 800
MOST_VISITED = 1200
"""Rows that a CPU trains on in some tens of minutes."""


def write_proposal(
    proposal: Proposal,
    *,
    name: str,
    logs: Sequence[str],
    device: DeviceFacts,
    base: str,
    bases: BaseProposal | None = None,
    own_settings: dict[str, Any],
) -> str:
    """The settings that fit the log, with the reason for each; what is under `serve` comes after them."""
    option = bases.option if bases is not None else None
    why_base = bases.why.partition(";")[0] if bases is not None else ""
    lines = [
        f"# {KINDS[proposal.kind]}: {proposal.kind_why}.",
        f"project: {_flow(name)}",
        _line(f"base: {_flow(base)}", why_base or "embedded, a folder, or a name on the Hugging Face Hub"),
        "",
        *_data(proposal, logs, own_settings),
        "",
        *_train(proposal, device, parameters=option.parameters if option is not None else 0),
        "",
        *_evaluate(proposal),
        "",
        *_gate(proposal),
        "",
        "serve:",
    ]
    return HEAD + "\n".join(lines) + "\n"


def _data(proposal: Proposal, logs: Sequence[str], own_settings: dict[str, Any]) -> list[str]:
    size = proposal.size
    longest = _round_up(size.longest + (8 if size.counted else size.longest // 2), 32)
    longest = min(longest, size.context)
    counted = "counted" if size.counted else "estimated"
    lengths = f"the longest row has {size.longest} tokens ({counted})"
    if size.too_long:
        lengths = f"{size.too_long} of the rows are longer than the {size.context} tokens that the base reads"
    lines = [
        "data:",
        f"  logs: {_flow(list(logs))}",
        f"  # format: {', '.join(proposal.formats)}, recognized row by row; data.formats sets it for a file",
    ]
    if "mapping" in own_settings:
        lines.append(_line(f"  mapping: {_flow(own_settings['mapping'])}", "own fields of the rows"))
    if "rated_bad_below" in own_settings:
        scale = f"  rated_bad_below: {own_settings['rated_bad_below']:g}"
        lines.append(_line(scale, "a scale from 1: lower rows are dropped"))
    lines += [
        _line(f"  test: {proposal.test:g}", f"about {proposal.test_cases} cases: {proposal.test_why}"),
        _line(f"  validation: {VALIDATION:g}", "to notice overfitting"),
        _line(f"  max_tokens: {longest}", lengths),
    ]
    if proposal.drop_reasoning:
        why = "the base's template takes these replies only without reasoning"
        lines.append(_line("  reasoning: drop", why))
    return lines


class PlannedRun(Record):
    """How much is trained: what the minutes of a run follow from."""

    rows: int
    epochs: int
    batch_size: int
    rank: int = 16
    upper_layers: int | None = None
    max_rows: int | None = None


def plan_training(rows: int, *, on_cpu: bool) -> PlannedRun:
    """A run over this many rows. A CPU adapts half of the layers and visits fewer rows."""
    if not on_cpu:
        return PlannedRun(rows=rows, epochs=3, batch_size=16)
    epochs = 3 if rows <= FEW_ROWS else 2 if rows <= MANY_ROWS else 1
    most = MOST_VISITED if rows > MOST_VISITED else None
    return PlannedRun(rows=rows, epochs=epochs, batch_size=8, upper_layers=15, max_rows=most)


LEARNING_RATES = (
    (3e9, "2.0e-4", "for a base of billions of weights"),
    (1e9, "5.0e-4", "for a base of this size"),
)
"""From how many parameters on which rate; smaller bases take 1e-3."""


def _train(proposal: Proposal, device: DeviceFacts, *, parameters: float) -> list[str]:
    rows = round(proposal.rows * (1 - proposal.test - VALIDATION))
    planned = plan_training(rows, on_cpu=device.kind == "cpu")
    if device.kind != "cpu":
        rate, why = next(
            ((rate, why) for least, rate, why in LEARNING_RATES if parameters >= least),
            ("1.0e-3", "for a small base; 2e-4 for one of 7B"),
        )
        return [
            "train:",
            _line(f"  rank: {planned.rank}", f"{device.name}: all layers are adapted"),
            "  alpha: 32",
            _line(f"  epochs: {planned.epochs}", f"about {rows} rows to train on"),
            f"  batch_size: {planned.batch_size}",
            _line(f"  learning_rate: {rate}", why),
        ]
    lines = [
        "train:",
        _line(f"  rank: {planned.rank}", "small enough for a few hundred rows"),
        "  alpha: 32",
        _line(
            f"  upper_layers: {planned.upper_layers}",
            f"no GPU here ({device.threads} threads): half the backward pass",
        ),
        _line(f"  epochs: {planned.epochs}", f"about {rows} rows to train on"),
        f"  batch_size: {planned.batch_size}",
        _line("  learning_rate: 2.0e-3", "for a small base with few steps"),
    ]
    if planned.max_rows is not None:
        why = "for minutes instead of hours on a CPU; more rows give better answers"
        lines.append(_line(f"  max_rows: {planned.max_rows}", why))
    return lines


def _evaluate(proposal: Proposal) -> list[str]:
    size = proposal.size
    tokens = min(_round_up(round(1.25 * size.longest_reply) + 4, 8), size.context)
    lines = [
        "evaluate:",
        _line(f"  max_new_tokens: {tokens}", f"the longest reply has {size.longest_reply} tokens"),
    ]
    if proposal.answer_fields:
        lines.append("  fields:")
        lines += [f"    {key}: {_flow(value)}" for key, value in proposal.answer_fields.items()]
    lines.append(
        _line(f"  metrics: {_flow(list(proposal.metrics))}", "more: `graft schema`, evaluate.metrics")
    )
    reasons = {field.path: field.why for field in proposal.fields}
    if proposal.checks:
        lines.append("  checks:")
        lines += [
            _line(f"    - {_flow(check)}", reasons.get(str(check.get("field")), proposal.primary_why))
            for check in proposal.checks
        ]
    return lines


def _gate(proposal: Proposal) -> list[str]:
    lines = [
        "gate:",
        _line(f"  primary: {proposal.primary}", f"must beat the base: {proposal.primary_why}"),
        _line("  rules:", "the lower bound of each interval counts"),
    ]
    for rule in proposal.rules:
        lines.append(_line(f"    - {_flow({'metric': rule.metric, 'over': rule.over})}", rule.why))
    if not proposal.rules:
        lines.append(_line("    - {metric: truncated, under: 0.5}", "too few cases for more"))
    lines += [f"  # no rule on {omitted}" for omitted in proposal.left_out]
    if proposal.kind in ("text", "code"):
        lines.append(
            "  # Similarity is not correctness: add a judge (evaluate.judge), tests, or a metric of your own."
        )
    return lines


def _line(setting: str, why: str) -> str:
    """The setting with its reason on the same line if it fits, else above."""
    indent = " " * (len(setting) - len(setting.lstrip()))
    if len(setting) >= COMMENT_AT + 16:
        return f"{indent}# {why}\n{setting}"
    return f"{setting:<{COMMENT_AT - 1}} # {why}"


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=100_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


USUAL_LOGS = "logs/*.jsonl"
MOST_TRIED = 50
"""Rows that the base's template is tried on."""
FEWEST_ROWS = 20
"""Fewer rows are too few to describe a log."""


class Started(Record):
    """`proposal` is None if no log was named."""

    file: str
    proposal: Proposal | None = None
    fields: tuple[OwnField, ...] = ()
    """The log's own fields, and their interpretation."""
    rows_read: int = 0
    """The rows of the log, or of the sample of a large one."""
    drops_rated: bool = False
    """Whether rows that the log rates low are left out of the usable ones."""
    rows_usable: int = 0
    """Rows without faults and repeats, as in the audit. `proposal.rows` are those that the split keeps."""
    estimated: str | None = None
    """Why `graft data prepare` may keep other rows than the usable ones; None if it keeps the same."""
    base: str = EMBEDDED
    bases: BaseProposal | None = None
    """The bases of the catalog on this machine, and the reason for this one."""


def make_starter(folder: Path) -> str:
    """The graft.yaml of a project without a log, up to `serve:`."""
    return STARTER.format(name=_flow(name_project(folder)), logs=_flow(USUAL_LOGS))


def name_project(folder: Path) -> str:
    """The name of a project from that of its folder."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("-._") or "project"


class BaseChoice(Record):
    """What the user says about the base: its name, or the limits of one that is proposed."""

    base: str | None = None
    """Embedded, a folder, or a name of the catalog or the Hub; None: one is proposed."""
    gpu: str | None = None
    """The GPU that will train it, if it is not one of this machine."""
    license: str | None = None
    minutes: float = DEFAULT_MINUTES


def start_project(
    folder: Path,
    logs: Sequence[str],
    *,
    base: str | None = None,
    choice: BaseChoice | None = None,
    write: bool = True,
) -> Started:
    """Write graft.yaml into the folder; with `write=False`, only say what it would be. An existing one is
    never overwritten, except a starter that was written without a log: what is under `serve` stays.
    """
    path = folder / PROJECT_FILE
    name = name_project(folder)
    if not logs and any(folder.glob(USUAL_LOGS)):
        logs = [str(folder / USUAL_LOGS)]
    starter = make_starter(folder)
    present = path.read_bytes() if path.exists() else (starter + PORT).encode()
    serve = present.removeprefix(starter.encode())
    if path.exists() and not (logs and present.startswith(starter.encode())):
        raise UserError(
            f"there is a {PROJECT_FILE} already",
            why="an existing file is never overwritten",
            fix="edit it, or use another folder with -C",
            where=str(path),
        )
    choice = choice or BaseChoice(base=base)
    _check_license(choice)
    # A name that means no model is refused before it is in graft.yaml.
    named = None
    if choice.base is not None:
        named = find_named_base(choice.base, folder, otherwise="leave --base out: one is proposed")
    machine = named_machine(gpu=choice.gpu)
    if not logs:
        _write_settings(path, present, write=write)
        return Started(file=str(path))
    from graftwork.data.prepare import CleanLog
    from graftwork.data.render.rows import needs_reasoning_dropped

    rows, sample = _read(logs, DataSettings())
    fields = find_own_fields(rows, formats=(name for name in sample.formats if name))
    own_settings = data_settings(rows, fields)
    settings = DataSettings.model_validate({"logs": tuple(logs), **own_settings})
    if own_settings:
        rows, sample = _read(logs, settings)
    with tempfile.TemporaryDirectory(prefix="graft-init-") as scratch:
        # As `graft data prepare` reads it, unless the log is too large, or can be read only once.
        at_once = sample.whole and sample.rows and STANDARD_INPUT not in settings.logs
        clean = CleanLog(settings, folder=Path(scratch)) if at_once else None
        rows = rows if clean is None else _leave_out_repeats(clean, len(rows), logs)
        proposal = propose(rows, formats=sample.formats, size=measure_size(rows, count=None))
        need = _need_of(rows, proposal, machine, choice)
        base, bases = _settle_base(named, need, machine, folder)
        at_hand = _open_base(base, folder)
        template, context = at_hand or (None, USUAL_CONTEXT)
        drop = False
        if template is not None:
            short = (row for row in rows if sum(len(turn.content) for turn in row.messages) <= context)
            drop = needs_reasoning_dropped(list(islice(short, MOST_TRIED)), template)
            template = template.without_reasoning() if drop else template
        size = measure_size(rows, count=None if template is None else _counter(template), context=context)
        proposal = proposal.model_copy(update={"size": size, "drop_reasoning": drop})
        if clean is not None:
            split = settings.model_copy(update={"test": proposal.test, "validation": VALIDATION})
            proposal = proposal.model_copy(update={"rows": clean.count_kept(split)})
    text = write_proposal(
        proposal,
        name=name,
        logs=[_as_seen_from(folder, log) for log in logs],
        device=_device_of(machine, choice),
        base=base,
        bases=bases,
        own_settings=own_settings,
    )
    _write_settings(path, text.encode() + serve, write=write)
    estimated = None if proposal.size.counted else f"the tokenizer of {base} is not on this machine yet"
    if clean is None:
        estimated = "rows that repeat others are not known yet"
    return Started(
        file=str(path),
        proposal=proposal,
        fields=fields,
        rows_read=len(sample.rows),
        drops_rated=any(
            field.taken_for == "score" and (field.mapped or field.name == "reward") for field in fields
        ),
        rows_usable=len(rows),
        estimated=estimated,
        base=base,
        bases=bases,
    )


def _write_settings(path: Path, content: bytes, *, write: bool) -> None:
    if write:
        write_atomic(path, content)
        load_settings(path)


TASKS: dict[Kind, TaskNeed] = {
    "json": "json",
    "extraction": "json",
    "citation": "json",
    "classification": "json",
    "tool_calls": "tools",
    "code": "code",
    "text": "text",
}
MOST_LENGTHS = 256
"""Lengths of rows that a plan is made from: a plan over more takes longer and says the same."""
LANGUAGE_ROWS = 100


def _check_license(choice: BaseChoice) -> None:
    licenses = sorted({base.license for base in list_bases()})
    if choice.license is not None and choice.license not in licenses:
        raise UserError(
            f"the catalog has no base under {choice.license!r}",
            why=f"its licenses are {' and '.join(licenses)}",
            fix="choose one of these, or specify the base with --base",
            where="--license",
        )


def find_named_base(base: str, folder: Path, *, otherwise: str) -> str:
    """The base as graft.yaml writes it; the catalog's short names are taken, too. If there is none, the error
    says what else to do `otherwise`.
    """
    row = find_base_row(base)
    if row is not None and not (folder / base).expanduser().is_dir():
        base = name_in_settings(model_of(row))
    if base == EMBEDDED:
        return base
    try:
        # Without a network it stays open.
        with suppress(EnvironmentFailure):
            find_base(base, project_folder=folder)
    except UserError as error:
        names = ", ".join(row.name for row in list_bases())
        raise UserError(
            error.what,
            why=error.why,
            fix=f"{error.fix}; or choose one of the catalog: {names}, or {otherwise}",
            where=error.where,
        ) from error
    return base


def _need_of(
    rows: Sequence[Interaction], proposal: Proposal, machine: Machine, choice: BaseChoice
) -> BaseNeed:
    trained = max(round(proposal.rows * (1 - proposal.test - VALIDATION)), 1)
    planned = plan_training(trained, on_cpu=machine.gpu is None)
    lengths = sorted(
        -(-sum(len(message.content) + 20 for message in row.messages) // int(CHARACTERS_PER_TOKEN))
        + -(-len(row.reply) // int(CHARACTERS_PER_TOKEN))
        + 2
        for row in rows
    )
    step = -(-len(lengths) // MOST_LENGTHS)
    texts = [text for row in rows[:LANGUAGE_ROWS] for text in (row.question, row.reply)]
    return BaseNeed(
        task=TASKS[proposal.kind],
        language=guess_language(texts),
        lengths=tuple(reversed(lengths[::-1][::step])),
        rows=min(trained, planned.max_rows or trained),
        epochs=planned.epochs,
        batch_size=planned.batch_size,
        rank=planned.rank,
        upper_layers=planned.upper_layers,
        method=TrainSettings().method,
        minutes=choice.minutes,
        license=choice.license,
    )


def _settle_base(
    named: str | None, need: BaseNeed, machine: Machine, folder: Path
) -> tuple[str, BaseProposal]:
    """The base of the project. One that was named must fit; one that is proposed must be reachable."""
    if named is None:
        proposal = choose_base(need, machine)
        chosen = proposal.option
        base = EMBEDDED if chosen is None else chosen.base
        if base != EMBEDDED:
            try:
                find_base(base, project_folder=folder)
            except GraftError as unreachable:
                # A proxy may answer that there is no such model. The user named none.
                embedded = next((option for option in proposal.options if option.base == EMBEDDED), None)
                if embedded is None or embedded.refused is not None:
                    raise
                why = f"needs no download; {base} suits better but was not fetched: {unreachable.what}"
                return EMBEDDED, proposal.model_copy(update={"chosen": embedded.name, "why": why})
        return base, proposal
    row = find_base_row(named)
    if row is not None:
        refuse_unless_it_fits(model_of(row), need, machine)
    else:
        model = _model_of(named, folder)
        # A base that nothing is known of is planned once it is fetched.
        if model is not None:
            refuse_unless_it_fits(model, need, machine)
    return named, BaseProposal(
        chosen=row.name if row else "",
        why="named with --base",
        machine=machine.name,
        language=need.language,
        options=weigh_bases(need, machine),
    )


def _model_of(base: str, folder: Path) -> CatalogModel | None:
    local_folder = (folder / base).expanduser()
    try:
        if local_folder.is_dir():
            return find_model(local_folder)
        if is_ready(base, project_folder=folder):
            return find_model(find_base(base, project_folder=folder).folder)
        return find_model(base)
    except GraftError:
        return None


def _device_of(machine: Machine, choice: BaseChoice) -> DeviceFacts:
    device = probe_device()
    if choice.gpu is None or machine.gpu is None:
        return device
    return device.model_copy(update={"kind": "cuda", "name": machine.name})


def _leave_out_repeats(clean: "CleanLog", sound: int, logs: Sequence[str]) -> list[Interaction]:
    rows = clean.read()
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"{len(rows)} different rows are too few to find out what the log is about",
            why=f"of {sound} usable rows, the others repeat or contradict these",
            fix=f"specify a log of at least {FEWEST_ROWS} different rows; `graft data audit` shows "
            "the repeats",
            where=logs[0],
        )
    return rows


def _read(logs: Sequence[str], settings: DataSettings) -> tuple[list[Interaction], Sample]:
    """The rows that `graft data prepare` would keep, as far as each row shows on its own."""
    sample = sample_rows(logs, settings=settings)
    faults = ((row, find_fault(row, settings)) for row in sample.rows)
    usable = [row for row, fault in faults if fault is None or not is_dropped(fault.code, settings)]
    if sample.faults and not sample.rows:
        fault = sample.faults[0]
        fixes = {
            "encoding": "convert the file to UTF-8, for example with `iconv -f ENCODING -t UTF-8`",
            "schema": "run `graft init` without a log, and set data.mapping in the graft.yaml that it "
            "writes: the paths of the question and the reply",
        }
        raise UserError(
            "no row of the log can be read",
            why=f"line {fault.origin.line}: {fault.message}",
            fix=fixes.get(fault.code, "use a log with one JSON object per line, or a CSV or Parquet file"),
            where=logs[0],
        )
    if len(usable) < FEWEST_ROWS:
        first = f"; the first fault: {sample.faults[0].message}" if sample.faults else ""
        few = f"{len(usable)} usable {'row is' if len(usable) == 1 else 'rows are'} too few"
        raise UserError(
            f"{few} to find out what the log is about",
            why=f"{len(sample.rows)} rows could be read, {len(sample.faults)} could not{first}",
            fix=f"use a log with at least {FEWEST_ROWS} usable rows; "
            f"`graft data audit {shlex.quote(logs[0])}` shows what is wrong with this one",
            where=logs[0],
        )
    return usable, sample


def _open_base(base: str, folder: Path) -> tuple[ChatTemplate, int] | None:
    """The base's template and its maximum number of tokens; None if the base is not available yet."""
    if not is_ready(base, project_folder=folder) or find_spec("tokenizers") is None:
        return None
    try:
        base_folder = Path(find_base(base, project_folder=folder).folder)
        context = read_config_shape(base_folder / "config.json").max_positions
        return ChatTemplate.from_folder(base_folder), context
    except GraftError:
        return None


def _counter(template: ChatTemplate) -> Callable[[Interaction], tuple[int, int]]:
    """Counts tokens by the base's own tokenizer."""

    def count(row: Interaction) -> tuple[int, int]:
        return template.count_tokens(row.messages, row.reply), template.count_text(row.reply) + 1

    return count


def _as_seen_from(folder: Path, log: str) -> str:
    """A log as graft.yaml names it: relative to the project if it is inside, else absolute."""
    if log == "-" or "://" in log:
        return log
    whole = Path(log).absolute()
    inside = whole.is_relative_to(folder.absolute())
    return os.path.relpath(whole, folder.absolute()) if inside else str(whole)
