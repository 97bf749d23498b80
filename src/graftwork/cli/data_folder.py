"""`graft data trace`, `show`, `diff` and `export`: what one does with a dataset that is prepared."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from graftwork.data.inspect.rows import TokenDecoder
    from graftwork.records.dataset import Split

NAMES_OF_SPLITS = ("train", "validation", "test", "rl")
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", "-d", help="A dataset's folder or the beginning of its hash; the latest by default."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Hang the verbs on `graft data`."""
    verbs: dict[str, Callable[..., None]] = {"trace": trace, "show": show, "diff": diff, "export": export}
    for name, verb in verbs.items():
        app.command(name)(verb)


def trace(
    what: Annotated[
        str,
        typer.Argument(
            help="FILE:LINE of a log, the id of a row or its beginning, or SPLIT:ROW[:TOKEN] counted from 0."
        ),
    ],
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Where a row or a token came from, and what became of a line of the log.

    Example:  graft data trace logs/interactions.jsonl:17   ·   graft data trace train:17:203
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.dataset import show_trace
    from graftwork.data.inspect.trace import names_token
    from graftwork.data.inspect.trace import trace as trace_in

    folder, root = _find(dataset, project)
    decoder = _open_decoder_if_there(folder, root) if names_token(what) else None
    found = trace_in(folder, what, root=root, decoder=decoder)
    if json:
        print_json(found)
    else:
        show_trace(stdout, found)


def show(
    split: Annotated[str, typer.Option("--split", help="train, validation, test or rl.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows from the first on.")] = 3,
    row: Annotated[str | None, typer.Option("--row", help="The id of a row, or its beginning.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Mark where tokens end.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colours: what is trained on stands between ⟦ and ⟧.")
    ] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Rows as the model sees them; what it is trained on is coloured.

    Example:  graft data show --split test --rows 5
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.dataset import show_rows as print_rows
    from graftwork.data.inspect.rows import show_rows
    from graftwork.files.dataset_folder import read_manifest

    chosen = _to_split(split)
    folder, root = _find(dataset, project)
    decoder = _open_decoder(folder, root)
    shown = show_rows(folder, decoder=decoder, split=chosen, rows=rows, row_id=row, by_token=tokens)
    if json:
        content_hash = read_manifest(folder).content_hash
        print_json({"dataset": content_hash, "rows": [one.model_dump(mode="json") for one in shown]})
    else:
        print_rows(stdout, shown, by_token=tokens, plain=plain)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A dataset's folder or its hash.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The one to compare with.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """What differs between two datasets: settings, logs, rows, splits, drops, tokens.

    Example:  graft data diff 3f2a 91bc
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.dataset import show_diff
    from graftwork.data.inspect.diff import diff_datasets

    found = diff_datasets(_find(before, project)[0], _find(after, project)[0])
    if json:
        print_json(found)
    else:
        show_diff(stdout, found)


def export(
    format_name: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="openai, huggingface, kaggle, sagemaker, axolotl or llamafactory."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; may be given again.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What the other side calls it: OWNER/slug, s3://bucket/prefix, a word."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="A title for people.")] = None,
    license_name: Annotated[str | None, typer.Option("--license", help="The license, by its name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write among other files.")] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write a dataset in another's format.

    Example:  graft data export openai --out exports/openai
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.dataset import show_export
    from graftwork.data.export.run import export_dataset
    from graftwork.data.export.sink import ExportOptions
    from graftwork.records.dataset import SPLITS

    form, splits = format_name, [_to_split(one) for one in split or SPLITS]
    options = ExportOptions(name=name, title=title, license=license_name)
    folder, _ = _find(dataset, project)
    made = export_dataset(folder, out, format_name=form, splits=splits, options=options, force=force)
    if json:
        print_json({"folder": str(out), **made.model_dump(mode="json")})
    else:
        show_export(stdout, made, folder=out)


def _find(name: str | None, project: Path | None) -> tuple[Path, Path]:
    """The folder of a dataset, and the folder that the names of its logs are relative to."""
    from graftwork.files.dataset_folder import MANIFEST
    from graftwork.project.folder import find_project, open_project
    from graftwork.project.load import PROJECT_FILE

    root = (project or find_project() or Path()).absolute()
    if name is not None and (Path(name) / MANIFEST).is_file():
        return Path(name).absolute(), root
    if name is not None and not (root / PROJECT_FILE).is_file():
        raise _no_such_dataset(name, where=root)
    opened = open_project(project)
    folder = _find_latest(project) if name is None else _find_by_hash(opened.datasets, name)
    return folder, opened.root


def _find_latest(project: Path | None) -> Path:
    """The one that the step `prepare` last made."""
    from graftwork.files.dataset_folder import MANIFEST
    from graftwork.pipeline.narrator import Silent
    from graftwork.pipeline.workplace import open_workplace
    from graftwork.project.folder import open_project
    from graftwork.records.errors import UserMistake

    with open_workplace(open_project(project), Silent()) as work:
        entry = work.ledger.get("prepare")
    # The folder alone is wanted: to read the whole output would load all that preparing needs.
    folder = Path(entry.output["folder"]) if entry is not None else None
    if folder is None or not (folder / MANIFEST).is_file():
        raise UserMistake(
            "this project has no dataset yet" if folder is None else "the project's dataset is gone",
            fix="graft data prepare",
            where=str(folder or ""),
        )
    return folder


def _find_by_hash(datasets: Path, name: str) -> Path:
    from graftwork.files.dataset_folder import MANIFEST
    from graftwork.records.errors import UserMistake

    named = [one for one in sorted(datasets.glob("*")) if one.name.startswith(name)] if name else []
    found = [one for one in named if (one / MANIFEST).is_file()]
    if not found:
        raise _no_such_dataset(name, where=datasets)
    if len(found) > 1:
        raise UserMistake(
            f"several datasets begin with {name!r}",
            why=f"among them {', '.join(one.name[:12] for one in found[:3])}",
            fix="give more of the hash",
            where=str(datasets),
        )
    return found[0]


def _no_such_dataset(name: str, *, where: Path) -> Exception:
    from graftwork.records.errors import UserMistake

    return UserMistake(
        f"there is no dataset {name!r}",
        why="it is neither a folder with a manifest.json nor the beginning of a dataset's hash here",
        fix="leave it out for the latest dataset of the project, or make one: graft data prepare",
        where=str(where),
    )


def _open_decoder(folder: Path, root: Path) -> "TokenDecoder":
    """The tokenizer of the base that the dataset was rendered for."""
    from graftwork.data.inspect.rows import TokenizerDecoder
    from graftwork.files.dataset_folder import read_manifest
    from graftwork.model.base import find_base
    from graftwork.records.errors import EnvironmentLacks

    dataset = read_manifest(folder)
    base = find_base(dataset.base, project_folder=root)
    if base.revision != dataset.base_fingerprint:
        raise EnvironmentLacks(
            f"the base model {dataset.base} is another than the dataset was rendered for",
            why="its tokens would read as another text",
            fix="restore the base model, or run `graft data prepare` again",
            where=base.folder,
        )
    decoder = TokenizerDecoder(Path(base.folder) / "tokenizer.json")
    decoder.load()
    return decoder


def _open_decoder_if_there(folder: Path, root: Path) -> "TokenDecoder | None":
    """A trace is of use without the text of the token too."""
    from graftwork.records.errors import GraftError

    try:
        return _open_decoder(folder, root)
    except GraftError:
        return None


def _to_split(name: str) -> "Split":
    from typing import cast

    from graftwork.records.errors import UserMistake

    if name not in NAMES_OF_SPLITS:
        raise UserMistake(f"there is no split {name!r}", fix=f"name one of {', '.join(NAMES_OF_SPLITS)}")
    return cast("Split", name)
