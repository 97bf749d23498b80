"""Which dataset is meant: by folder, by the first characters of its hash, or the last one that was prepared.

In: a project and a name. Out: the folder of the dataset, and a decoder of its tokens.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.dataset import MANIFEST, read_manifest
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import name_entry
from graftwork.records.errors import EnvironmentLacks, GraftError, UserMistake

if TYPE_CHECKING:
    from graftwork.data.inspect.rows import TokenDecoder


def find_latest_dataset(work: OpenProject) -> Path:
    """The dataset of the last `prepare` of this model."""
    folder = _find_prepared(work)
    if folder is None or not (folder / MANIFEST).is_file():
        raise UserMistake(
            "this project has no dataset yet" if folder is None else "the dataset of the project is missing",
            fix="run `graft data prepare`",
            where=str(folder or ""),
        )
    return folder


def _find_prepared(work: OpenProject) -> Path | None:
    # Only the folders are read: validating the whole output would import all that preparing needs.
    own = work.ledger.get(name_entry(work, "prepare"))
    if own is not None:
        return Path(own.output["folder"])
    # Preparing one model prepares the datasets of all.
    main = work.ledger.get("prepare")
    folder = main.output.get("folders", {}).get(work.model) if main is not None else None
    return Path(folder) if folder is not None else None


def find_dataset_by_hash(datasets: Path, name: str) -> Path:
    named = [folder for folder in sorted(datasets.glob("*")) if folder.name.startswith(name)] if name else []
    found = [folder for folder in named if (folder / MANIFEST).is_file()]
    if not found:
        raise no_such_dataset(name, where=datasets)
    if len(found) > 1:
        raise UserMistake(
            f"several datasets start with {name!r}",
            why=f"among them {', '.join(folder.name[:12] for folder in found[:3])}",
            fix="give more characters of the hash",
            where=str(datasets),
        )
    return found[0]


def no_such_dataset(name: str, *, where: Path) -> UserMistake:
    return UserMistake(
        f"there is no dataset {name!r}",
        why="it is neither a folder with a manifest.json nor the first characters of a dataset's hash",
        fix="omit it to use the latest dataset, or run `graft data prepare`",
        where=str(where),
    )


def open_decoder(folder: Path, root: Path) -> "TokenDecoder":
    """The tokenizer of the base that the dataset was rendered for."""
    from graftwork.model.base import find_base

    dataset = read_manifest(folder)
    base = find_base(dataset.base, project_folder=root)
    if base.revision != dataset.base_fingerprint:
        raise EnvironmentLacks(
            f"the dataset was rendered for another version of the base model {dataset.base}",
            why="the same token ids would decode to other text",
            fix="restore the base model, or run `graft data prepare` again",
            where=base.folder,
        )
    file = Path(base.folder) / "tokenizer.json"
    return _load_decoder(file, file.stat().st_mtime_ns if file.exists() else 0)


@lru_cache(maxsize=1)
def _load_decoder(file: Path, _changed: int) -> "TokenDecoder":
    """The last tokenizer stays loaded: a page shows one row after another."""
    from graftwork.data.inspect.rows import TokenizerDecoder

    decoder = TokenizerDecoder(file)
    decoder.load()
    return decoder


def open_decoder_if_there(folder: Path, root: Path) -> "TokenDecoder | None":
    """None if the tokenizer cannot be read: a trace is useful without the text of the token."""
    try:
        return open_decoder(folder, root)
    except GraftError:
        return None
