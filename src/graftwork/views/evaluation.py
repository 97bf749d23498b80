"""Evaluations, verdicts, savings and the judge; verdicts also as a JUnit file, which every CI server shows.

In that file a case that is skipped lets a build pass; the exit code of the gate does not. The page with every
case is in `evaluation_page`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.grading.metrics import (
    DOLLARS,
    FIRST_TOKEN,
    LATENCY,
    LATENCY_P95,
    LOWER_IS_BETTER,
    TOKENS_PER_TASK,
    is_share,
    name_of,
    show_dollars,
)
from graftwork.records.interaction import Savings
from graftwork.records.report import (
    Comparison,
    Metric,
    NextStart,
    Report,
    RuleResult,
    SliceFigure,
    SubjectReport,
    Verdict,
)
from graftwork.text.wording import plural
from graftwork.views.document import Cell, Document, State, Table, quote
from graftwork.views.evaluation_page import subjects_of

if TYPE_CHECKING:
    from graftwork.data.review import CalibratedJudge
    from graftwork.evaluate.commands import GatedAll
    from graftwork.evaluate.foreign_runs import ImportedEvaluation
    from graftwork.evaluate.project import Evaluated
    from graftwork.pipeline.steps.release import WrittenReport
    from graftwork.pipeline.try_bases import BaseComparison


MEDIANS = (LATENCY, FIRST_TOKEN)
REQUESTS = (*MEDIANS, LATENCY_P95)
Pairs = dict[tuple[str, str], Comparison]
MOST_ROWS = 8
MOST_MISTAKES = 3
FEWEST_CASES = 5
"""Slices with fewer cases differ by chance."""


def view_report(report: Report, *, held_out: bool = False) -> Document:
    """`held_out`: the cases are the test split of the project."""
    viewed = Document("Evaluation")
    source = f" (imported from {quote(report.source)})" if report.source else ""
    counted = plural(report.cases, "held-out case" if held_out else "case")
    viewed.line(f"{counted}{source}{_say_example(report)}")
    viewed.add(_list_metrics(report))
    viewed.line(*_notes_on_table(report))
    if report.slices:
        chosen = choose_parts(report)
        if chosen:
            narrow = _list_parts(report, chosen, intervals=False)
            viewed.add(replace(_list_parts(report, chosen, intervals=True), if_narrow=narrow))
        viewed.line(f"[dim]{_say_rest(report, chosen)}[/]")
    # For each field with few values: recall and precision of each class, and its most frequent mistakes.
    for found in report.confusions:
        if found.subject != report.candidate.subject:
            continue
        mistakes: dict[str, list[str]] = {}
        for count, label, column in found.mistakes():
            mistakes.setdefault(label, []).append(f"{quote(column)} {count}")
        viewed.table(
            (f"expected {quote(name_of(found.metric))}", "cases", "recall", "precision", "mistaken for"),
            [
                (
                    quote(shown.label),
                    str(shown.cases),
                    share(shown.recall),
                    "–" if shown.precision is None else share(shown.precision),
                    ", ".join(mistakes.get(shown.label, [])[:MOST_MISTAKES]),
                )
                for shown in found.classes
            ],
        )
    viewed.line(*_closing_notes(report))
    return viewed


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def show_p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else "< 0.001"


def _metrics(report: Report) -> dict[str, bool]:
    """Every metric in order, and whether any subject has a figure for it."""
    subjects = (report.candidate, *subjects_of(report))
    names = dict.fromkeys(name for subject in subjects for name in subject.metrics)
    return {
        name: any(subject.metrics[name].n for subject in subjects if name in subject.metrics)
        for name in names
    }


def _list_metrics(report: Report) -> Table:
    """One column per subject if all figures fit next to each other, otherwise one line per subject."""
    subjects = subjects_of(report)
    # The candidate against each other subject that has cases in common with it.
    pairs: Pairs = {
        (pair.metric, pair.baseline): pair
        for pair in report.comparisons
        if pair.candidate == report.candidate.subject and pair.n
    }
    corrected = any(pair.adjusted_p is not None for pair in pairs.values())
    names = [name for name, has_figure in _metrics(report).items() if has_figure]
    against = [item.subject for item in subjects if any(key[1] == item.subject for key in pairs)]
    columns = ["", *(quote(subject.subject) for subject in subjects)]
    for name in against:
        columns += ["won/lost" if len(against) == 1 else f"won/lost\nto {quote(name)}", "p"]
        columns += ["p, corrected"] if corrected and name == report.baseline.subject else []
    gap = " " if len(subjects) <= 2 else "\n"
    rows = []
    for name in names:
        cells = [_figure(subject.metrics.get(name), gap=gap) for subject in subjects]
        for other in against:
            with_corrected = corrected and other == report.baseline.subject
            cells += _pair_cells(pairs.get((name, other)), corrected=with_corrected)
        rows.append((quote(name_of(name)), *cells))
    lines: list[tuple[str, ...]] = []
    for name in names:
        title = quote(name_of(name))
        for cells_ in _lines(name, subjects, pairs, corrected=corrected):
            lines.append((title, *cells_))
            title = ""
    heads = ("won/lost", "p", *(["p, corrected"] if corrected else []))
    # One space between columns leaves room for the figures.
    tall = Table(("", "", "", *heads), lines, no_wrap=(2, 3, 4), tight=True)
    return Table(columns, rows, no_wrap=range(1, len(columns)), if_narrow=tall)


def _lines(
    name: str, subjects: Sequence[SubjectReport], pairs: Pairs, *, corrected: bool
) -> list[tuple[str, ...]]:
    """One line per subject; a single line if all subjects are equal."""
    shown = [item for item in subjects if item.metrics.get(name) is not None and item.metrics[name].n]
    figures = {item.subject: _figure(item.metrics[name], gap=" ") for item in shown}
    own = [pair for (metric, _), pair in pairs.items() if metric == name]
    subject_names = "all" if len(shown) == len(subjects) else ", ".join(quote(subject) for subject in figures)
    room = max(len(item.subject) for item in subjects)
    if (
        len(shown) > 1
        # Names that need more room than any single one would wrap the other columns.
        and len(subject_names) <= room
        and len(set(figures.values())) == 1
        and not any(pair.wins or pair.losses for pair in own)
    ):
        return [(subject_names, next(iter(figures.values())), *([""] * (3 if corrected else 2)))]
    return [
        (quote(subject), figure, *_pair_cells(pairs.get((name, subject)), corrected=corrected))
        for subject, figure in figures.items()
    ]


def _pair_cells(pair: Comparison | None, *, corrected: bool) -> list[str]:
    if pair is None:
        return ["", "", *([""] if corrected else [])]
    adjusted = [show_p(pair.adjusted_p) if pair.adjusted_p is not None else ""] if corrected else []
    return [f"{pair.wins}/{pair.losses}", show_p(pair.p_value), *adjusted]


def _figure(metric: Metric | None, *, gap: str) -> str:
    """The figure with its interval."""
    if metric is None or not metric.n:
        return ""
    value, low, high = metric.value, metric.low, metric.high
    if metric.kind in ("rate", "score"):
        return f"{share(value)}{gap}[dim]({100 * low:.0f}–{100 * high:.0f})[/]"
    if metric.unit == DOLLARS:
        return f"{show_dollars(value)}{gap}[dim]({show_dollars(low)}–{show_dollars(high)})[/]"
    if metric.name == TOKENS_PER_TASK:
        return f"{value:,.0f}{gap}[dim]({low:,.0f}–{high:,.0f})[/]"
    figure = f"{value:.1f} {quote(metric.unit)}".rstrip()
    return (
        figure if low == high or not _is_bounded(metric) else f"{figure}{gap}[dim]({low:.1f}–{high:.1f})[/]"
    )


def _is_bounded(metric: Metric) -> bool:
    return metric.name not in REQUESTS or metric.n >= _fewest(metric)


def _fewest(metric: Metric) -> int:
    quantile = 0.95 if metric.name == LATENCY_P95 else 0.5
    return fewest_for_quantile(quantile, confidence=metric.confidence)


def choose_parts(report: Report) -> list[SliceFigure]:
    """The slices where base and adapter differ most, among those with enough cases; losses first."""
    differ = [
        part for part in report.slices if part.n >= FEWEST_CASES and abs(part.after - part.before) > 1e-9
    ]

    def weight(part: SliceFigure) -> tuple[bool, float, int]:
        gain = (part.before - part.after) if part.metric in LOWER_IS_BETTER else (part.after - part.before)
        return gain > 0, -round(abs(gain), 9), -part.n

    return sorted(differ, key=weight)[:MOST_ROWS]


def _say_rest(report: Report, shown: list[SliceFigure]) -> str:
    rest = len(report.slices) - len(shown)
    where = "are on the page and in --json" if rest != 1 else "is on the page and in --json"
    if not shown:
        counted = plural(len(report.slices), "figure")
        if all(part.n < FEWEST_CASES for part in report.slices):
            return f"no slice has {FEWEST_CASES} cases or more; {counted} of slices {where}"
        return f"no slice with {FEWEST_CASES} cases or more differs; {counted} of slices {where}"
    most = (
        "the largest differences, losses first, in slices"
        if len(shown) > 1
        else "the only difference in slices"
    )
    if not rest:
        return f"{most} with {FEWEST_CASES} cases or more"
    return f"{most} with {FEWEST_CASES} cases or more; {plural(rest, 'more figure')} of slices {where}"


def _list_parts(report: Report, figures: list[SliceFigure], *, intervals: bool) -> Table:
    def say(value: float, low: float, high: float) -> str:
        return f"{share(value)} [dim]({100 * low:.0f}–{100 * high:.0f})[/]" if intervals else share(value)

    subjects = (quote(report.baseline.subject), quote(report.candidate.subject))
    rows = [
        (
            f"{quote(name_of(figure.metric))}, [dim]{'role' if figure.by == 'group' else figure.by}[/] "
            f"{quote(figure.part)}",
            str(figure.n),
            say(figure.before, figure.before_low, figure.before_high),
            say(figure.after, figure.after_low, figure.after_high),
            f"{figure.wins}/{figure.losses}",
            show_p(figure.adjusted_p) if figure.adjusted_p is not None else "",
        )
        for figure in figures
    ]
    return Table(("slice", "cases", *subjects, "won/lost", "p, corrected"), rows, right=("cases",))


def _say_example(report: Report) -> str:
    """The subjects that were shown a worked example: those that were not trained for the task."""
    helped, more = [], []
    for item in subjects_of(report):
        settings = item.generation.settings
        if count := settings.get("worked_examples"):
            more.append(f"; {count} worked examples shown to {quote(item.subject)}")
        elif settings.get("worked_example"):
            helped.append(quote(item.subject))
    return "".join([f"; one worked example shown to {', '.join(helped)}" if helped else "", *more])


def _notes_on_table(report: Report) -> list[str]:
    """Notes on what the table omits, how fast each subject answered, and which graders failed."""
    subjects, lines = subjects_of(report), list[str]()
    if len(subjects) > 2:
        name = quote(report.candidate.subject)
        lines.append(f"[dim]won/lost: cases on which {name} did better/worse than the other subject[/]")
    missing = []
    for name, has_figure in _metrics(report).items():
        if not has_figure:
            metric = report.candidate.metrics.get(name)
            why = f" ({metric.vacuous})" if metric and metric.vacuous else ""
            missing.append(quote(f"{name_of(name)}{why}"))
    if missing:
        lines.append(f"[dim]no figure, because no case could be graded: {', '.join(missing)}[/]")
    # Medians of so few requests that they have no interval.
    few = {
        name: _fewest(metric)
        for subject in subjects
        for name, metric in subject.metrics.items()
        if name in MEDIANS and metric.n and not _is_bounded(metric)
    }
    if few:
        names = " and ".join(quote(name_of(name)) for name in few)
        lines.append(
            f"[dim]{names}: the median of fewer than {max(few.values())} requests has no interval[/]"
        )
    for subject in subjects:
        made = subject.generation
        speed = f", {plural(round(made.tokens_per_second), 'token')}/s" if made.tokens_per_second else ""
        lines.append(f"[dim]{quote(subject.subject)}: {plural(made.answers, 'answer')}{speed}[/]")
        lines += [
            f"[yellow]{quote(name_of(name))} of {quote(subject.subject)}: the grader failed on "
            f"{plural(metric.failed, 'case')} without a result ({quote(metric.why_failed)})[/]"
            for name, metric in subject.metrics.items()
            if metric.failed
        ]
    return lines


def _closing_notes(report: Report) -> list[str]:
    """Remarks on the subjects, the results of the judge, the statistical power, and reuse of the cases."""
    lines = [quote(remark) for remark in report.remarks]
    lines += [
        f"{quote(tally.model)} preferred {quote(tally.candidate)} in {tally.wins} of "
        f"{plural(tally.pairs, 'pair')}, {quote(tally.baseline)} in {tally.losses}; "
        f"both orders agreed in {share(tally.agreement)} "
        f"({100 * tally.agreement_low:.0f}–{100 * tally.agreement_high:.0f})"
        for tally in report.judged
    ]
    if report.power is not None:
        lines.append(quote(report.power.sentence))
    if report.wear is not None and report.wear.worn:
        lines.append(f"[yellow]{quote(report.wear.sentence)}[/]")
    elif report.wear is not None and report.looks > 1:
        lines.append(f"[dim]{quote(report.wear.sentence)}[/]")
    elif report.looks > 1:
        lines.append(f"[dim]these cases were evaluated {report.looks} times[/]")
    return lines


def view_evaluated(evaluated: "Evaluated") -> Document:
    # Only the evaluation of a project names its adapter.
    viewed = view_report(evaluated.report, held_out=bool(evaluated.adapter_hash))
    if evaluated.page:
        viewed.line(f"all cases, side by side: {quote(evaluated.page)}", wrap=False)
    return viewed


def view_base_comparison(compared: "BaseComparison") -> Document:
    viewed = Document("Bases")
    narrow = _list_trials(compared, ranges=False)
    viewed.add(replace(_list_trials(compared, ranges=True), if_narrow=narrow))
    for trial in compared.trials:
        if (pair := trial.to_best) is not None:
            value, low, high = (
                _difference(compared.metric, bound) for bound in (pair.difference, pair.low, pair.high)
            )
            unit = " points" if is_share(compared.metric) else ""
            corrected = "" if pair.adjusted_p is None else f", p {show_p(pair.adjusted_p)}"
            pairs = f"{quote(trial.name)} less {quote(compared.best)}, pair by pair"
            viewed.line(f"{pairs}: {value}{unit} [dim]({low} to {high}{corrected})[/]")
    viewed.line(f"[bold]{quote(compared.conclusion)}[/]", f"[dim]{quote(compared.power)}[/]")
    how = "graft.yaml has it already" if compared.taken else "write into graft.yaml"
    viewed.line(f"to take {quote(compared.best)}, {how}: [bold]{quote(compared.take)}[/]")
    return viewed


def _list_trials(compared: "BaseComparison", *, ranges: bool) -> Table:
    """`ranges`: those of the planned minutes."""
    rows = []
    for trial in compared.trials:
        planned = trial.planned_minutes
        spread = f" [dim]({planned.low:.1f}–{planned.high:.1f})[/]" if ranges else ""
        rows.append(
            (
                quote(trial.name),
                quote(trial.license or "not stated"),
                f"{planned.value:.1f}{spread}",
                f"{trial.minutes:.1f}",
                f"{trial.peak_memory_gib:.2f}",
                _figure(trial.before, gap=" "),
                _figure(trial.after, gap=" "),
                "" if trial.answers_per_second is None else f"{trial.answers_per_second:.1f}",
            )
        )
    columns = ("base", "license", "planned", "min", "GiB", "itself", "adapter", "answers/s")
    cases = plural(compared.cases, "held-out case")
    title = f"{name_of(compared.metric)} after {plural(compared.rows, 'row')}, on {cases}"
    return Table(columns, rows, title=title, right=("planned", "min", "GiB", "answers/s"))


def _difference(metric: str, value: float) -> str:
    """In points if the metric is a share."""
    return f"{100 * value:+.1f}" if is_share(metric) else f"{value:+.2f}"


def view_imported(imported: "ImportedEvaluation") -> Document:
    viewed = view_report(imported.report)
    viewed.line(*map(quote, (imported.why, *imported.notes)))
    viewed.line(f"all cases, side by side: {quote(imported.page)}", wrap=False)
    return viewed


def view_savings(savings: Savings) -> Document:
    """The result as a sentence, then the figures behind it."""
    viewed = Document("Savings")
    viewed.line(quote(savings.sentence))
    calls = savings.calls_per_month
    rows = [("calls", *(f"{value:,.0f}" for value in (calls.value, calls.low, calls.high)))]
    logged = savings.logged_usd_per_month if savings.logged_usd_per_month.high > 0 else None
    hosting = savings.hosting.usd_per_month if savings.hosting is not None else None
    for name, figure in (
        ("logged model", logged),
        ("hosting", hosting),
        ("saved", savings.saved_usd_per_month),
    ):
        if figure is not None:
            rows.append((name, *(show_dollars(value) for value in (figure.value, figure.low, figure.high))))
    # Without dollars, the number of calls alone says nothing about savings.
    if len(rows) > 1:
        viewed.table(("a month", "", "at least", "at most"), rows, right=("", "at least", "at most"))
    viewed.line(*(f"[dim]{quote(note)}[/]" for note in savings.notes))
    return viewed


def view_calibration(judged: "CalibratedJudge") -> Document:
    """One line per mode of the judge, and whether it counts in the gate."""
    viewed, rows = Document("Judge"), list[tuple[Cell, ...]]()
    for found in judged.modes:
        agreement, kappa = found.agreement, found.kappa
        rows.append(
            (
                found.mode,
                str(found.labels),
                str(found.clusters),
                f"{share(agreement.value)} [dim]({100 * agreement.low:.0f}–{100 * agreement.high:.0f})[/]",
                "–" if kappa is None else f"{kappa.value:.2f} [dim]({kappa.low:.2f}–{kappa.high:.2f})[/]",
                State("yes", "green") if found.sufficient else State("no", "red"),
            )
        )
    viewed.line(f"{quote(judged.model)} compared with people's labels")
    viewed.table(("mode", "labels", "sessions", "agreement", "kappa", "counts"), rows)
    for found in judged.modes:
        if found.why_not:
            viewed.line(f"{found.mode}: {quote(found.why_not)}")
        if found.mode == "pointwise" and found.labels:
            viewed.line(
                f"[dim]called good by both {found.both_good}, by the judge alone {found.judge_only}, "
                f"by people alone {found.people_only}, by neither {found.both_bad}[/]"
            )
        if found.unjudged:
            viewed.line(f"[yellow]{found.mode}: {found.unjudged} got no clear reply[/]")
        if found.position is not None and found.position.always_first + found.position.always_second:
            viewed.line(
                f"[dim]position: in {found.position.always_first} pairs it chose the first answer in both "
                f"orders, in {found.position.always_second} the second "
                f"({show_p(found.position.p_value)}); these count as disagreements[/]"
            )
        if found.length.longer + found.length.shorter:
            bias = found.length
            viewed.line(
                f"[dim]length: it agrees on {bias.longer_agreed:g} of {bias.longer} pairs whose better "
                f"answer is the longer one, on {bias.shorter_agreed:g} of {bias.shorter} whose better "
                f"answer is the shorter one (kappa with length balanced {bias.kappa.value:.2f}, "
                f"{bias.kappa.low:.2f} to {bias.kappa.high:.2f})[/]"
            )
        if found.groups:
            shown = ", ".join(f"{quote(group)} {counts}" for group, counts in found.groups.items())
            viewed.line(f"[dim]agreement by role: {shown}[/]")
    return viewed


DECISIONS = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "abort": "bold red",
    "not_enough_evidence": "bold yellow",
}
OUTCOMES = {
    "pass": State("pass", "green"),
    "fail": State("fail", "red"),
    "unknown": State("unknown", "yellow"),
}


def view_verdict(verdict: Verdict) -> Document:
    viewed, style = Document("Verdict"), DECISIONS[verdict.decision]
    viewed.line(f"[{style}]{verdict.decision.replace('_', ' ').upper()}[/]  {quote(verdict.reason)}")
    viewed.table(
        ("rule", "", "why"),
        [(quote(rule.rule), OUTCOMES[rule.outcome], quote(rule.sentence)) for rule in verdict.rules],
    )
    viewed.line(*(f"{place}. {quote(advice)}" for place, advice in enumerate(verdict.advice, 1)))
    viewed.line(*(f"[yellow]![/] {quote(note)}" for note in verdict.notes))
    return viewed


def view_gated(gated: "GatedAll") -> Document:
    viewed = Document("Verdicts")
    for name, verdict in gated.verdicts.items():
        viewed.line(f"[bold]{quote(name)}[/]")
        viewed.add(view_verdict(verdict))
    return viewed


def view_next_start(found: NextStart) -> Document:
    """Whether the next session of a federation starts from this checkpoint."""
    viewed = Document("Next start")
    title = "START FROM THIS CHECKPOINT" if found.start == "this" else "START FROM THE PREVIOUS CHECKPOINT"
    colour = "green" if found.start == "this" else "yellow"
    viewed.line(f"[bold {colour}]{title}[/]  {quote(found.reason)}")
    viewed.table(
        ("rule", "", "why"),
        [(quote(rule.rule), OUTCOMES[rule.outcome], quote(rule.sentence)) for rule in found.rules],
    )
    if found.adapter_folder:
        viewed.line(f"train.start_from: {quote(found.adapter_folder)}", wrap=False)
    elif not found.adapter_hash:
        viewed.line("train.start_from: omit it; the session started from the base")
    else:
        viewed.line(f"the adapter {quote(found.adapter_hash[:12])} is in no run or release any more")
    return viewed


def view_written(written: "WrittenReport") -> Document:
    viewed = Document("Report")
    viewed.line(f"written to {quote(written.path)}", wrap=False)
    return viewed


NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NOT_ENOUGH = "not enough evidence"


def write_junit(verdicts: Mapping[str, Verdict]) -> str:
    """One test suite a model."""
    root = Element("testsuites", {"name": "graft gate"})
    counted = [_add_suite(root, name, verdict) for name, verdict in verdicts.items()]
    for place, what in enumerate(("tests", "failures", "skipped")):
        root.set(what, str(sum(counts[place] for counts in counted)))
    root.set("errors", "0")
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _add_suite(root: Element, name: str, verdict: Verdict) -> tuple[int, int, int]:
    needed = [rule for rule in verdict.rules if rule.must]
    tests = len(verdict.rules)
    failures = sum(rule.outcome == "fail" for rule in needed)
    skipped = sum(rule.outcome == "unknown" for rule in needed)
    skipped += sum(not rule.must and rule.outcome != "pass" for rule in verdict.rules)
    suite = SubElement(
        root,
        "testsuite",
        {
            "name": _clean_xml(f"graft gate {name}"),
            "tests": str(tests),
            "failures": str(failures),
            "errors": "0",
            "skipped": str(skipped),
            "time": "0",
        },
    )
    properties = SubElement(suite, "properties")
    figures = {
        "decision": verdict.decision,
        "reason": verdict.reason,
        "report_hash": verdict.report_hash,
        "rules_hash": verdict.rules_hash,
    }
    for key, value in figures.items():
        SubElement(properties, "property", {"name": key, "value": _clean_xml(value)})
    for rule in verdict.rules:
        _add_case(suite, name, rule)
    lines = [f"{verdict.decision}: {verdict.reason}", *verdict.notes, *verdict.advice]
    SubElement(suite, "system-out").text = _clean_xml("\n".join(lines))
    return tests, failures, skipped


def _add_case(suite: Element, model: str, rule: RuleResult) -> None:
    place = {
        "classname": _clean_xml(f"graft.gate.{model}.{rule.kind}"),
        "name": _clean_xml(rule.rule),
        "time": "0",
    }
    case = SubElement(suite, "testcase", place)
    if rule.outcome == "pass":
        SubElement(case, "system-out").text = _clean_xml(rule.sentence)
    elif not rule.must:
        SubElement(case, "skipped", {"message": _clean_xml(f"another rule takes its place: {rule.sentence}")})
    elif rule.outcome == "unknown":
        SubElement(case, "skipped", {"message": _clean_xml(f"{NOT_ENOUGH}: {rule.sentence}")})
    else:
        failure = SubElement(case, "failure", {"message": _clean_xml(rule.sentence), "type": rule.kind})
        failure.text = _clean_xml(_rule_figures(rule))


def _rule_figures(rule: RuleResult) -> str:
    shown = {"value": rule.value, "low": rule.low, "high": rule.high, "limit": rule.limit, "n": rule.n}
    return ", ".join(f"{key} {value:g}" for key, value in shown.items() if value is not None)


def _clean_xml(text: str) -> str:
    """XML does not allow control characters, wherever they come from."""
    return NOT_IN_XML.sub("\ufffd", text)
