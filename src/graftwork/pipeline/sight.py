"""What the data stage is told about the base model of a project."""

from dataclasses import replace
from pathlib import Path

from graftwork.data.rules.note import Sight
from graftwork.model.base import find_base, is_ready
from graftwork.model.template import Template
from graftwork.pipeline.workplace import Workplace
from graftwork.project.folder import ProjectFolder
from graftwork.records.errors import GraftError


def see(work: Workplace, *, template: Template) -> Sight:
    return _add(Sight(settings=work.settings.data, base=work.settings.base), template)


def see_what_is_there(project: ProjectFolder) -> Sight:
    """Without waiting for anything: the base counts only if it is at hand and can be read."""
    sight = Sight(settings=project.settings.data, base=project.settings.base)
    if not is_ready(project.settings.base):
        return sight
    try:
        base = find_base(project.settings.base, project_folder=project.root)
        reasoning = project.settings.data.reasoning == "keep"
        template = Template.from_folder(Path(base.folder), reasoning=reasoning)
    except GraftError:
        return sight
    return _add(sight, template)


def load_template(work: Workplace) -> Template:
    """The base's template as this project uses it: rows, evaluation and serving alike."""
    return Template.from_folder(Path(work.base.folder), reasoning=work.settings.data.reasoning == "keep")


def _add(sight: Sight, template: Template) -> Sight:
    return replace(
        sight,
        control_tokens=tuple(sorted(template.control_tokens)),
        base_reasons=template.writes_reasoning,
    )
