"""Verdicts about weights on engines other than the embedded one, and the rule that serving needs one.

In: a release and the engine as `serve.engine` names it. Out: the verdict that `engine_gate` kept, or a
refusal. Conversion and quantization change answers: a verdict on the embedded engine says nothing of another.
"""

import re
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import make_folder, write_atomic
from graftwork.inference.selection import name_engine
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.errors import AnswerIsNo
from graftwork.records.release import Release
from graftwork.records.report import Verdict
from graftwork.serve.settings import EngineSettings, ServeSettings


def describe_engine(engine: EngineSettings) -> str:
    """The engine as a verdict names it: another version or precision is another engine."""
    precision = f" {engine.precision}" if engine.kind == "llamacpp" else ""
    return f"{name_engine(engine.kind)}{precision}"


def keep_engine_verdict(
    work: OpenProject, adapter_hash: str, engine: EngineSettings, verdict: Verdict
) -> None:
    path = _verdict_path(work, adapter_hash, engine)
    make_folder(path.parent)
    write_atomic(path, verdict.to_json())


def find_engine_verdict(work: OpenProject, release: Release, engine: EngineSettings) -> Verdict | None:
    """The last verdict about the adapter or prompt of a release on this engine."""
    path = _verdict_path(work, release.adapter_hash, engine)
    try:
        return Verdict.from_json(path.read_bytes()) if path.is_file() else None
    except ValidationError:
        return None  # written by another version: judge again


def require_engine_gate(work: OpenProject, release: Release, settings: ServeSettings) -> None:
    """Refuse to serve a release by an engine on which the gate has not passed for it."""
    engine = settings.engine
    if engine.kind == "embedded" or not settings.require_gate_for_engine:
        return
    verdict = find_engine_verdict(work, release, engine)
    if verdict is not None and verdict.decision == "deploy":
        return
    why = "the gate has not judged it there" if verdict is None else f"the gate said {verdict.decision}"
    raise AnswerIsNo(
        f"release {release.id[:12]} may not be served by {describe_engine(engine)}",
        why=f"{why.replace('_', ' ')}; conversion and quantization change answers",
        fix=f"`graft gate --engine {engine.kind} --release {release.id[:12]}` judges it; "
        "`serve.require_gate_for_engine: false` serves it without",
        where="serve.engine",
    )


def _verdict_path(work: OpenProject, adapter_hash: str, engine: EngineSettings) -> Path:
    slug = re.sub(r"[^a-z0-9_.]+", "-", describe_engine(engine).lower())
    return work.project.evaluations / "verdicts" / f"{adapter_hash}.{slug}.json"
