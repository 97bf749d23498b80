"""Small base models that a team would choose from: what each is licensed for, good for and not good for.

Input: nothing but the catalog and the team's own rows over it. Output: bases, each with its sizes from the
catalog of models. The grades are a judgment by size and by what the makers state, not a measurement.
"""

from pathlib import Path
from typing import Literal, get_args

from graftwork.model.base import EMBEDDED, HUB_ID
from graftwork.plan.catalog import (
    SOURCE,
    CatalogRow,
    ColumnParsers,
    find_named,
    list_rows,
    names,
    normalize,
    text,
)
from graftwork.plan.catalog.models import CatalogModel, list_models
from graftwork.records.base import Record

Grade = Literal["good", "fair", "poor"]
TaskNeed = Literal["json", "tools", "code", "text"]


def grade(row: CatalogRow, column: str) -> str:
    if row.text(column) not in get_args(Grade):
        raise row.mistake(column, rule=f"must be one of {', '.join(get_args(Grade))}")
    return row.text(column)


COLUMNS = ColumnParsers(
    needed={
        "name": text,
        "license": text,
        "json": grade,
        "tools": grade,
        "code": grade,
        "text": grade,
        "languages": names,
        "good_for": text,
        "not_for": text,
        **SOURCE,
    },
    optional={"terms": text},
    key=("name",),
)


class Grades(Record):
    """How well a base does after training, by what a task asks for."""

    json_replies: Grade
    tools: Grade
    code: Grade
    text: Grade

    def of(self, need: TaskNeed) -> Grade:
        grade: Grade = getattr(self, "json_replies" if need == "json" else need)
        return grade


class CatalogBase(Record):
    """A base that `graft init` may propose. `name` is that of its row in the catalog of models."""

    name: str
    license: str
    terms: str = ""
    """What its license asks for beyond attribution; empty for a permissive one."""
    grades: Grades
    languages: tuple[str, ...]
    """Codes of ISO 639-1."""
    good_for: str
    not_for: str
    source: str
    dated: str


def list_bases(*, overlay: Path | None = None) -> tuple[CatalogBase, ...]:
    """All bases, the shipped and the team's own, the smallest first as the tables list them."""

    def build(values: dict[str, object]) -> CatalogBase:
        grades = {key: values.pop(key) for key in ("tools", "code", "text")}
        grades["json_replies"] = values.pop("json")
        return CatalogBase.model_validate({**values, "grades": grades})

    return list_rows("bases", build, COLUMNS, overlay=overlay)


def model_of(base: CatalogBase, *, overlay: Path | None = None) -> CatalogModel:
    """The sizes of a base, by its name in the catalog of models."""
    models = {model.name: (model, ()) for model in list_models(overlay=overlay)}
    fix = "or put its sizes into your own models.csv, or its name there into bases.csv"
    return find_named(base.name, models, kind="model", fix=fix)


def name_in_settings(model: CatalogModel) -> str:
    """What graft.yaml calls it: the embedded one by its name, any other as on the Hub."""
    return EMBEDDED if model.hf_id == HUB_ID else model.hf_id


def find_base_row(name: str, *, overlay: Path | None = None) -> CatalogBase | None:
    """The base of this name, as the catalog, graft.yaml or the Hub writes it."""
    by_model = {normalize(base.name): base for base in list_bases(overlay=overlay)}
    for model in list_models(overlay=overlay):
        written = (model.name, model.hf_id, name_in_settings(model))
        if normalize(name) in map(normalize, written) and normalize(model.name) in by_model:
            return by_model[normalize(model.name)]
    return None
