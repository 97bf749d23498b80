"""Specifications and generated components: with or without a project."""

from collections.abc import Sequence
from pathlib import Path

from graftwork.components.check import SpecReport, check_file
from graftwork.components.project import ComponentRequest, verify_components
from graftwork.components.project import generate_components as generate
from graftwork.components.results import ProvenanceReport
from graftwork.components.session import GenerationOutcome
from graftwork.components.settings import GenerateSettings


def check_spec(path: str | Path) -> SpecReport:
    """Findings of a specification by line, and which of its requirements a case decides."""
    return check_file(Path(path))


def generate_components(
    spec: str | Path,
    *,
    engine: str,
    out: str | Path,
    only: Sequence[str] = (),
    settings: GenerateSettings | None = None,
) -> GenerationOutcome:
    """Generate, verify and package the components of a specification; the same call resumes.

    `engine` is an endpoint as URL#model, `base`, or recorded:FILE.
    """
    request = ComponentRequest(
        Path(spec), engine, Path(out), settings or GenerateSettings(), wanted=tuple(only)
    )
    return generate(request)


def verify_generated(out: str | Path, *, spec: str | Path | None = None) -> ProvenanceReport:
    """Check the chain from specification to files; with a spec, run every component again."""
    return verify_components(Path(out), spec=Path(spec) if spec is not None else None)
