"""The gate for an engine: may these weights be served by llama.cpp?

In: an open project and the engine as `serve.engine` names it. Out: a verdict by the project's own rules, kept
by the hash of the adapter or prompt and the engine's name, version and precision.
"""

from collections.abc import Collection

from graftwork.data.project import PreparedData
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.project import (
    describe_engine,
    keep_engine_verdict,
    look_for_champion,
    surroundings_of,
    with_champion,
)
from graftwork.evaluate.project_subjects import resolve_subject
from graftwork.evaluate.subjects import Asking, Lineup, NamedSubject, parse_subject
from graftwork.pipeline.steps.evaluate import (
    ADAPTER,
    BASE,
    held_out,
    measure_lineup,
    put_cases,
    worked_example,
)
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject
from graftwork.records.errors import UserMistake
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import find_release

GATED = ("llamacpp",)
"""Engines other than the embedded one that can answer the held-out cases."""


def gate_engine(
    work: OpenProject,
    engine: EngineSettings,
    *,
    release: str | None = None,
    may_do: Collection[str] | None = None,
) -> Verdict:
    """Ask the held-out cases through the engine and decide. Without a release, about the last adapter."""
    if engine.kind not in GATED:
        raise UserMistake(
            f"the engine {engine.kind} cannot be gated",
            why=f"held-out cases can be answered by {', '.join(GATED)}",
            fix="evaluate it as an endpoint, `graft eval --subject URL#model`, and serve it with "
            "`serve.require_gate_for_engine: false`",
            where="--engine",
        )
    made = run_pipeline(work, upto="train" if release is None else "prepare", may_do=may_do)
    prepared = made.get("prepare", PreparedData)
    outcome = made.get("train", TrainOutcome) if release is None else None
    cases = held_out(work, prepared)
    asking = Asking(put_cases(work, cases), example=worked_example(work, prepared))
    asked = ADAPTER if release is None else f"release:{release}"
    candidate = resolve_subject(work, _through(engine, asked), asking=asking, outcome=outcome)
    lineup = Lineup(
        baseline=resolve_subject(work, parse_subject(BASE), asking=asking, outcome=outcome),
        candidate=candidate,
        # The same weights as they were evaluated, to see what the engine changes.
        others=(resolve_subject(work, parse_subject(asked), asking=asking, outcome=outcome),),
    )
    # Weights on another engine must pass this gate and their own: no second chance, no further look.
    adapter_hash = (
        outcome.adapter_hash
        if outcome is not None
        else find_release(work.releases, release or "").adapter_hash
    )
    evaluated = measure_lineup(work, lineup, cases, asking=asking, subject=adapter_hash, prepared=prepared)
    champion = look_for_champion(work, adapter_hash=adapter_hash)
    report = with_champion(work, evaluated.report, champion.release)
    verdict = decide(report, work.settings.gate, around=surroundings_of(champion))
    verdict = verdict.model_copy(
        update={"notes": (f"judged as served by {describe_engine(engine)}", *verdict.notes)}
    )
    keep_engine_verdict(work, adapter_hash, engine, verdict)
    return verdict


def _through(engine: EngineSettings, asked: str) -> NamedSubject:
    return parse_subject(f"engine:{engine.kind}/{engine.precision}@{asked}")
