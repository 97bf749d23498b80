"""Which engine answers, in which precision, and how it is opened.

In: the jobs of one evaluation. Out: one engine for all of them, since answers of two engines differ in
their last digits, and a comparison would take that for a difference of the models. vLLM is used on a card;
on the processor, where loading it takes longer than a small evaluation, only if GRAFT_VLLM=1; GRAFT_VLLM=0
never uses it. GRAFT_ENGINE names an engine of an installed package. Loads neither vLLM nor, on the
processor, torch.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftwork.inference.embedded import EMBEDDED, REVISION, EmbeddedEngine, precision_on
from graftwork.inference.engine import EngineSource, MeasuringEngine
from graftwork.inference.llamacpp import DEFAULT_PRECISION, LLAMACPP, LlamaCppEngine, engine_version
from graftwork.inference.vllm_engine import (
    SWITCH,
    TRIED,
    VllmEngine,
    adapted_modules,
    lora_rank,
    vllm_version,
)
from graftwork.process.extensions import load_extension
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import EvalJob

VLLM = "vllm"
ENGINE_VARIABLE = "GRAFT_ENGINE"
ADAPTER = "adapter"
"""The name under which an engine holds the adapter of a job."""
PRECISIONS = ("float32", "bfloat16", "float16")
REQUIRED = ("answer", "render", "stream", "time_one", "reply_losses", "peak_memory_gib", "close")
"""What the engine of an extension must have."""


def agree_on_engine(jobs: Sequence[EvalJob]) -> str:
    """The engine that can answer for all of these: `graftwork`, `vllm` with its version, or an extension."""
    if (named := os.environ.get(ENGINE_VARIABLE, "").strip()) not in ("", EMBEDDED, VLLM):
        return named
    models = [job for job in jobs if job.endpoint is None]
    if not models or named == EMBEDDED or not all(can_use_vllm(job) for job in models):
        return EMBEDDED
    version = vllm_version()
    tested = version == TRIED or version.startswith(f"{TRIED}.")
    if not tested and os.environ.get(SWITCH) != "1":
        raise EnvironmentLacks(
            f"vLLM {version} is installed, and Graftwork was not tested with it",
            why=f"its interface changes from version to version; {TRIED} was tested",
            fix=f"set {SWITCH}=0 to use Graftwork's own engine, {SWITCH}=1 to try this vLLM "
            f"nevertheless, or install vLLM {TRIED}",
            where="vllm",
        )
    return f"{VLLM} {version}"


def settle(job: EvalJob) -> EvalJob:
    """The job with engine and precision named, as its answers are kept under both."""
    if job.endpoint is not None:
        return job
    return job.model_copy(
        update={"engine": job.engine or agree_on_engine([job]), "precision": job.precision or _precision(job)}
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
    if kind == VLLM:
        return f"{VLLM} {vllm_version()}"
    return kind


def is_alone(job: EvalJob) -> bool:
    """Whether the job's engine cannot share a process with those of other subjects."""
    return job.engine.partition(" ")[0] in (VLLM, LLAMACPP)


def is_vllm(job: EvalJob) -> bool:
    return job.engine.partition(" ")[0] == VLLM


def can_use_vllm(job: EvalJob) -> bool:
    """Whether this job's subject can be asked through vLLM here."""
    wanted = os.environ.get(SWITCH)
    if wanted == "0" or (wanted != "1" and not job.device.startswith("cuda")):
        return False
    if importlib.util.find_spec("vllm") is None:
        return False
    if job.adapter_folder is None:
        return True
    folder = Path(job.adapter_folder)
    adapted = adapted_modules(folder)
    # With an adapter on its last layer, vLLM 0.32 cannot compute the loss of a given reply.
    scores_last_layer = job.perplexity and "lm_head" in adapted
    return bool(adapted) and not scores_last_layer and lora_rank(folder) is not None


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
    if kind == VLLM:
        return VllmEngine(source, called=name)
    if kind == LLAMACPP:
        return LlamaCppEngine(source)
    return _open_extension(kind, source)


def _open_extension(name: str, source: EngineSource) -> MeasuringEngine:
    opened: Any = load_extension("graftwork.engines", name)(source)
    missing = [attribute for attribute in (*REQUIRED, "facts", "adapters") if not hasattr(opened, attribute)]
    if missing:
        raise EnvironmentLacks(
            f"the engine {name!r} has no {', '.join(missing)}",
            why="graftwork.inference.engine.MeasuringEngine names what an engine must have",
            fix=f"update the package that provides {name!r}",
        )
    engine: MeasuringEngine = opened
    return engine


def _precision(job: EvalJob) -> str:
    """As the model is served."""
    if job.engine.partition(" ")[0] == LLAMACPP:
        return DEFAULT_PRECISION
    return precision_on(job.device)
