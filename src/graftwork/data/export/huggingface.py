"""Hugging Face: a dataset folder that `load_dataset(folder)` reads, and that can be pushed as it is.

Rules followed (the pages on repository structure, manual configuration and dataset cards):
- Parquet files under `data/`, named by split and number;
- the YAML block at the head of README.md lists under `configs` which files make which split, and under
  `dataset_info` the features, the rows and the sizes;
- a configuration called `default` is the one that is loaded when none is named.
The default rows hold `prompt` and `completion` as lists of messages: TRL trains on the completion of
such rows alone. Preference pairs stand in the configuration `preference`, with `prompt`, `chosen` and
`rejected`.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from graftwork.data.export.parquet_shards import TableSize
from graftwork.data.export.record import ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.data.export.turns import prompt_and_completion, prompt_and_pair
from graftwork.data.rules.together import say_together
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split

if TYPE_CHECKING:
    import pyarrow as pa

TURNS = {"default": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected")}
ABOUT = {"group": "string", "domain": "string", "stage": "int32", "weight": "float64"}
FOLDERS = {"default": "data", "preference": "preference"}


def check_options(options: ExportOptions) -> None:
    del options


def add_row(sink: Sink, split: Split, row: Row) -> None:
    config = "default" if row.rejected is None else "preference"
    turns = prompt_and_completion(row) if row.rejected is None else prompt_and_pair(row)
    about = {name: getattr(row, name) for name in ABOUT}
    sink.add_record(f"{FOLDERS[config]}/{split}", {"id": row.id, **turns, **about}, schema=_schema(config))


def finish(sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
    sizes = sink.close_tables()
    configs, infos = [], []
    for config, folder in FOLDERS.items():
        splits = {
            stem.partition("/")[2]: size for stem, size in sizes.items() if stem.startswith(f"{folder}/")
        }
        if splits:
            files = [{"split": split, "path": f"{folder}/{split}-*"} for split in splits]
            configs.append({"config_name": config, "data_files": files})
            infos.append(_describe(config, splits))
    head: dict[str, Any] = {"license": options.license} if options.license else {}
    if options.title or options.name:
        head["pretty_name"] = options.title or options.name
    head |= {"task_categories": ["text-generation"], "dataset_info": infos, "configs": configs}
    block = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    write_atomic(sink.folder / "README.md", f"---\n{block}---\n\n{_card(dataset, sizes, options)}")
    return ()


@cache
def _schema(config: str) -> "pa.Schema":
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    about = {"string": pa.string(), "int32": pa.int32(), "float64": pa.float64()}
    return pa.schema(
        [
            ("id", pa.string()),
            *((name, messages) for name in TURNS[config]),
            *((name, about[kind]) for name, kind in ABOUT.items()),
        ]
    )


def _describe(config: str, splits: dict[str, TableSize]) -> dict[str, Any]:
    message = [{"name": "role", "dtype": "string"}, {"name": "content", "dtype": "string"}]
    return {
        "config_name": config,
        "features": [
            {"name": "id", "dtype": "string"},
            *({"name": name, "list": [dict(field) for field in message]} for name in TURNS[config]),
            *({"name": name, "dtype": kind} for name, kind in ABOUT.items()),
        ],
        "splits": [
            {"name": split, "num_bytes": size.in_memory, "num_examples": size.rows}
            for split, size in splits.items()
        ],
        "download_size": sum(size.on_disk for size in splits.values()),
        "dataset_size": sum(size.in_memory for size in splits.values()),
    }


def _say_trained(sizes: dict[str, TableSize]) -> str:
    """Of the columns that are there."""
    there = {stem.partition("/")[0] for stem in sizes}
    said = {
        "default": "Trained on is the `completion`; the `prompt` is only read.",
        "preference": "Of the replies to a `prompt`, `chosen` is preferred to `rejected`.",
    }
    return "\n".join(words for config, words in said.items() if FOLDERS[config] in there)


def _card(dataset: Dataset, sizes: dict[str, TableSize], options: ExportOptions) -> str:
    redacted = dataset.settings.get("redact", True)
    steps = "filtered, redacted and de-duplicated" if redacted else "filtered and de-duplicated, not redacted"
    rows = "\n".join(f"| {stem} | {size.rows} |" for stem, size in sizes.items())
    return (
        f"# {options.title or options.name or 'Prepared agent logs'}\n\n"
        f"Prepared by Graftwork: {steps}; rows that "
        f"{say_together(str(dataset.settings.get('split_by', 'question')))} stand in one split.\n"
        f"Dataset `{dataset.content_hash}`, rendered for `{dataset.base}`.\n\n"
        f"| files | rows |\n|---|---|\n{rows}\n\n"
        f"{_say_trained(sizes)}\n"
    )
