"""The score card of a component: every figure from evidence, thresholds as gates. Pure.

A judge's mark is shown next to the figures and decides nothing alone. docs/components.md defines each figure.
"""

from collections.abc import Sequence

from graftwork.components.generate.run import BuiltComponent
from graftwork.components.settings import ScoreThresholds
from graftwork.components.spec.cases import Language, case_covers, covered_by
from graftwork.components.spec.component import Component
from graftwork.components.verify import elixir, inside
from graftwork.components.verify.verifier import Evidence, MutationScore, SourceFacts, SourceVerdict
from graftwork.records.base import Record

MOST_COMPLEXITY, MOST_LINES = 10, 40
WEIGHTS = {
    "atomicity": 0.15,
    "compliance": 0.15,
    "integration": 0.15,
    "quality": 0.15,
    "performance": 0.10,
    "chain": 0.10,
    "coverage": 0.10,
    "consistency": 0.10,
}
QUALITY_RULES: dict[Language, int] = {"python": inside.QUALITY_RULES, "elixir": elixir.QUALITY_RULES}
WEAK_TESTS = 0.8


class ScoreCard(Record):
    """The figures of one component, None where there is no evidence for one."""

    component: str
    function: str
    built: bool
    scores: dict[str, float | None] = {}
    total: float | None = None
    """The weighted mean of the known figures, times 100."""
    gates: dict[str, bool] = {}
    notes: tuple[str, ...] = ()
    judge: float | None = None
    pass_at_1: dict[str, float] = {}
    """By stage: the share of its samples that held every case."""

    @property
    def ok(self) -> bool:
        return self.built and all(self.gates.values())


def score_component(
    component: Component,
    built: BuiltComponent,
    users: Sequence[BuiltComponent],
    mutation: MutationScore | None,
    thresholds: ScoreThresholds,
    *,
    language: Language = "python",
) -> ScoreCard:
    if not built.stages or built.failed:
        where = f"stage {built.failed_stage}: " if built.failed_stage else ""
        return ScoreCard(
            component=component.id, function=component.function, built=False, notes=(where + built.failed,)
        )
    last = built.stages[-1]
    facts, verdict, evidence = last.verdict.facts, last.verdict, last.evidence
    sampled = [stage for stage in built.stages if stage.samples > 1 and stage.stage != 3]
    scores: dict[str, float | None] = {
        "atomicity": atomicity(facts),
        "adherence": _mean([held for stage in built.stages for held in stage.checks.values()]),
        "compliance": compliance(component, verdict),
        "supervision": _mean([stage.held_back for stage in built.stages if stage.held_back is not None]),
        "integration": integration(component, built),
        "chain": _mean([user.stages[-1].verdict.share for user in users if user.stages and not user.failed]),
        "performance": performance(component, evidence),
        "quality": 1 - min(1.0, len(facts.quality) / QUALITY_RULES[language]),
        "coverage": evidence.coverage if evidence is not None else None,
        "mutation": mutation.score if mutation is not None else None,
        "consistency": sampled[-1].alike / sampled[-1].samples if sampled else None,
    }
    weights = {name: weight for name, weight in WEIGHTS.items() if scores.get(name) is not None}
    weighted = sum(weight * (scores[name] or 0.0) for name, weight in weights.items())
    return ScoreCard(
        component=component.id,
        function=component.function,
        built=True,
        scores={name: None if value is None else round(value, 4) for name, value in scores.items()},
        total=round(100 * weighted / sum(weights.values()), 1) if weights else None,
        gates=apply_gates(scores, thresholds),
        notes=tuple(_notes(component, built, facts, mutation)),
        pass_at_1={
            str(stage.stage): round(stage.passed / stage.samples, 4)
            for stage in built.stages
            if stage.samples
        },
    )


def atomicity(facts: SourceFacts) -> float:
    """One public callable, no effect on import, no complexity over 10, at most 40 lines, allowed imports."""
    checks = (
        len(facts.public) == 1,
        not facts.effects,
        facts.complexity <= MOST_COMPLEXITY,
        facts.lines <= MOST_LINES,
        # What the spec does not allow is refused before it runs.
        not facts.forbidden,
    )
    return sum(checks) / len(checks)


def compliance(component: Component, verdict: SourceVerdict) -> float:
    """The signature, the type of every value, and every requirement that has a case."""
    checks = [has_signature(component, verdict.facts), verdict.shape_ok]
    for text in covered_by(component.cases):
        deciding = [each for each, covers in case_covers(component.cases).items() if text in covers]
        checks.append(all(not verdict.cases.get(each, "missing") for each in deciding))
    return sum(checks) / len(checks)


def has_signature(component: Component, facts: SourceFacts) -> bool:
    """The parameters of the spec by name and in order; further ones need not be given.

    A language whose arguments have places only gives no names.
    """
    if not component.parameters:
        return True
    count = len(component.parameters)
    if len(facts.parameters) < count or any(each["needed"] for each in facts.parameters[count:]):
        return False
    return all(
        str(found["name"]) in (name, "")
        for found, (name, _) in zip(facts.parameters, component.parameters, strict=False)
    )


def integration(component: Component, built: BuiltComponent) -> float:
    """The share of its cases that hold with real dependencies; with a stand-in for any, none does."""
    real = 1 - len(built.stubs) / len(component.dependencies) if component.dependencies else 1.0
    return built.stages[-1].verdict.share if real == 1.0 else 0.0


def performance(component: Component, evidence: Evidence | None) -> float | None:
    limits = component.cases.limits
    if evidence is None:
        return None
    kept = []
    if limits.events is not None:
        kept.append(evidence.events <= limits.events)
    if limits.memory_kib is not None:
        kept.append(evidence.peak_bytes <= limits.memory_kib * 1024)
    return _mean(kept)


def apply_gates(scores: dict[str, float | None], thresholds: ScoreThresholds) -> dict[str, bool]:
    """A figure without evidence fails its gate, unless the question does not arise."""
    gates = {}
    for name, least in thresholds.model_dump().items():
        if least is not None:
            value = scores.get(name)
            if value is not None or name not in ("supervision", "adherence", "performance", "consistency"):
                gates[name] = value is not None and value >= least
    return gates


def _mean(shares: Sequence[float]) -> float | None:
    return sum(shares) / len(shares) if shares else None


def _notes(
    component: Component, built: BuiltComponent, facts: SourceFacts, mutation: MutationScore | None
) -> list[str]:
    notes = []
    if built.handwritten:
        notes.append("written by hand, verified, not changed")
    if built.stubs:
        notes.append(f"verified with stand-ins for {', '.join(built.stubs)}")
    unproven = [text for text in component.requirements if text not in covered_by(component.cases)]
    if unproven:
        notes.append(f"{len(unproven)} of {len(component.requirements)} requirements have no case")
    if mutation is not None and mutation.score is not None and mutation.score < WEAK_TESTS:
        lines = ", ".join(map(str, mutation.survived[:8]))
        notes.append(
            f"weak cases: {mutation.killed} of {mutation.mutants} mutants are noticed (lines {lines})"
        )
    notes += [f"quality: {finding}" for finding in facts.quality]
    return notes
