"""Which engine answers, in which precision, and how it is opened.

In: the jobs of one evaluation. Out: one engine for all of them, since answers of two engines differ in
their last digits, and a comparison would take that for a difference of the models. GRAFT_ENGINE names an
engine of an installed package. Loads no torch on the processor.
"""

import os
from pathlib import Path
from typing import Any

from graftwork.engines.embedded import EMBEDDED, REVISION, EmbeddedEngine, precision_on
from graftwork.engines.interface import EngineSource, MeasuringEngine
from graftwork.engines.llamacpp import DEFAULT_PRECISION, LLAMACPP, LlamaCppEngine, engine_version
from graftwork.process.extensions import load_extension
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import EvalJob

ENGINE_VARIABLE = "GRAFT_ENGINE"
ADAPTER = "adapter"
"""The name under which an engine holds the adapter of a job."""
PRECISIONS = ("float32", "bfloat16", "float16")
REQUIRED = ("answer", "render", "time_one", "reply_losses", "peak_memory_gib", "close")
"""What the engine of an extension must have."""


def agree_on_engine() -> str:
    """The engine that answers for all subjects which name none: our own, or that of an extension."""
    return os.environ.get(ENGINE_VARIABLE, "").strip() or EMBEDDED


def settle(job: EvalJob) -> EvalJob:
    """The job with engine and precision named, as its answers are kept under both."""
    if job.endpoint is not None:
        return job
    return job.model_copy(
        update={
            "engine": job.engine or agree_on_engine(),
            # As the model is served.
            "precision": job.precision or (DEFAULT_PRECISION if is_alone(job) else precision_on(job.device)),
        }
    )


def answered_by(job: EvalJob) -> list[str | int] | None:
    """What stands for the engine in the identity of answers; None for an endpoint."""
    if job.endpoint is not None:
        return None
    embedded = job.engine.partition(" ")[0] in ("", EMBEDDED)
    return [job.engine, job.precision, *([REVISION] if embedded else [])]


def name_engine(kind: str) -> str:
    """The engine of this kind with the version that is installed here, as jobs and verdicts name it."""
    if kind == LLAMACPP:
        return f"{LLAMACPP} {engine_version()}"
    return kind


def is_alone(job: EvalJob) -> bool:
    """Whether the job's engine cannot share a process with those of other subjects."""
    return job.engine.partition(" ")[0] == LLAMACPP


def source_of(job: EvalJob) -> EngineSource:
    """What an engine loads for a job that `settle` has completed."""
    return EngineSource(
        base_folder=Path(job.base_folder),
        adapters={ADAPTER: Path(job.adapter_folder)} if job.adapter_folder is not None else {},
        device=job.device,
        precision=job.precision,
        threads=job.threads,
        reasoning=job.reasoning,
        fingerprint=job.identity,
        rows=job.batch_size,
    )


def open_engine(name: str, source: EngineSource) -> MeasuringEngine:
    """Load the engine of this name; a version behind it is not looked at."""
    kind = name.partition(" ")[0]
    if kind == EMBEDDED:
        return EmbeddedEngine(source)
    if kind == LLAMACPP:
        return LlamaCppEngine(source)
    opened: Any = load_extension("graftwork.engines", kind)(source)
    missing = [attribute for attribute in (*REQUIRED, "facts", "adapters") if not hasattr(opened, attribute)]
    if missing:
        raise EnvironmentLacks(
            f"the engine {kind!r} has no {', '.join(missing)}",
            why="graftwork.engines.interface.MeasuringEngine names what an engine must have",
            fix=f"update the package that provides {kind!r}",
        )
    engine: MeasuringEngine = opened
    return engine
