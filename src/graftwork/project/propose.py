"""Analyze a log, and propose settings that fit it.

Input: logged interactions, what the machine is. Output: a Proposal: the kind of task, checks and metrics that
can grade it, rules that a model which learned nothing cannot keep, a test split of a useful size, settings
for training. Every part carries its reason. Pure; `starter` writes it as YAML.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

from graftwork.evaluate.gate.settings import is_like_metric
from graftwork.evaluate.preflight import MetricTrial, try_metric
from graftwork.evaluate.settings import BY_NAME, EvaluateSettings
from graftwork.evaluate.statistics.intervals import Interval, clopper_pearson
from graftwork.evaluate.statistics.significance import (
    USUAL_LOSS_RATE,
    cases_for_difference,
    detectable_difference,
    successes_to_clear,
)
from graftwork.grading.answers import (
    MISSING,
    AnswerFields,
    look_up,
    numbered_sources,
    parse_object,
    read_answer,
    read_citations,
)
from graftwork.grading.checks import GradeCheck, grade
from graftwork.grading.code import asks_for_code
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import ALWAYS_MEASURED, JUDGE_PREFERENCE, JUDGE_SCORE, OPTIONAL_MEASURED
from graftwork.records.base import Record
from graftwork.records.interaction import Interaction
from graftwork.records.report import Case
from graftwork.text.tool_calls import read_calls

Kind = Literal["json", "extraction", "citation", "classification", "tool_calls", "code", "text"]
KINDS: dict[Kind, str] = {
    "json": "JSON with fields",
    "extraction": "extraction: JSON fields taken from the prompt",
    "citation": "answers that cite numbered sources",
    "classification": "classification: one of a few labels",
    "tool_calls": "tool calls",
    "code": "code",
    "text": "free text",
}
NEARLY_ALL = 0.9
MOST = 0.5
MOST_LABELS = 20
SHORT_WORDS = 8
ALL_DIFFERENT = 0.95
SELDOM = 0.1
FEWEST_REFUSALS = 3
FEWEST_CALLS = 3
MOST_FIELDS_WITH_RULES = 6
ANSWER_KEYS = ("answer", "response", "reply", "text", "summary")
CITATION_KEYS = ("citations", "sources", "references", "refs", "cited")
REFUSAL_KEYS = ("refused", "refusal", "unanswerable", "cannot_answer")
GAINS = ((0.05, 0.2), (0.1, 0.25), (0.15, 0.3))
"""Gains that a user may want to detect, and the share of the rows that may be held out for it."""
CONFIDENCE = 0.95
POWER = "over the base (80 % power)"
MOST_HELD_OUT = 0.3
FEWEST_HELD_OUT = 0.1
USUAL_SUCCESS = 0.98
"""Success rate of a good model if the log reaches 1: a few answers are wrong."""
FORM_LIMITS = (0.95, 0.9, 0.85, 0.8, 0.7)
CHARACTERS_PER_TOKEN = 3.0
USUAL_CONTEXT = 8192
"""Assumed context length of a base that is not available."""
FAR_BEYOND = 20
"""Factor on the context: a row with this many estimated tokens is too long by any tokenizer."""
_NAME = re.compile(r"[^a-z0-9_.-]+")


class FieldKind(Record):
    """A field of the replies, and how it can be compared."""

    path: str
    rule: Literal["exact", "numeric", "set", "normalised", "token_f1"]
    why: str
    values: tuple[Any, ...] = ()
    """The labels, if there are only a few."""

    @property
    def gradable(self) -> bool:
        """Whether it is right or wrong; long texts are only more or less similar."""
        return self.rule != "token_f1"


class Size(Record):
    """How long rows and replies are, in tokens."""

    longest: int
    longest_reply: int
    counted: bool
    """By the base's own tokenizer, and not by a rule of thumb."""
    context: int
    """Context length of the base. Longer rows are `too_long` and ignored otherwise."""
    too_long: int = 0


class RuleProposal(Record):
    """A rule of the gate with its reason."""

    metric: str
    over: float
    why: str


class Proposal(Record):
    """What `graft init` detected, and what it proposes."""

    rows: int
    kind: Kind
    kind_why: str
    formats: tuple[str, ...]
    """The formats of the rows, the most frequent first."""
    fields: tuple[FieldKind, ...] = ()
    answer_fields: dict[str, Any] = {}
    metrics: tuple[str, ...]
    checks: tuple[dict[str, Any], ...] = ()
    primary: str
    primary_why: str
    rules: tuple[RuleProposal, ...]
    left_out: tuple[str, ...] = ()
    """Fields without a rule, and why, one sentence each."""
    test: float
    test_cases: int
    test_why: str
    size: Size
    drop_reasoning: bool = False
    """Whether the base's template accepts these replies only without reasoning."""


def propose(
    rows: Sequence[Interaction],
    *,
    formats: Iterable[str | None],
    size: Size,
    drop_reasoning: bool = False,
) -> Proposal:
    """Settings for these rows. `formats` names the shape of each row that was read."""
    cases = [
        Case(id=str(number), origin=row.origin, messages=row.messages, reference=row.reply, group=row.group)
        for number, row in enumerate(rows)
    ]
    kind, kind_why, fields, answer_fields = find_kind(cases)
    metrics, checks, primary, primary_why = _choose_metrics(kind, fields, cases, answer_fields)
    test, test_cases, test_why = choose_test_size(len({(row.question, row.reply) for row in rows}))
    evaluate = EvaluateSettings.model_validate(
        {"metrics": metrics, "checks": checks, "fields": answer_fields}
    )
    rules, left_out = _choose_rules(cases, evaluate, primary=primary, held_out=test_cases)
    return Proposal(
        rows=len(rows),
        kind=kind,
        kind_why=kind_why,
        formats=tuple(name for name, _ in Counter(name for name in formats if name).most_common()),
        fields=fields,
        answer_fields=answer_fields,
        metrics=metrics,
        checks=checks,
        primary=primary,
        primary_why=primary_why,
        rules=rules,
        left_out=left_out,
        test=test,
        test_cases=test_cases,
        test_why=test_why,
        size=size,
        drop_reasoning=drop_reasoning,
    )


def measure_size(
    rows: Sequence[Interaction],
    *,
    count: Callable[[Interaction], tuple[int, int]] | None,
    context: int = USUAL_CONTEXT,
) -> Size:
    """The longest row and reply that fit into the context; `count` gives the tokens of both if the base's
    tokenizer is available.
    """
    counted = []
    for row in rows:
        letters = sum(len(message.content) + 20 for message in row.messages) + len(row.reply)
        reply_tokens = math.ceil(len(row.reply) / CHARACTERS_PER_TOKEN) + 2
        counted.append((math.ceil(letters / CHARACTERS_PER_TOKEN), reply_tokens))
    if count is not None:
        # A row far beyond the context is not tokenized: that could fill the memory.
        counted = [
            count(row) if guess[0] <= FAR_BEYOND * context else guess
            for row, guess in zip(rows, counted, strict=True)
        ]
    fitting = [sizes for sizes in counted if sizes[0] <= context]
    return Size(
        longest=max((whole for whole, _ in fitting), default=context if counted else 0),
        longest_reply=max((reply for _, reply in fitting), default=context if counted else 0),
        counted=count is not None,
        context=context,
        too_long=len(counted) - len(fitting),
    )


def choose_test_size(rows: int) -> tuple[float, int, str]:
    """The share of rows to hold out, their number, and the gain that they can detect."""
    for gain, most in GAINS:
        needed = cases_for_difference(gain, loss_rate=USUAL_LOSS_RATE, confidence=CONFIDENCE)
        if needed <= most * rows:
            share = max(FEWEST_HELD_OUT, math.ceil(100 * needed / rows) / 100)
            return share, round(share * rows), f"enough to detect a gain of {100 * gain:g} points {POWER}"
    held_out = math.floor(MOST_HELD_OUT * rows)
    detectable = detectable_difference(held_out, loss_rate=USUAL_LOSS_RATE, confidence=CONFIDENCE)
    if not math.isfinite(detectable):
        return MOST_HELD_OUT, held_out, "too few rows to show any gain: log more before you trust a verdict"
    needed = cases_for_difference(0.1, loss_rate=USUAL_LOSS_RATE, confidence=CONFIDENCE)
    points = math.ceil(100 * detectable)
    note = f"enough to detect a gain of {points} points {POWER}; 10 points need {needed} cases"
    return MOST_HELD_OUT, held_out, note


def find_kind(cases: Sequence[Case]) -> tuple[Kind, str, tuple[FieldKind, ...], dict[str, Any]]:
    """The kind of task, why, the fields of its replies, and `evaluate.fields`."""
    total = len(cases)
    replies = [case.reference for case in cases]
    documents = [document for text in replies if (document := parse_object(text)) is not None]
    calls = sum("<tool_call>" in text for text in replies)
    sourced = sum(bool(numbered_sources(case)) for case in cases)
    if calls >= MOST * total:
        return "tool_calls", f"{calls} of {total} replies call a tool", (), {"form": "text"}
    if len(documents) >= NEARLY_ALL * total:
        return _find_json_kind(cases, documents, sourced=sourced)
    cited = sum(bool(re.search(r"\[\d{1,6}\]", text)) for text in replies)
    if sourced >= MOST * total and cited >= MOST * total:
        why = f"{cited} of {total} replies cite as [1], and the prompts hold numbered sources"
        return "citation", why, (), {"form": "text"}
    code = sum(asks_for_code(case) for case in cases)
    if code >= MOST * total:
        return "code", f"{code} of {total} replies are Python", (), {"form": "text"}
    labels = Counter(text.strip() for text in replies)
    if _few(labels, total) and median(len(text.split()) for text in replies) <= SHORT_WORDS:
        why = f"the {total} replies are {len(labels)} different ones: {_join(labels)}"
        return "classification", why, (), {}
    return (
        "text",
        f"{len(documents)} of {total} replies are JSON, and they are not a few labels",
        (),
        {"form": "text"},
    )


def _find_json_kind(
    cases: Sequence[Case], documents: Sequence[dict[str, Any]], *, sourced: int
) -> tuple[Kind, str, tuple[FieldKind, ...], dict[str, Any]]:
    total = len(cases)
    keys = Counter(key for document in documents for key in document)
    why = f"{len(documents)} of {total} replies are JSON objects"
    if sourced >= MOST * total and (cited := _find_cited_answer(documents, keys)):
        settings: dict[str, Any] = {role: key for role, key in cited.items() if role != key}
        return "citation", f"{why} that cite numbered sources of the prompt", (), settings
    fields = tuple(field for path, values in _find_leaves(documents) if (field := find_field(path, values)))
    fields = tuple(_unless_invented(field, cases) for field in fields)
    required = [key for key in keys if keys[key] == len(documents)]
    settings = {"required": required} if required else {}
    labeled = {
        field.path: {"enum": list(field.values)} for field in fields if field.values and "." not in field.path
    }
    if labeled:
        settings["json_schema"] = {"type": "object", "required": required, "properties": labeled}
    copied = _count_copied(cases, fields)
    if fields and copied >= MOST * total:
        return "extraction", f"{why}, and {copied} of them repeat words of the prompt", fields, settings
    return "json", f"{why} with {_join(keys)}", fields, settings


def _find_leaves(documents: Sequence[dict[str, Any]], within: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The fields that most documents have, with their values; those of an object by their own paths."""
    for key in dict.fromkeys(key for document in documents for key in document):
        values = [document[key] for document in documents if key in document]
        # A dot in a key would lead inwards.
        if "." in key or len(values) < MOST * len(documents):
            continue
        stated = [value for value in values if value is not None]
        if stated and all(isinstance(value, dict) and value for value in stated):
            yield from _find_leaves(stated, f"{within}{key}.")
        else:
            yield f"{within}{key}", values


def _find_cited_answer(documents: Sequence[dict[str, Any]], keys: Counter[str]) -> dict[str, str]:
    """The keys of the words, the citations and the refusal; empty if metrics cannot read such an answer."""
    usual = MOST * len(documents)
    answer = next(
        (
            path
            for key in ANSWER_KEYS
            for path in (key, *(f"{key}.{inner}" for inner in ANSWER_KEYS))
            if sum(isinstance(look_up(document, path), str | None) for document in documents) >= usual
        ),
        None,
    )
    citations = next((key for key in CITATION_KEYS if keys[key] >= usual), None)
    if answer is None or citations is None:
        return {}
    # A list of objects has no numbers; such answers often cite in their words.
    for path in (citations, answer):
        read = [read_citations(look_up(document, path)) for document in documents]
        well_formed = sum(numbers is not None for numbers in read)
        if well_formed >= usual and sum(map(bool, read)) >= SELDOM * len(read):
            refused = next((key for key in REFUSAL_KEYS if keys[key] >= usual), None)
            return {"answer": answer, "citations": path, **({"refused": refused} if refused else {})}
    return {}


def find_field(path: str, values: Sequence[Any]) -> FieldKind | None:
    """How the values of a field can be compared, null as itself; None if nothing fits."""
    stated = [value for value in values if value is not None]
    if not stated:
        return None
    if any(isinstance(value, dict | list) for value in stated):
        return _find_list(path, stated)
    counts = Counter(json.dumps(value, sort_keys=True, ensure_ascii=False) for value in values)
    if _few(counts, len(values)):
        labels = tuple(json.loads(text) for text, _ in counts.most_common())
        return FieldKind(path=path, rule="exact", why=f"{len(counts)} different values", values=labels)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in stated):
        whole = all(float(value).is_integer() for value in stated)
        return FieldKind(path=path, rule="exact" if whole else "numeric", why="numbers")
    if _words(stated) <= SHORT_WORDS:
        return FieldKind(path=path, rule="normalised", why="short texts; case and punctuation do not count")
    return FieldKind(path=path, rule="token_f1", why="long texts: similarity, which is not correctness")


def _find_list(path: str, values: Sequence[Any]) -> FieldKind | None:
    """How lists are compared: plain ones as sets, those of objects exactly unless texts are long."""
    if not all(isinstance(value, list) for value in values):
        return None
    items = [item for value in values for item in value]
    if not any(isinstance(item, dict | list) for item in items):
        return FieldKind(path=path, rule="set", why="a list; the order does not count")
    inner = [text for item in items for text in _texts_of(item)]
    if inner and _words(inner) > SHORT_WORDS:
        return None
    return FieldKind(path=path, rule="exact", why="a list of objects: every value, in this order")


def _texts_of(value: Any) -> Iterator[str]:
    """The texts within a JSON value, keys aside."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(item)
    elif isinstance(value, str):
        yield value


def _words(values: Sequence[Any]) -> float:
    return median(len(str(value).split()) for value in values)


def _unless_invented(field: FieldKind, cases: Sequence[Case]) -> FieldKind:
    """The field unchanged; by similarity alone if each value is new and none is in the prompt."""
    if field.values or not field.gradable or field.rule == "set":
        return field
    pairs = [
        (
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)),
            " ".join(message.content for message in case.messages).casefold(),
        )
        for case in cases
        if (document := parse_object(case.reference)) is not None
        and not isinstance(value := look_up(document, field.path), list)
        and value not in (MISSING, None)
    ]
    copied = sum(value.casefold() in prompt for value, prompt in pairs)
    if (
        not pairs
        or len({value for value, _ in pairs}) < ALL_DIFFERENT * len(pairs)
        or copied > SELDOM * len(pairs)
    ):
        return field
    why = "all different and not in the prompt, so they cannot be known: only similarity counts"
    return field.model_copy(update={"rule": "token_f1", "why": why})


def _choose_metrics(
    kind: Kind, fields: Sequence[FieldKind], cases: Sequence[Case], answer_fields: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...], str, str]:
    """Choose metrics, checks, and the metric of correctness with its reason."""
    read = AnswerFields.model_validate(answer_fields)
    answers = [read_answer(case.reference, fields=read) for case in cases]
    refusals = sum(bool(answer and answer.refused) for answer in answers)
    refuses = ("refusal_correct",) if refusals >= FEWEST_REFUSALS and refusals < len(cases) else ()
    called = _metrics_for_calls(cases)
    if kind in ("json", "extraction"):
        return _metrics_for_json(fields, has_schema="json_schema" in answer_fields)
    if kind == "citation":
        form = () if read.form == "text" else ("json_valid",)
        names = (*form, "citation_coverage", "citation_correct", "answer_match", *refuses)
        return names, (), "answer_match", "the answer has the words of the reference"
    if kind == "classification":
        label = {"name": "label", "metric": "exact", "ignore_case": True}
        return ("task_success",), (label,), "label", "the label equals the reference"
    if kind == "tool_calls":
        return (*called, "chrf"), (), "tool_calls", "the same tools with the same arguments"
    if kind == "code":
        return ("code_compiles", "chrf"), (), "chrf", "similarity to the logged code; tests would be better"
    return (
        ("chrf", "token_f1", *refuses, *called),
        (),
        "chrf",
        "similarity to the logged reply, not correctness",
    )


def _metrics_for_calls(cases: Sequence[Case]) -> tuple[str, ...]:
    """Metrics of tool calls, and of replies that must not call, if the log has enough of each."""

    if sum(bool(read_calls(case.reference)) for case in cases) < max(FEWEST_CALLS, SELDOM * len(cases)):
        return ()

    def count(name: str) -> int:
        return sum(grade(name, case, case.reference) is not None for case in cases)

    valid = ("tool_calls_valid",) if count("tool_calls_valid") >= MOST * len(cases) else ()
    silent = ("no_call_where_due",) if count("no_call_where_due") >= FEWEST_REFUSALS else ()
    return ("tool_calls", *valid, *silent)


def _metrics_for_json(
    fields: Sequence[FieldKind], *, has_schema: bool
) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...], str, str]:
    metrics = ("json_valid", *(["schema_valid"] if has_schema else []))
    used_names: set[str] = set()
    checks: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for field in fields:
        name = names[field.path] = _name_check(field.path, used_names)
        tolerance = {"relative": 0.001} if field.rule == "numeric" else {}
        checks.append({"name": name, "metric": field.rule, "field": field.path, **tolerance})
    right = [field for field in fields if field.gradable]
    if len(right) > 1:
        rules = {
            field.path: {"metric": "numeric", "relative": 0.001} if field.rule == "numeric" else field.rule
            for field in right
        }
        only_exact = all(rule == "exact" for rule in rules.values())
        name = _name_check("all_right", used_names)
        checks.append({"name": name, "all_fields": list(rules) if only_exact else rules})
        return metrics, tuple(checks), name, "every field equals the reference"
    if right:
        return metrics, tuple(checks), names[right[0].path], "the field equals the reference"
    if fields:
        return metrics, tuple(checks), names[fields[0].path], "similarity to the logged text, not correctness"
    checks.append({"name": "same_object", "all_fields": True})
    return metrics, tuple(checks), "same_object", "the whole object equals the reference"


def _choose_rules(
    cases: Sequence[Case], evaluate: EvaluateSettings, *, primary: str, held_out: int
) -> tuple[tuple[RuleProposal, ...], tuple[str, ...]]:
    """Floors that a model which learned nothing cannot reach, and limits of form that can be proven."""
    checks: dict[str, GradeCheck] = {check.name: check for check in evaluate.checks}
    context = GradeContext(fields=evaluate.fields, checks=checks)
    rules: list[RuleProposal] = []
    left_out: list[str] = []
    forms = [next((name for name in _FORMS if name in evaluate.metrics), None), "no_call_where_due"]
    for name in forms:
        if name is None or name not in evaluate.metrics:
            continue
        trial = try_metric(name, cases, context=context)
        graded = _count_held_out(trial, cases, held_out=held_out)
        # The highest limit that holds for a model that reaches this share.
        needed = {limit: successes_to_clear(graded, limit=limit) for limit in FORM_LIMITS}
        most = _reached(trial) * graded
        limit = next((limit for limit, n in needed.items() if n is not None and n <= most), None)
        if limit is not None:
            why = f"{graded} cases can prove this much: its lower bound counts{_say_own(trial)}"
            rules.append(RuleProposal(metric=name, over=limit, why=why))
        else:
            left_out.append(f"{name}: {graded} cases cannot prove that it is kept{_say_own(trial)}")
    names = [primary, *(name for name in checks if name != primary)]
    names += [name for name in evaluate.metrics if name in _GRADED_APART and name != primary]
    for name in names[: MOST_FIELDS_WITH_RULES + 1]:
        trial = try_metric(name, cases, context=context)
        graded = _count_held_out(trial, cases, held_out=held_out)
        if rule := _floor(trial, held_out=graded):
            rules.append(rule)
        elif trial.constant is not None:
            left_out.append(
                f"{name}: one answer to everything reaches {100 * trial.constant:.0f} %, "
                f"and {graded} cases cannot prove more{_say_own(trial)}"
            )
    return tuple(rules), tuple(left_out)


_FORMS = ("schema_valid", "json_valid", "tool_calls_valid")
_GRADED_APART = ("citation_correct", "refusal_correct", "tool_calls")


def _count_held_out(trial: MetricTrial, cases: Sequence[Case], *, held_out: int) -> int:
    """How many held-out cases a metric grades, if they are like the log."""
    return round(held_out * trial.cases / len(cases)) if cases else 0


def _reached(trial: MetricTrial) -> float:
    """The expected share of a model which learned the log: that of the log's own replies, with their
    interval.
    """
    interval = _own_interval(trial)
    return USUAL_SUCCESS if interval is None else min(USUAL_SUCCESS, interval.low)


def _own_interval(trial: MetricTrial) -> Interval | None:
    """The interval of the log's own replies; None if all of them are right."""
    if trial.own is None or trial.own == 1.0 or not trial.cases:
        return None
    return clopper_pearson(round(trial.own * trial.cases), n=trial.cases)


def _say_own(trial: MetricTrial) -> str:
    interval = _own_interval(trial)
    if trial.own is None or interval is None:
        return ""
    return (
        f"; the log's own replies reach {100 * trial.own:.0f} % "
        f"({100 * interval.low:.0f}–{100 * interval.high:.0f} %)"
    )


def _floor(trial: MetricTrial, *, held_out: int) -> RuleProposal | None:
    """Above the best single answer to everything; None if too few cases can prove that."""
    if trial.constant is None or not trial.cases:
        return None
    limit = math.ceil(100 * trial.constant + 1e-9) / 100
    enough = successes_to_clear(held_out, limit=limit) if limit < 1 else None
    if enough is None or enough > _reached(trial) * held_out:
        return None
    why = f"one answer to everything reaches {100 * trial.constant:.0f} %"
    return RuleProposal(metric=trial.name, over=limit, why=why)


def _count_copied(cases: Sequence[Case], fields: Sequence[FieldKind]) -> int:
    """Replies that contain a text, not a label, copied from the prompt."""
    paths = [field.path for field in fields if not field.values and field.rule in ("normalised", "token_f1")]
    copied = 0
    for case in cases:
        document = parse_object(case.reference) or {}
        prompt = " ".join(message.content for message in case.messages).casefold()
        values = [look_up(document, path) for path in paths]
        texts = [value.casefold() for value in values if isinstance(value, str) and value]
        copied += any(text in prompt for text in texts)
    return copied


def _few(counted: Counter[str], total: int) -> bool:
    """A few values, each frequent: labels."""
    return 1 < len(counted) <= MOST_LABELS and len(counted) <= total / 5


def _name_check(path: str, used_names: set[str]) -> str:
    """A name for a check that no metric and no other check has, and that rules of the gate may name."""
    name = _NAME.sub("_", path.casefold()).strip("_.-")[:50] or "field"
    while name in used_names or name in _RESERVED or is_like_metric(name):
        name = f"{name}_field"
    used_names.add(name)
    return name


_RESERVED = frozenset({*BY_NAME, *ALWAYS_MEASURED, *OPTIONAL_MEASURED, JUDGE_SCORE, JUDGE_PREFERENCE})
"""Names that a check may not have."""


def _join(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(name[:40] for name in listed[:8])
    return f"{text}, …" if len(listed) > 8 else text
