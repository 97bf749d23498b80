"""Shapes of known models, and of any model whose config.json is available.

Input: a name, a folder or a config.json. Output: its sizes with their source and date. Reads no weights where
a name is given; needs no torch.
"""

from pathlib import Path
from typing import Any

from graftwork.model.families import find_family
from graftwork.model.shape import layer_parameters, linear_sizes, read_config_shape, read_model_type, shape_of
from graftwork.plan.catalog import (
    SOURCE,
    ColumnParsers,
    find_named,
    names,
    number,
    read_table,
    text,
    whole,
    yes,
)
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.plan import ModelShape

COLUMNS = ColumnParsers(
    needed={
        "name": text,
        "hf_id": text,
        "architecture": text,
        "hidden_size": whole,
        "layers": whole,
        "heads": whole,
        "kv_heads": whole,
        "head_dim": whole,
        "intermediate_size": whole,
        "vocab_size": whole,
        "tied_embeddings": yes,
        "max_positions": whole,
        **SOURCE,
    },
    optional={"aliases": names, "parameters": number, "note": text},
    key=("name",),
)
CONFIG_KEYS = {
    "architecture": "model_type",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
"""config.json's names for the columns."""


MOST_OUTSIDE = 1.5
"""Weights of a block over those of its linear layers; norms and biases are some thousandths."""


class CatalogModel(Record):
    """A model that can be planned for: its names, its sizes, and their source."""

    name: str
    hf_id: str
    architecture: str
    """As `model_type` in config.json."""
    shape: ModelShape
    source: str
    dated: str
    aliases: tuple[str, ...] = ()
    note: str = ""
    doubt: str = ""
    """The family that was assumed for the sizes, if the family is unknown."""


_FIX = (
    "or give its config.json, any from Hugging Face works: `graft model pull OWNER/NAME --config-only` "
    "fetches it, and `graft plan` fetches it for the base in graft.yaml"
)


def find_model(name_or_path: str | Path, *, overlay: Path | None = None) -> CatalogModel:
    """A model by its name here or on the Hub, by its folder, or by its config.json."""
    path = Path(name_or_path).expanduser()
    if path.name.endswith(".json") or (path / "config.json").is_file():
        # A model that no catalog knows, by what its own file says.
        file = path if path.name.endswith(".json") else path / "config.json"
        shape, model_type = read_config_shape(file), read_model_type(file)
        architecture = str(model_type or "llama")
        doubt = f"the family {architecture!r} is not known: it is counted as a Llama of these sizes"
        return CatalogModel(
            name=shape.name,
            hf_id=shape.name,
            architecture=architecture,
            shape=shape,
            source=str(file),
            dated="",
            doubt=doubt if find_family(model_type) is None else "",
        )
    if path.is_dir():
        raise UserError(
            f"{path} has no config.json",
            why="it states the sizes of the model",
            fix="specify the folder with config.json",
            where=str(path),
        )
    models = list_models(overlay=overlay)
    things = {
        model.name: (model, (model.hf_id, model.hf_id.split("/")[-1], *model.aliases)) for model in models
    }
    return find_named(str(name_or_path), things, kind="model", fix=_FIX)


def require_dense(model: CatalogModel) -> None:
    """Refuse experts: serving engines differ in what they quantize and how they distribute tokens."""
    inside = sum(inputs * outputs for inputs, outputs in linear_sizes(model.shape).values())
    if layer_parameters(model.shape) > MOST_OUTSIDE * inside:
        raise UserError(
            f"{model.name} has experts, and serving those cannot be planned for yet",
            why="which of their weights are quantized and read for a batch differs by engine: "
            "no figure is better than a wrong one",
            fix="specify a dense model, or measure this one on the machine; `graft plan fit` plans "
            "its training",
            where=model.source,
        )


def list_models(*, overlay: Path | None = None) -> tuple[CatalogModel, ...]:
    """All models, the shipped and the team's own."""
    return tuple(row.build(_model, COLUMNS) for row in read_table("models", COLUMNS, overlay=overlay))


def _model(values: dict[str, Any]) -> CatalogModel:
    shape = shape_of({key: values[column] for column, key in CONFIG_KEYS.items()}, name=values["name"])
    if "parameters" in values:
        shape = shape.model_copy(update={"parameters": int(values["parameters"])})
    fields = {name: value for name, value in values.items() if name in CatalogModel.model_fields}
    return CatalogModel(shape=shape, **fields)
