"""Kaggle: files and `dataset-metadata.json`.

Rules followed (the dataset metadata page of the Kaggle command line):
- `id` is OWNER/SLUG, the slug of 3 to 50 characters; the title has 6 to 50, the subtitle 20 to 80;
- exactly one license, out of a list of names;
- `resources` describes files by path; folders are skipped on upload unless asked for, so all files lie
  side by side.
The lines hold `prompt` and `completion` as lists of messages; preference pairs hold `prompt`, `chosen`
and `rejected`, in a file of their own. Uploaded with `kaggle datasets create`, a dataset is private.
"""

import re

import orjson

from graftwork.data.export.record import ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.data.export.turns import prompt_and_completion, prompt_and_pair
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake

ID = re.compile(r"[A-Za-z0-9_-]+/[a-z0-9]([a-z0-9-]{1,48})[a-z0-9]")
LICENSES = (
    *("CC0-1.0", "CC-BY-3.0", "CC-BY-3.0-IGO", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0"),
    *("CC-BY-NC-SA-3.0-IGO", "CC-BY-NC-SA-4.0", "CC-BY-ND-4.0", "CC-BY-NC-ND-4.0", "PDDL", "ODC-BY-1.0"),
    *("ODbL-1.0", "DbCL-1.0", "CDLA-Permissive-1.0", "CDLA-Sharing-1.0", "apache-2.0", "GPL-2.0", "GPL-3.0"),
    *("LGPL-3.0", "AGPL-3.0", "FDL-1.3", "US-Government-Works", "EU-ODP-Legal-Notice"),
    *("copyright-authors", "other", "unknown"),
)
DEFAULT_LICENSE = "unknown"
# The characters of a title.
FEWEST, MOST = 6, 50


def check_options(options: ExportOptions) -> None:
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


def add_row(sink: Sink, split: Split, row: Row) -> None:
    about = {"group": row.group, "domain": row.domain, "stage": row.stage, "weight": row.weight}
    if row.rejected is None:
        sink.add_line(f"{split}.jsonl", {"id": row.id, **prompt_and_completion(row), **about})
    else:
        sink.add_line(f"{split}.preference.jsonl", {"id": row.id, **prompt_and_pair(row), **about})


def finish(sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
    rows = sum(sink.rows.values())
    metadata = {
        "title": _title(options),
        "subtitle": f"{rows} prepared rows of agent logs for fine-tuning",
        "id": options.name,
        "licenses": [{"name": options.license or DEFAULT_LICENSE}],
        "description": f"Prepared by Graftwork. Dataset {dataset.content_hash}, rendered for {dataset.base}.",
        "resources": [{"path": name, "description": f"{count} rows"} for name, count in sink.rows.items()],
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
