"""Components of a plan through the four stages, in the order of their dependencies.

Input: a plan, a model, a verifier, a journal. Output: what was accepted for every component, or why nothing
was. A stage accepts the best of n answers that hold every case so far and keep to the method; what passed
once never fails later. The same call resumes a run that was killed.

Whether a stage kept to the method is checked on sources, values and counts, never judged: stage 1 has no
optimization, stage 2 changes nothing that passed, stage 3 gives the same values for less, stage 4 adds only
handling and monitoring.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from graftwork.components import elixir
from graftwork.components.attempts import (
    Attempt,
    Attempts,
    GenerationJournal,
    OnProgress,
    Question,
    shown_calls,
    source_of,
    submission_key,
    write_prompt,
)
from graftwork.components.cases import Language, Stage, hidden_ids
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.settings import GenerateOptions
from graftwork.components.verifier import Evidence, SourceFacts, SourceVerdict, Submission
from graftwork.records.base import Record, fingerprint
from graftwork.text.wording import plural

HANDLING = frozenset({"Raise", "Return", "Assert", "If", "Import", "ImportFrom", "Pass", "Continue", "Break"})
"""Statements that stage 4 may add, in addition to calls of a logger."""
KEPT_SHARE = 0.5
"""Share of the statements of stage 3 that stage 4 keeps word for word."""


class StageState(Record):
    """A source at the end of a stage, with what is known about it."""

    source: str
    verdict: SourceVerdict
    evidence: Evidence | None = None


def check_stage(stage: Stage, before: StageState | None, after: StageState) -> dict[str, bool]:
    """Check a stage; results by name. An unchanged source complies with every method."""
    facts = after.verdict.facts
    if stage == 1 or before is None:
        return {"stage 1 has no optimisation": not facts.optimisations}
    if before.source == after.source:
        return {f"stage {stage} keeps the source": True}
    checks = {
        f"stage {stage} keeps the interface": keeps_interface(before.verdict.facts, facts),
        f"stage {stage} keeps what passed": all(
            not after.verdict.cases.get(case, "missing")
            for case, fault in before.verdict.cases.items()
            if not fault
        ),
    }
    if stage == 3:
        checks["stage 3 gives the same values"] = before.verdict.values == after.verdict.values
        checks["stage 3 needs less"] = needs_less(before.evidence, after.evidence)
    if stage == 4 and before.verdict.facts.statements:
        checks["stage 4 adds only handling and monitoring"] = adds_only_handling(before.verdict.facts, facts)
    return checks


def keeps_interface(before: SourceFacts, after: SourceFacts) -> bool:
    """Whether the public names are the same, the parameters start the same, and new ones are optional."""
    count = len(before.parameters)
    same = after.parameters[:count] == before.parameters and before.public == after.public
    return same and not any(parameter["needed"] for parameter in after.parameters[count:])


def needs_less(before: Evidence | None, after: Evidence | None) -> bool:
    """Fewer executed lines and no more memory, or less memory and no more lines."""
    if before is None or after is None:
        return False
    fewer, lighter = after.events < before.events, after.peak_bytes < before.peak_bytes * 0.95
    return (fewer and after.peak_bytes <= before.peak_bytes * 1.25 + 1024) or (
        lighter and after.events <= before.events
    )


def adds_only_handling(before: SourceFacts, after: SourceFacts) -> bool:
    old, new = Counter(before.statements), Counter(after.statements)
    added = new - old
    share = (old & new).total() / max(1, old.total())
    return share >= KEPT_SHARE and all(
        kind in HANDLING
        or (kind == "Expr" and text.startswith(("log.", "logger.", "logging.", "_log.")))
        or (kind == "Assign" and "logging.getLogger" in text)
        for kind, text in added
    )


ACCEPTED, FAILED = "accepted", "failed"
STAGES: tuple[Stage, ...] = (1, 2, 3, 4)
ENDINGS: dict[Language, str] = {"python": ".py", "elixir": ".ex"}
How = Literal["answer", "kept", "handwritten"]


class AcceptedStage(Record):
    """The outcome of a stage."""

    component: str
    stage: Stage
    how: How
    source: str
    answer: str = ""
    """The key of the answer in the journal; empty if the source was kept."""
    submission: str = ""
    """The key of its verdict."""
    checks: dict[str, bool] = {}
    verdict: SourceVerdict
    evidence: Evidence | None = None
    samples: int = 0
    passed: int = 0
    alike: int = 0
    """Samples of the accepting round, those that passed every case, and those that behaved like this one."""
    held_back: float | None = None
    """Mean share of hidden cases that pass, over samples that pass every shown case."""


class BuiltComponent(Record):
    """A component and its stages; if it failed, `failed` says at which stage and why."""

    id: str
    function: str
    stages: tuple[AcceptedStage, ...] = ()
    failed_stage: int | None = None
    failed: str = ""
    handwritten: bool = False
    stubs: tuple[str, ...] = ()
    """Dependencies that were replaced by stand-ins."""

    @property
    def source(self) -> str | None:
        return self.stages[-1].source if self.stages and not self.failed else None


class ComponentBuilder:
    """Builds the components of one plan."""

    def __init__(
        self,
        plan: ComponentPlan,
        attempts: Attempts,
        journal: GenerationJournal,
        settings: GenerateOptions,
        *,
        handwritten: dict[str, str] | None = None,
        on_progress: OnProgress = lambda _phase, _done, _total: None,
    ) -> None:
        self._plan, self._attempts, self._journal, self._settings = plan, attempts, journal, settings
        self._handwritten = handwritten or {}
        self._progress = on_progress
        self.built: dict[str, BuiltComponent] = {}

    def run(
        self, wanted_ids: Sequence[str], *, stages: Sequence[Stage] = STAGES, recalled: Collection[str] = ()
    ) -> list[BuiltComponent]:
        """Build these components and everything that they depend on. `recalled` are rebuilt from the journal
        alone, without prompts.
        """
        chosen_ids = with_dependencies(self._plan, wanted_ids)
        for wave in self._plan.waves():
            members = [component for component in wave if component.id in chosen_ids]
            for component in members:
                stubs = tuple(
                    dependency for dependency in component.dependencies if self._source(dependency) is None
                )
                started = BuiltComponent(id=component.id, function=component.function, stubs=stubs)
                if component.module in self._handwritten:
                    started = self._take_handwritten(component, started, self._handwritten[component.module])
                elif not component.cases.calls and not component.cases.properties:
                    reason = (
                        f"component {component.id} has no executable case (line {component.line} of the "
                        "specification); write calls or properties for it in the cases"
                    )
                    started = self._fail(started, 1, reason)
                self.built[component.id] = started
            for component in wave:
                if component.id in recalled and component.id not in chosen_ids:
                    self._recall(component)
            for stage in stages:
                states = [(component, self.built[component.id]) for component in members]
                self._run_stage(
                    [component for component, s in states if not s.failed and not s.handwritten], stage
                )
            done = sum(identifier in chosen_ids for identifier in self.built)
            self._progress("components", done, len(chosen_ids))
        return [self.built[component.id] for component in self._plan.components if component.id in self.built]

    def _recall(self, component: Component) -> None:
        """Return what earlier runs accepted for it, with the same specification and dependencies."""
        started = BuiltComponent(id=component.id, function=component.function)
        if any(self._source(dependency) is None for dependency in component.dependencies):
            return
        if component.module in self._handwritten:
            started = self._take_handwritten(component, started, self._handwritten[component.module])
        self.built[component.id] = started
        for stage in STAGES if not started.handwritten else ():
            entry = self._journal.find(
                ACCEPTED, self._stage_key(component, stage, self._source(component.id))
            )
            if entry is not None:
                self._accept(component, AcceptedStage.model_validate(entry["stage"]))
        if self.built[component.id].source is None:
            del self.built[component.id]

    def _take_handwritten(self, component: Component, started: BuiltComponent, source: str) -> BuiltComponent:
        """Verify and use a file that a person wrote; never replace it."""
        submission = self._submit(component, source, 4)
        [verdict] = self._attempts.verify([submission])
        if not verdict.ok:
            file = component.module + ENDINGS[self._plan.language]
            reason = f"the handwritten {file} does not hold its cases: {verdict.reason}"
            return self._fail(started.model_copy(update={"handwritten": True}), 4, reason)
        [evidence] = self._attempts.measure([submission])
        stage = AcceptedStage(
            component=component.id,
            stage=4,
            how="handwritten",
            source=source,
            submission=submission_key(submission),
            verdict=verdict,
            evidence=evidence,
        )
        return started.model_copy(update={"handwritten": True, "stages": (stage,)})

    def _source(self, identifier: str) -> str | None:
        return self.built[identifier].source if identifier in self.built else None

    def modules_for(self, component: Component) -> tuple[tuple[str, str], ...]:
        """Return the files of everything that a component depends on, with stand-ins for what is not
        built.
        """
        files: dict[str, str] = {}
        waiting = [*component.dependencies, *component.after]
        while waiting:
            dependency = self._plan.get(waiting.pop())
            name = f"{dependency.module}{ENDINGS[self._plan.language]}"
            if name not in files and dependency.id != component.id:
                is_elixir = self._plan.language == "elixir"
                stub = elixir.write_stub(self._plan, dependency) if is_elixir else write_stub(dependency)
                files[name] = self._source(dependency.id) or stub
                waiting += dependency.dependencies
        return tuple(sorted(files.items()))

    def _submit(self, component: Component, source: str, stage: Stage) -> Submission:
        return Submission(component, source, stage, self.modules_for(component))

    def _run_stage(self, components: list[Component], stage: Stage) -> None:
        # What was accepted so far, by the cases of this stage: one batch instead of one source at a time.
        accepted = [
            self._submit(component, stages[-1].source, stage)
            for component in components
            if (stages := self.built[component.id].stages)
        ]
        verdicts = self._attempts.verify(accepted)
        self._attempts.measure(
            [submission for submission, verdict in zip(accepted, verdicts, strict=True) if verdict.ok]
        )
        open_components = []
        for component in components:
            before = self._before(component, stage)
            entry = self._journal.find(
                ACCEPTED, self._stage_key(component, stage, self._source(component.id))
            )
            if entry is not None:
                self._accept(component, AcceptedStage.model_validate(entry["stage"]))
            elif before is not None and before.verdict.ok and stage != 3:
                # Stages 2 and 4 ask for nothing that holds already; stage 3 always tries.
                self._keep(component, stage, before)
            else:
                open_components.append(component)
        feedback: dict[str, str] = {}
        tried: dict[str, list[Attempt]] = {component.id: [] for component in open_components}
        for round_number in range(self._settings.rounds):
            if not open_components:
                return
            candidates = self._attempt(open_components, stage, round_number, feedback)
            open_components = [
                component
                for component in open_components
                if not self._choose(component, stage, candidates[component.id])
            ]
            feedback = {
                component.id: self._feedback(component, stage, candidates[component.id])
                for component in open_components
            }
            for component in open_components:
                tried[component.id] += candidates[component.id]
        for component in open_components:
            self._give_up(component, stage, tried[component.id])

    def _before(self, component: Component, stage: Stage) -> StageState | None:
        """Return what was accepted last, verified by the cases of this stage."""
        stages = self.built[component.id].stages
        if not stages:
            return None
        submission = self._submit(component, stages[-1].source, stage)
        [verdict] = self._attempts.verify([submission])
        [evidence] = self._attempts.measure([submission]) if verdict.ok else [None]
        return StageState(source=stages[-1].source, verdict=verdict, evidence=evidence)

    def _stage_key(self, component: Component, stage: Stage, source: str | None) -> str:
        """Return the key of a stage; `source` is what was accepted before."""
        content = component.model_dump(mode="json", exclude={"line"})
        return fingerprint([content, stage, source or "", self.modules_for(component)])[:24]

    def _keep(
        self, component: Component, stage: Stage, before: StageState, attempts: Sequence[Attempt] = ()
    ) -> None:
        """Keep the accepted source; `asked` are the answers of the first round, none of which is better."""
        state = AcceptedStage(
            component=component.id,
            stage=stage,
            how="kept",
            source=before.source,
            submission=submission_key(self._submit(component, before.source, stage)),
            checks=check_stage(stage, before, before),
            verdict=before.verdict,
            evidence=before.evidence,
            samples=len(attempts),
            passed=sum(attempt.verdict.ok for attempt in attempts),
        )
        self._record(component, stage, before, state)

    def _record(
        self, component: Component, stage: Stage, before: StageState | None, state: AcceptedStage
    ) -> None:
        key = self._stage_key(component, stage, before.source if before is not None else None)
        self._journal.add(ACCEPTED, key, stage=state.model_dump(mode="json"))
        self._accept(component, state)

    def _accept(self, component: Component, state: AcceptedStage) -> None:
        current = self.built[component.id]
        self.built[component.id] = current.model_copy(update={"stages": (*current.stages, state)})

    def _attempt(
        self, components: list[Component], stage: Stage, round_number: int, feedback: dict[str, str]
    ) -> dict[str, list[Attempt]]:
        questions = []
        for component in components:
            stages = self.built[component.id].stages
            messages = write_prompt(
                self._plan,
                component,
                stage,
                source=stages[-1].source if stages else "",
                feedback=feedback.get(component.id, ""),
            )
            questions += [
                Question(component, stage, round_number, sample, messages)
                for sample in range(self._settings.samples)
            ]
        answers = self._attempts.ask(questions)
        submitted = [
            self._submit(question.component, source_of(answer, self._plan.language), stage)
            for question, answer in zip(questions, answers, strict=True)
        ]
        verdicts = self._attempts.verify(submitted)
        good = [submission for submission, verdict in zip(submitted, verdicts, strict=True) if verdict.ok]
        measured = dict(zip(map(submission_key, good), self._attempts.measure(good), strict=True))
        attempts: dict[str, list[Attempt]] = {component.id: [] for component in components}
        for answer, submission, verdict in zip(answers, submitted, verdicts, strict=True):
            evidence = measured.get(submission_key(submission))
            self._attempts.note(answer["key"], submission, verdict)
            attempts[submission.component.id].append(Attempt(answer["key"], submission, verdict, evidence))
        return attempts

    def _choose(self, component: Component, stage: Stage, candidates: list[Attempt]) -> bool:
        """Accept the best candidate; False if none is acceptable."""
        before = self._before(component, stage)
        fitting = []
        for number, attempt in enumerate(candidates):
            if not attempt.verdict.ok or attempt.evidence is None:
                continue
            after = StageState(
                source=attempt.submission.source, verdict=attempt.verdict, evidence=attempt.evidence
            )
            checks = check_stage(stage, before, after)
            if not all(checks.values()):
                continue
            facts = attempt.verdict.facts
            # Stage 3 takes what costs least; the others the cleanest, then the shortest.
            if stage == 3:
                rank = (attempt.evidence.events, attempt.evidence.peak_bytes, facts.lines, number)
            else:
                unclean = len(facts.effects) + max(0, len(facts.public) - 1)
                rank = (unclean, len(facts.quality), facts.lines, number)
            fitting.append((rank, checks))
        if not fitting:
            return False
        rank, checks = min(fitting, key=lambda ranked: ranked[0])
        best = candidates[rank[-1]]
        state = AcceptedStage(
            component=component.id,
            stage=stage,
            how="answer",
            source=best.submission.source,
            answer=best.key,
            submission=submission_key(best.submission),
            checks=checks,
            verdict=best.verdict,
            evidence=best.evidence,
            samples=len(candidates),
            passed=sum(attempt.verdict.ok for attempt in candidates),
            alike=sum(attempt.verdict.values == best.verdict.values for attempt in candidates),
            held_back=held_back(component, [attempt.verdict for attempt in candidates]),
        )
        self._record(component, stage, before, state)
        return True

    def _give_up(self, component: Component, stage: Stage, candidates: list[Attempt]) -> None:
        before = self._before(component, stage)
        if before is not None and before.verdict.ok:
            # No answer was better: what holds already stays.
            self._keep(component, stage, before, candidates[: self._settings.samples])
            return
        current = self.built[component.id]
        best = max(candidates, key=lambda attempt: attempt.verdict.share)
        answers = plural(len(candidates), "answer")
        if best.verdict.ok:
            method = self._broken_method(component, stage, best)
            passed = sum(attempt.verdict.ok for attempt in candidates)
            reason = f"{passed} of {answers} pass the cases, but none follows the method: {method}"
        elif all(map(self._attempts.is_prose, candidates)):
            reason = f"{answers} without code: the model writes prose"
        else:
            cases = f"{best.verdict.passed} of {len(best.verdict.cases)} cases"
            reason = f"the best of {answers} holds {cases}: {best.verdict.reason}"
        if current.stubs:
            stubs = ", ".join(current.stubs)
            reason += f" (with a stand-in for {stubs}, which could not be built and knows only its own cases)"
        self.built[component.id] = self._fail(current, stage, reason)

    def _broken_method(self, component: Component, stage: Stage, attempt: Attempt) -> str:
        after = StageState(
            source=attempt.submission.source, verdict=attempt.verdict, evidence=attempt.evidence
        )
        checks = check_stage(stage, self._before(component, stage), after)
        broken = (
            ", ".join(name for name, passes in checks.items() if not passes) or "its cost cannot be measured"
        )
        used = ", ".join(attempt.verdict.facts.optimisations)
        return f"{broken} (it uses {used})" if stage == 1 and used else broken

    def _feedback(self, component: Component, stage: Stage, candidates: list[Attempt]) -> str:
        """Why the best attempt failed, without revealing hidden cases."""
        if not candidates:
            return ""
        best = max(candidates, key=lambda attempt: attempt.verdict.share)
        if best.verdict.ok:
            return f"it does not follow the method: {self._broken_method(component, stage, best)}"
        if self._attempts.is_prose(best):
            return "the answer has no code block"
        case_ids = [call.id for call in shown_calls(component, stage)]
        reasons = [best.verdict.cases.get(case_id, "") for case_id in case_ids]
        failed = next((reason for reason in reasons if reason), "")
        return failed or "a hidden case fails"

    def _fail(self, started: BuiltComponent, stage: int, reason: str) -> BuiltComponent:
        key = fingerprint([started.id, stage, reason])[:24]
        self._journal.add_once(FAILED, key, component=started.id, stage=stage, reason=reason)
        return started.model_copy(update={"failed": reason, "failed_stage": stage})


def with_dependencies(plan: ComponentPlan, wanted_ids: Sequence[str]) -> set[str]:
    ids: set[str] = set()
    waiting = list(wanted_ids)
    while waiting:
        component = plan.get(waiting.pop())
        if component.id not in ids:
            ids.add(component.id)
            waiting += [*component.dependencies, *component.after]
    return ids


def held_back(component: Component, verdicts: Sequence[SourceVerdict]) -> float | None:
    """Return the mean share of hidden cases that pass, over the samples that pass every shown case."""
    hidden = hidden_ids(component.cases)
    shares = []
    for verdict in verdicts:
        unseen = [not reason for case, reason in verdict.cases.items() if case in hidden]
        shown_outcomes = [not reason for case, reason in verdict.cases.items() if case not in hidden]
        if unseen and all(shown_outcomes):
            shares.append(sum(unseen) / len(unseen))
    return sum(shares) / len(shares) if shares else None


STUB_MARK = "# stub of a component that is not built"


def write_stub(component: Component) -> str:
    """A stand-in that returns the expected values for the arguments in its cases, and raises
    NotImplementedError for all others.
    """
    known_calls = [
        [list(call.args), call.gives, call.raises] for call in component.cases.calls if not call.named
    ]
    return (
        f"{STUB_MARK}\n"
        "import builtins\nimport json\n\n"
        f"_KNOWN = json.loads({json.dumps(known_calls)!r})\n\n\n"
        f"def {component.function}(*args):\n"
        "    given = json.loads(json.dumps(args))\n"
        "    for arguments, value, error in json.loads(json.dumps(_KNOWN)):\n"
        "        if given == arguments:\n"
        "            if error:\n"
        "                raise getattr(builtins, error, ValueError)(error)\n"
        "            return value\n"
        f"    raise NotImplementedError({component.id!r})\n"
    )
