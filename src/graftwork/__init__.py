"""Graftwork turns a team's own agent logs into better small models.

    import graftwork

    project = graftwork.open_project("examples/cited_answers")
    project.train()

Names are imported when they are first used, so that `import graftwork` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftwork.version import __version__ as __version__

if TYPE_CHECKING:
    from graftwork.api.components import check_spec as check_spec
    from graftwork.api.components import generate_components as generate_components
    from graftwork.api.components import verify_generated as verify_generated
    from graftwork.api.plans import plan_fit as plan_fit
    from graftwork.api.project import Project as Project
    from graftwork.api.project import audit_files as audit_files
    from graftwork.api.project import init_project as init_project
    from graftwork.api.project import list_models as list_models
    from graftwork.api.project import open_project as open_project
    from graftwork.api.project import pull_model as pull_model
    from graftwork.api.project import remove_model as remove_model
    from graftwork.data.project import PreparedData as PreparedData
    from graftwork.evaluate.project import Evaluated as Evaluated
    from graftwork.project.reporter import NullReporter as NullReporter
    from graftwork.project.reporter import Reporter as Reporter
    from graftwork.records.base import Figure as Figure
    from graftwork.records.dataset import Audit as Audit
    from graftwork.records.errors import EnvironmentFailure as EnvironmentFailure
    from graftwork.records.errors import GraftError as GraftError
    from graftwork.records.errors import NegativeResult as NegativeResult
    from graftwork.records.errors import Stale as Stale
    from graftwork.records.errors import UserError as UserError
    from graftwork.records.plan import FitAnswer as FitAnswer
    from graftwork.records.plan import Plan as Plan
    from graftwork.records.plan import RunPlan as RunPlan
    from graftwork.records.release import Release as Release
    from graftwork.records.release import ReleaseEntry as ReleaseEntry
    from graftwork.records.report import Report as Report
    from graftwork.records.report import Verdict as Verdict
    from graftwork.records.run import TrainOutcome as TrainOutcome

_MODULES = {
    "graftwork.api.components": ("check_spec", "generate_components", "verify_generated"),
    "graftwork.api.plans": ("plan_fit",),
    "graftwork.api.project": (
        "Project",
        "audit_files",
        "init_project",
        "list_models",
        "open_project",
        "pull_model",
        "remove_model",
    ),
    "graftwork.evaluate.project": ("Evaluated",),
    "graftwork.project.reporter": ("NullReporter", "Reporter"),
    "graftwork.data.project": ("PreparedData",),
    "graftwork.records.dataset": ("Audit",),
    "graftwork.records.base": ("Figure",),
    "graftwork.records.errors": ("NegativeResult", "EnvironmentFailure", "GraftError", "Stale", "UserError"),
    "graftwork.records.plan": ("FitAnswer", "Plan", "RunPlan"),
    "graftwork.records.release": ("Release", "ReleaseEntry"),
    "graftwork.records.report": ("Report", "Verdict"),
    "graftwork.records.run": ("TrainOutcome",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
