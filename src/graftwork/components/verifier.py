"""Python sources against the cases of their component, many at a time.

Input: a component, a stage, sources, the modules that they may import. Output: a verdict for each, and
evidence for those that hold. Sources are read, called and mutated in the sandbox; their values come out as
JSON and are compared here, by type and value, with expectations that never go in.

Inputs of properties are drawn by the rules of a case file, else by the types of the spec: the same component,
property and count give the same inputs on every machine; no prompt shows them.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from graftwork.components.cases import InputRule, PropertyCase, Stage
from graftwork.components.plan import Component, ComponentPlan, result_shape
from graftwork.components.types import Shape, fits, read_type
from graftwork.grading.code import PythonCall, is_right, same_value
from graftwork.process.sandbox import Sandbox, SandboxResult
from graftwork.process.sandbox.run import BatchJob, Prelude, run_batch
from graftwork.records.base import Record, fingerprint


class SourceFacts(Record):
    """Facts about a source, read in the sandbox before any of it ran."""

    syntax: str = ""
    imports: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    defines: bool = False
    public: tuple[str, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    effects: tuple[int, ...] = ()
    """Lines that do something on import."""
    complexity: int = 0
    lines: int = 0
    optimisations: tuple[str, ...] = ()
    statements: tuple[tuple[str, str], ...] = ()
    quality: tuple[str, ...] = ()
    literals: tuple[Any, ...] = ()


class SourceVerdict(Record):
    """One source against the cases of a stage. `cases` has a reason for each that failed, else no text."""

    ok: bool
    reason: str = ""
    cases: dict[str, str] = {}
    facts: SourceFacts = SourceFacts()
    values: str = ""
    """A hash of all results, including those for drawn inputs: equal for sources that behave alike."""
    shape_ok: bool = True
    """Whether every value has the type that the spec states."""

    @property
    def passed(self) -> int:
        return sum(not reason for reason in self.cases.values())

    @property
    def share(self) -> float:
        return self.passed / len(self.cases) if self.cases else 0.0


class Evidence(Record):
    """The cost of a source that passes its cases, and how well the cases test it."""

    events: int
    peak_bytes: int
    ran: int
    executable: int
    missed: tuple[int, ...] = ()

    @property
    def coverage(self) -> float | None:
        return self.ran / self.executable if self.executable else None


class MutationScore(Record):
    """How many small changes of a source are caught by its cases."""

    mutants: int
    killed: int
    survived: tuple[int, ...] = Field((), description="Lines of changes that no case noticed.")

    @property
    def score(self) -> float | None:
        return self.killed / self.mutants if self.mutants else None


LETTERS = "abcXYZ019 _-,;:.\t\n\"'<>&|#*é"
MOST_TEXT = 16
FREE_DRAWS = 8


def draw(
    component: Component, name: str, rules: Sequence[InputRule], count: int
) -> Iterator[tuple[Any, ...]]:
    """Arguments by the rules of the inputs; without them by the types of the specification."""
    source = random.Random(fingerprint([component.id, component.function, name]))
    shapes = [read_type(kind)[0] or Shape("str") for _, kind in component.parameters]
    for _ in range(count):
        if rules:
            yield tuple(by_rule(rule, source) for rule in rules)
        else:
            yield tuple(by_shape(shape, source) for shape in shapes)


def by_rule(rule: InputRule, source: random.Random) -> Any:
    if rule.text is not None:
        length = source.randint(0, rule.max) if rule.text else 0
        return "".join(source.choice(rule.text) for _ in range(length))
    if rule.whole is not None:
        return source.randint(*rule.whole)
    if rule.real is not None:
        return source.uniform(*rule.real)
    if rule.one_of is not None:
        return source.choice(rule.one_of)
    if rule.items is not None:
        return [by_rule(rule.items, source) for _ in range(source.randint(0, rule.max))]
    return source.random() < 0.5


def by_shape(shape: Shape, source: random.Random, depth: int = 0) -> Any:
    match shape.kind:
        case "union":
            return by_shape(source.choice(shape.of), source, depth)
        case "literal":
            return source.choice(shape.values)
        case "list":
            item = shape.of[0] if shape.of else Shape("str")
            return [by_shape(item, source, depth + 1) for _ in range(source.randint(0, max(0, 5 - depth)))]
        case "dict":
            return {name: source.randint(0, 9) for name in source.sample("abcde", source.randint(0, 3))}
        case _:
            return _scalar(shape.kind, source)


def _scalar(kind: str, source: random.Random) -> Any:
    if kind == "int":
        return source.choice((0, 1, -1, source.randint(-1000, 1000)))
    if kind == "float":
        return source.choice((0.0, 1.0, -1.5, round(source.uniform(-1000, 1000), 3)))
    if kind == "bool":
        return source.random() < 0.5
    if kind == "none":
        return None
    return "".join(source.choice(LETTERS) for _ in range(source.randint(0, MOST_TEXT)))


MODULES = (
    "ast", "json", "copy", "importlib", "tracemalloc", "re", "collections", "itertools", "string", "math",
)  # fmt: skip
"""Imported once for all sources."""
MOST_MUTANTS = 40
JUDGED_TOGETHER = 24
ALWAYS_ALLOWED = ("__future__", "typing", "collections.abc", "logging")
_REASONS = {
    "wall_clock": "takes too long",
    "cpu": "takes too long",
    "memory": "takes too much memory",
    "output": "writes too much output",
    "disk": "writes too many files",
    "signal": "was killed by a signal",
    "exit": "ends the interpreter",
}


class Submission(NamedTuple):
    """A source for a component, the cases to check it with, and the modules of its dependencies."""

    component: Component
    source: str
    stage: Stage
    modules: tuple[tuple[str, str], ...] = ()
    """File names in the package and their text."""


class PlannedCall(NamedTuple):
    """One call in the sandbox, and the case that its result decides; None for a random input."""

    case: str | None
    args: tuple[Any, ...]
    named: dict[str, Any]
    expected: PythonCall | None = None
    rule: PropertyCase | None = None


@lru_cache
def prelude() -> Prelude:
    text = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    return Prelude("harness", text, MODULES)


def calls_of(component: Component, stage: Stage) -> list[PlannedCall]:
    """Return every call for this stage: cases up to it, inputs drawn for properties, random inputs."""
    calls = []
    for call in component.cases.calls:
        if call.stage <= stage:
            expected = PythonCall(
                call=component.function,
                args=call.args,
                named=call.named,
                gives=call.gives,
                raises=call.raises,
            )
            calls.append(PlannedCall(call.id, call.args, call.named, expected))
    for rule in component.cases.properties:
        if rule.stage <= stage:
            drawn = draw(component, rule.id, rule.inputs, rule.count)
            calls += [PlannedCall(rule.id, args, {}, rule=rule) for args in drawn]
    # Inputs that no case decides: sources are compared with each other on them.
    rules = next((case.inputs for case in component.cases.properties if case.inputs), ())
    if rules or component.parameters:
        calls += [PlannedCall(None, args, {}) for args in draw(component, "free", rules, FREE_DRAWS)]
    return calls


def case_ids(component: Component, stage: Stage) -> list[str]:
    calls = [call.id for call in component.cases.calls if call.stage <= stage]
    return [*calls, *(rule.id for rule in component.cases.properties if rule.stage <= stage)]


class Verifier:
    """Python components of one plan in one kind of sandbox."""

    def __init__(self, plan: ComponentPlan, sandbox: Sandbox, *, at_once: int | None = None) -> None:
        self._plan, self._sandbox, self._at_once = plan, sandbox, at_once
        self.verified = 0
        """Sources that were run."""

    def verify(self, submissions: Sequence[Submission]) -> list[SourceVerdict]:
        calls = [calls_of(submission.component, submission.stage) for submission in submissions]
        read = [read_result(result) for result in self.run_sources(submissions, calls, "values")]
        self.verified += len(submissions)
        rules_hold = self.judge(
            [
                (submission.component, submission_calls, result.calls)
                for submission, submission_calls, result in zip(submissions, calls, read, strict=True)
            ]
        )
        return [
            conclude(submission, submission_calls, result, rules)
            for submission, submission_calls, result, rules in zip(
                submissions, calls, read, rules_hold, strict=True
            )
        ]

    def measure(self, submissions: Sequence[Submission]) -> list[Evidence | None]:
        """The cost of each source; None if it cannot be run."""
        calls = [calls_of(submission.component, submission.stage) for submission in submissions]
        evidence = []
        for result in self.run_sources(submissions, calls, "evidence"):
            lines = result.stdout.splitlines()
            parsed = parse_line(lines[-1]) if result.ok and len(lines) == 2 else None
            evidence.append(Evidence.model_validate(parsed) if isinstance(parsed, dict) and parsed else None)
        return evidence

    def mutate(self, submissions: Sequence[Submission]) -> list[MutationScore]:
        """Count the mutants of passing sources that fail their cases."""
        tasks = [
            {"mode": "mutants", "source": submission.source, "most": MOST_MUTANTS}
            for submission in submissions
        ]
        mutants_by_source = [
            parse_line(result.stdout) if result.ok else None
            for result in self._run([BatchJob(_main(t)) for t in tasks])
        ]
        mutants = [
            (number, mutant)
            for number, mutants_of_source in enumerate(mutants_by_source)
            for mutant in (mutants_of_source if isinstance(mutants_of_source, list) else [])
        ]
        verdicts = self.verify([submissions[number]._replace(source=m["source"]) for number, m in mutants])
        self.verified -= len(mutants)
        survived: list[list[int]] = [[] for _ in submissions]
        counts = [0] * len(submissions)
        for (number, mutant), verdict in zip(mutants, verdicts, strict=True):
            counts[number] += 1
            if verdict.ok:
                survived[number].append(int(mutant["line"]))
        return [
            MutationScore(mutants=count, killed=count - len(lines), survived=tuple(sorted(set(lines))))
            for count, lines in zip(counts, survived, strict=True)
        ]

    def _run(self, jobs: list[BatchJob]) -> list[SandboxResult]:
        return run_batch(jobs, sandbox=self._sandbox, prelude=prelude(), at_once=self._at_once)

    def run_sources(
        self, submissions: Sequence[Submission], calls: Sequence[list[PlannedCall]], mode: str
    ) -> list[SandboxResult]:
        """Run one program for each source, which makes the calls: for their values or for their cost."""
        jobs, package = [], self._plan.package
        for (component, source, _, modules), planned in zip(submissions, calls, strict=True):
            used = [f"{package}.{self._plan.get(identifier).module}" for identifier in component.dependencies]
            task = {
                "mode": mode,
                "module": f"{package}.{component.module}",
                "function": component.function,
                "source": source,
                "allowed": sorted({*ALWAYS_ALLOWED, *component.cases.imports, *used}),
                "calls": [
                    {
                        "args": call.args,
                        "named": call.named,
                        "again": bool(call.rule and call.rule.idempotent),
                        "then": f"{package}.{inverse.module}:{inverse.function}" if inverse else "",
                    }
                    for call in planned
                    for inverse in (self._plan.inverse_of(call.rule),)
                ],
            }
            files = {f"{package}/{name}": text for name, text in modules}
            files |= {f"{package}/__init__.py": "", f"{package}/{component.module}.py": source}
            jobs.append(BatchJob(_main(task), tuple(files.items())))
        return self._run(jobs)

    def judge(
        self, groups: list[tuple[Component, list[PlannedCall], list[dict[str, Any]]]]
    ) -> list[dict[int, bool | None]]:
        """Evaluate the expressions of properties in a sandbox without any of the sources. Several sources
        share a program; if that one fails, each gets its own.
        """
        questions: dict[int, dict[int, dict[str, Any]]] = {}
        for number, (component, calls, results) in enumerate(groups):
            parameters = [name for name, _ in component.parameters]
            items = {}
            for call_index, (call, outcome) in enumerate(zip(calls, results, strict=False)):
                if call.rule is not None and call.rule.holds:
                    names = dict(zip(parameters, call.args, strict=False))
                    names |= {"result": outcome.get("value"), "error": outcome.get("raises")}
                    items[call_index] = {"expression": call.rule.holds, "names": names}
            if items:
                questions[number] = items
        verdicts_by_call: list[dict[int, bool | None]] = [{} for _ in groups]
        numbers = list(questions)
        batch = [
            numbers[first : first + JUDGED_TOGETHER] for first in range(0, len(numbers), JUDGED_TOGETHER)
        ]
        while batch:
            repeats: list[list[int]] = []
            jobs = []
            for part in batch:
                items_of_part = [item for number in part for item in questions[number].values()]
                jobs.append(BatchJob(_main({"mode": "judge", "items": items_of_part})))
            for part, result in zip(batch, self._run(jobs), strict=True):
                answers = parse_line(result.stdout) if result.ok else None
                if isinstance(answers, list) and len(answers) == sum(
                    len(questions[number]) for number in part
                ):
                    verdicts = iter(answers)
                    for number in part:
                        verdicts_by_call[number] = {
                            call_index: next(verdicts) for call_index in questions[number]
                        }
                elif len(part) > 1:
                    repeats += [[number] for number in part]
            batch = repeats
        return verdicts_by_call


def _main(task: Mapping[str, Any]) -> str:
    return f"import harness\nharness.main({json.dumps(task)!r})\n"


class ReadResult(NamedTuple):
    facts: SourceFacts
    refused: str
    calls: list[dict[str, Any]]


def read_result(result: SandboxResult) -> ReadResult:
    """Read the result. The first line can be trusted: it was written before any of the source ran."""
    lines = result.stdout.splitlines()
    first = parse_line(lines[0]) if lines else None
    if not isinstance(first, dict) or "syntax" not in first:
        return ReadResult(SourceFacts(), _REASONS.get(result.reason, "could not be read"), [])
    refused = str(first.pop("refused", ""))
    facts = SourceFacts.model_validate(first)
    if refused:
        return ReadResult(facts, refused, [])
    if not result.ok:
        return ReadResult(facts, _REASONS.get(result.reason, "fails on import"), [])
    last = parse_line(lines[-1]) if len(lines) > 1 else None
    calls = last.get("calls") if isinstance(last, dict) else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return ReadResult(facts, "gave no values", [])
    return ReadResult(facts, "", calls)


def parse_line(line: str) -> Any:
    try:
        return json.loads(line, parse_constant=lambda _name: None)
    except (ValueError, RecursionError):
        return None


def conclude(
    submission: Submission, calls: list[PlannedCall], reading: ReadResult, rules_hold: dict[int, bool | None]
) -> SourceVerdict:
    ids = case_ids(submission.component, submission.stage)
    if reading.refused or len(reading.calls) != len(calls):
        reason = reading.refused or "returned the wrong number of values"
        return SourceVerdict(ok=False, reason=reason, cases=dict.fromkeys(ids, reason), facts=reading.facts)
    cases = dict.fromkeys(ids, "")
    for call_index, (call, result) in enumerate(zip(calls, reading.calls, strict=True)):
        if call.case is not None and not cases[call.case]:
            cases[call.case] = _fault(call, result, rules_hold.get(call_index))
    shape = result_shape(submission.component)
    values = [result["value"] for result in reading.calls if "value" in result]
    shape_ok = shape is None or all(fits(value, shape) for value in values)
    failed = next((f"{case_id}: {why}" for case_id, why in cases.items() if why), "")
    return SourceVerdict(
        ok=bool(cases) and not failed,
        reason=failed or ("" if cases else "there is no case"),
        cases=cases,
        facts=reading.facts,
        values=fingerprint([{k: r[k] for k in ("value", "raises") if k in r} for r in reading.calls]),
        shape_ok=shape_ok,
    )


def _fault(call: PlannedCall, result: dict[str, Any], holds: bool | None) -> str:
    """Return why a case fails; empty if it passes."""
    arguments = json.dumps([*call.args], ensure_ascii=False)[:200]
    if call.expected is None:
        assert call.rule is not None
        fault = _fault_of_property(call.rule, call.args, result, holds)
        return f"{arguments}{fault}" if fault else ""
    if is_right(call.expected, result):
        return ""
    raises, gives = call.expected.raises, call.expected.gives
    expectation = f"raise {raises}" if raises else f"give {_short(gives)}"
    outcome = f"raises {result['raises']}" if "raises" in result else f"gives {_short(result.get('value'))}"
    return f"{arguments} should {expectation}, {outcome}"


def _fault_of_property(
    rule: PropertyCase, args: tuple[Any, ...], result: dict[str, Any], holds: bool | None
) -> str:
    raised = result.get("raises")
    needs_value = rule.idempotent or rule.inverse
    if raised is not None and (
        needs_value or (rule.raises_only is not None and raised not in rule.raises_only)
    ):
        return f" raises {raised}"
    if rule.idempotent and not same_value(result.get("again"), result.get("value")):
        return ": its result gives another result"
    if rule.inverse and not same_value(result.get("then"), args[0] if args else None):
        return f" is not what {rule.inverse} gives back"
    if not rule.holds or holds:
        return ""
    return f": {rule.holds} {'cannot be evaluated' if holds is None else 'does not hold'}"


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:120]
