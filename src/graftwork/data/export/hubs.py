"""Exports for dataset hubs: Hugging Face and Kaggle."""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
import yaml

from graftwork.data.audit.corpus_findings import say_together
from graftwork.data.export.sink import ExportOptions, Sink, TableSize, prompt_and_completion, prompt_and_pair
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake

if TYPE_CHECKING:
    import pyarrow as pa

TURNS = {"default": ("prompt", "completion"), "preference": ("prompt", "chosen", "rejected")}
ABOUT = {"group": "string", "domain": "string", "stage": "int32", "weight": "float64"}
FOLDERS = {"default": "data", "preference": "preference"}


class HuggingFace:
    """A dataset folder that `load_dataset(folder)` reads, and that can be pushed as it is.

    Rules (the pages on repository structure, manual configuration and dataset cards):
    - Parquet files under `data/`, named by split and number;
    - the YAML block at the head of README.md lists under `configs` which files make which split, and under
      `dataset_info` the features, the rows and the sizes;
    - a configuration called `default` is the one loaded by default.
    The default rows hold `prompt` and `completion` as lists of messages: TRL trains on the completion of
    such rows alone. Preference pairs are in the configuration `preference`, with `prompt`, `chosen` and
    `rejected`.
    """

    def check_options(self, options: ExportOptions) -> None:
        del options

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        config = "default" if row.rejected is None else "preference"
        turns = prompt_and_completion(row) if row.rejected is None else prompt_and_pair(row)
        about = {name: getattr(row, name) for name in ABOUT}
        sink.add_record(
            f"{FOLDERS[config]}/{split}", {"id": row.id, **turns, **about}, schema=_schema(config)
        )

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
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
    """Say what the columns are for."""
    there = {stem.partition("/")[0] for stem in sizes}
    descriptions = {
        "default": "Trained on is the `completion`; the `prompt` is only read.",
        "preference": "Of the replies to a `prompt`, `chosen` is preferred to `rejected`.",
    }
    return "\n".join(words for config, words in descriptions.items() if FOLDERS[config] in there)


def _card(dataset: Dataset, sizes: dict[str, TableSize], options: ExportOptions) -> str:
    redacted = dataset.settings.get("redact", True)
    steps = "filtered, redacted and de-duplicated" if redacted else "filtered and de-duplicated, not redacted"
    rows = "\n".join(f"| {stem} | {size.rows} |" for stem, size in sizes.items())
    return (
        f"# {options.title or options.name or 'Prepared agent logs'}\n\n"
        f"Prepared by Graftwork: {steps}; rows that "
        f"{say_together(str(dataset.settings.get('split_by', 'question')))} are in one split.\n"
        f"Dataset `{dataset.content_hash}`, rendered for `{dataset.base}`.\n\n"
        f"| files | rows |\n|---|---|\n{rows}\n\n"
        f"{_say_trained(sizes)}\n"
    )


ID = re.compile(r"[A-Za-z0-9_-]+/[a-z0-9]([a-z0-9-]{1,48})[a-z0-9]")
LICENSES = (
    *("CC0-1.0", "CC-BY-3.0", "CC-BY-3.0-IGO", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0"),
    *("CC-BY-NC-SA-3.0-IGO", "CC-BY-NC-SA-4.0", "CC-BY-ND-4.0", "CC-BY-NC-ND-4.0", "PDDL", "ODC-BY-1.0"),
    *("ODbL-1.0", "DbCL-1.0", "CDLA-Permissive-1.0", "CDLA-Sharing-1.0", "apache-2.0", "GPL-2.0", "GPL-3.0"),
    *("LGPL-3.0", "AGPL-3.0", "FDL-1.3", "US-Government-Works", "EU-ODP-Legal-Notice"),
    *("copyright-authors", "other", "unknown"),
)
DEFAULT_LICENSE = "unknown"
# Characters of a title.
FEWEST, MOST = 6, 50


class Kaggle:
    """Files and `dataset-metadata.json`.

    Rules (the dataset metadata page of the Kaggle command line):
    - `id` is OWNER/SLUG, the slug of 3 to 50 characters; the title has 6 to 50, the subtitle 20 to 80;
    - exactly one license, out of a list of names;
    - `resources` describes files by path; folders are skipped on upload unless asked for, so all files are
      side by side.
    The lines hold `prompt` and `completion` as lists of messages; preference pairs hold `prompt`, `chosen`
    and `rejected`, in a file of their own. Uploaded with `kaggle datasets create`, a dataset is private.
    """

    def check_options(self, options: ExportOptions) -> None:
        if options.name is None or not ID.fullmatch(options.name):
            raise UserMistake(
                "Kaggle needs a name of the form OWNER/slug"
                + (f", and {options.name!r} is none" if options.name else ""),
                why="a slug has 3 to 50 small letters, digits and -",
                fix="give --name YOUR-KAGGLE-NAME/some-slug",
            )
        title = _title(options)
        if not FEWEST <= len(title) <= MOST:
            raise UserMistake(
                f"the title {title!r} has {len(title)} characters",
                why=f"Kaggle takes titles of {FEWEST} to {MOST} characters",
                fix="give another --title",
            )
        if (options.license or DEFAULT_LICENSE) not in LICENSES:
            raise UserMistake(
                f"Kaggle knows no license {options.license!r}",
                why=f"it takes {', '.join(LICENSES)}",
                fix="give one of them as --license",
            )

    def add_row(self, sink: Sink, split: Split, row: Row) -> None:
        about = {"group": row.group, "domain": row.domain, "stage": row.stage, "weight": row.weight}
        if row.rejected is None:
            sink.add_line(f"{split}.jsonl", {"id": row.id, **prompt_and_completion(row), **about})
        else:
            sink.add_line(f"{split}.preference.jsonl", {"id": row.id, **prompt_and_pair(row), **about})

    def finish(self, sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
        rows = sum(sink.rows.values())
        metadata = {
            "title": _title(options),
            "subtitle": f"{rows} prepared rows of agent logs for fine-tuning",
            "id": options.name,
            "licenses": [{"name": options.license or DEFAULT_LICENSE}],
            "description": f"Prepared by Graftwork. Dataset {dataset.content_hash}, "
            f"rendered for {dataset.base}.",
            "resources": [
                {"path": name, "description": f"{count} rows"} for name, count in sink.rows.items()
            ],
        }
        write_atomic(
            sink.folder / "dataset-metadata.json", orjson.dumps(metadata, option=orjson.OPT_INDENT_2) + b"\n"
        )
        return ("kaggle datasets create -p FOLDER uploads it as a private dataset",)


def _title(options: ExportOptions) -> str:
    slug = (options.name or "").rpartition("/")[2]
    if options.title:
        return options.title
    title = slug.replace("-", " ").strip().capitalize()
    return title if len(title) >= FEWEST else f"{title} dataset"
