"""Base models by their name on the Hugging Face Hub, at a pinned commit.

Input: a name such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`. Output: a folder with links to the
files in the client's cache, each checked against the hash that the Hub states. Without weights only the
config and the tokenizer are fetched; the hashes of the weights are known anyway. Takes safetensors only and
never runs code of a repository. HF_ENDPOINT names a mirror, HF_TOKEN or the client's login the account.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import explain_os_error, file_digest, make_folder, write_atomic
from graftwork.process.worker import hold_lock
from graftwork.records.base import Record
from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError, pip_install
from graftwork.text.redact import redact_variables

ENDPOINT, TOKEN, OFFLINE = "HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"
MANIFEST = "graftwork.json"
PINS = Path(".graft") / "bases.json"
"""Which commit of each Hub model a project uses, relative to its folder."""

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,200}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = (".json", ".jinja")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_SMALL = 64 << 20
_SPARE_BYTES = 256 << 20
_LISTED = ("config.json", "tokenizer.json", "tokenizer_config.json")


class HubName(NamedTuple):
    repository: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


class HubFile(Record):
    """A file of a model. The Hub knows the SHA-256 of large files, and the git hash of small ones."""

    size: int
    sha256: str | None = None
    git_hash: str | None = None


class HubModel(Record):
    """A model of the Hub on this machine."""

    repository: str
    commit: str
    folder: str
    files: dict[str, HubFile]
    has_weights: bool = False

    @property
    def name(self) -> str:
        """The name that pins the commit."""
        return f"{self.repository}@{self.commit}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def hashes(self) -> dict[str, str]:
        return {name: file.sha256 or "" for name, file in sorted(self.files.items())}


class HubStore(NamedTuple):
    """Where models are stored, who receives download progress, and how much disk space is free."""

    folder: Path
    announce: Callable[[str], None] = lambda _text: None
    progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free


def parse_hub_name(name: str) -> HubName | None:
    """Return the repository and revision that a name means, or None if it is not a name on the Hub."""
    match = _NAME.fullmatch(name)
    if match is None or name.endswith(("/", ".json")) or ".." in name:
        return None
    return HubName(match[1], match[2])


def find_pin(name: HubName, project_folder: Path) -> str | None:
    """Return the commit that a project uses for this name."""
    if name.revision and _COMMIT.fullmatch(name.revision):
        return name.revision
    return _read_pins(project_folder).get(str(name))


def pin(name: HubName, commit: str, project_folder: Path) -> None:
    """Let the project use this commit. Nothing is written outside of a project."""
    file = project_folder / PINS
    if not (project_folder / "graft.yaml").exists() and not file.parent.is_dir():
        return
    make_folder(file.parent)
    pins = {**_read_pins(project_folder), str(name): commit}
    write_atomic(file, json.dumps(pins, indent=2, sort_keys=True) + "\n")


def _read_pins(project_folder: Path) -> dict[str, str]:
    file = project_folder / PINS
    try:
        pins = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise Corrupted(
            "the commits of the base models cannot be read",
            why="the file is not JSON",
            fix="remove it; `graft model pull` writes it again",
            where=str(file),
        ) from None
    entries = pins.items() if isinstance(pins, dict) else ()
    return {name: commit for name, commit in entries if isinstance(commit, str) and _COMMIT.fullmatch(commit)}


def find_local(name: HubName, commit: str, store: HubStore) -> HubModel | None:
    """Return the parts of the model on this machine; None if there are none."""
    folder = _folder_of(name, commit, store)
    try:
        model = HubModel.from_json((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    # A cache may be emptied behind our back: the folder has links only.
    present = {file for file in model.files if (folder / file).exists()}
    if not all(file in present for file in model.files if not _is_weight(file)):
        return None
    return model.model_copy(update={"has_weights": present == set(model.files), "folder": str(folder)})


def resolve(name: HubName, store: HubStore) -> str:
    """Ask the Hub for the current commit of a revision."""
    with _explained(name):
        _require_online(name)
        return str(_client().model_info(name.repository, revision=name.revision or "main").sha)


def fetch(name: HubName, commit: str, store: HubStore, *, weights: bool) -> HubModel:
    """Fetch what is missing at a commit: the config and tokenizer, and the weights if requested."""
    local = find_local(name, commit, store)
    if local is not None and (local.has_weights or not weights):
        return local
    with _explained(name):
        _require_online(name)
        folder = _folder_of(name, commit, store)
        make_folder(folder)
        with hold_lock(folder.parent / f".{commit}.lock"):
            files = local.files if local is not None else _list_files(name, commit, store)
            # The fingerprint of a base needs the hash of every file.
            missing = {
                file: about
                for file, about in files.items()
                if weights or not _is_weight(file) or about.sha256 is None
            }
            checked = _fetch_files(name, commit, missing, store)
            model = HubModel(
                repository=name.repository,
                commit=commit,
                folder=str(folder),
                files={**files, **checked},
                has_weights=weights,
            )
            write_atomic(folder / MANIFEST, model.to_json())
    return model


def list_local(store: HubStore) -> tuple[HubModel, ...]:
    """Return every model of the Hub on this machine."""
    models = []
    for manifest in sorted(store.folder.glob(f"*/*/{MANIFEST}")):
        repository = manifest.parent.parent.name.replace("--", "/", 1)
        model = find_local(HubName(repository, None), manifest.parent.name, store)
        if model is not None:
            models.append(model)
    return tuple(models)


def remove_local(model: HubModel) -> int:
    """Remove a model and its files in the client's cache. Returns the freed bytes."""
    folder = Path(model.folder)
    size = 0
    for file in model.files:
        link = folder / file
        blob = link.resolve()
        if link.is_symlink() and blob.is_file():
            size += blob.stat().st_size
            snapshot = link.readlink()
            blob.unlink()
            snapshot.unlink(missing_ok=True)
    shutil.rmtree(folder)
    shutil.rmtree(folder.parent / f".{model.commit}.lock", ignore_errors=True)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
    return size


def _folder_of(name: HubName, commit: str, store: HubStore) -> Path:
    return store.folder / name.repository.replace("/", "--") / commit


def _is_weight(file: str) -> bool:
    return file.endswith(".safetensors")


def _list_files(name: HubName, commit: str, store: HubStore) -> dict[str, HubFile]:
    """Choose the relevant files of a model: small files at the top level, and its weights as safetensors."""
    info = _client().model_info(name.repository, revision=commit, files_metadata=True)
    listed = {
        sibling.rfilename: HubFile(
            size=sibling.size or 0,
            sha256=getattr(sibling.lfs, "sha256", None) if sibling.lfs is not None else None,
            git_hash=sibling.blob_id if sibling.lfs is None else None,
        )
        for sibling in info.siblings or ()
        if "/" not in sibling.rfilename and not sibling.rfilename.startswith(".")
    }
    small = {
        file: about
        for file, about in listed.items()
        if file.endswith(_SMALL) and about.size <= _LARGEST_SMALL and file != MANIFEST
    }
    missing = [file for file in _LISTED if file not in small]
    weights = {file for file in listed if _is_weight(file)}
    if missing or not weights:
        unsafe = sorted(file for file in listed if file.endswith((".bin", ".pt", ".pth", ".gguf", ".h5")))
        raise UserError(
            f"{name} cannot be a base: it has no {missing[0] if missing else '*.safetensors'}",
            why=f"its weights are {unsafe[0]}, and such files can run code when they are read"
            if unsafe and not weights
            else "a base needs its config, its tokenizer and its weights as safetensors",
            fix="specify a repository with safetensors, or convert it: `save_pretrained` writes them",
            where=f"{name.repository}@{commit[:12]}",
        )
    if _INDEX in small:
        # The shards that the index names: repositories may hold the same weights twice.
        _fetch_files(name, commit, {_INDEX: listed[_INDEX]}, store._replace(announce=lambda _text: None))
        index = json.loads((_folder_of(name, commit, store) / _INDEX).read_text())
        shards = set(index.get("weight_map", {}).values()) if isinstance(index, dict) else set()
        if not shards or not shards <= weights:
            raise Corrupted(
                f"the index of the weights of {name} names files that are not there",
                why=f"{_INDEX} and the files of the commit disagree",
                fix="use another revision",
                where=f"{name.repository}@{commit[:12]}",
            )
        weights = shards
    elif _SINGLE in weights:
        weights = {_SINGLE}
    return small | {file: listed[file] for file in sorted(weights)}


def _fetch_files(
    name: HubName, commit: str, files: dict[str, HubFile], store: HubStore
) -> dict[str, HubFile]:
    """Fetch files into the client's cache, check them, and link to them."""
    folder = _folder_of(name, commit, store)
    missing = {file: about for file, about in files.items() if not (folder / file).exists()}
    checked = {file: _check(name, file, files[file], folder / file) for file in files.keys() - missing}
    total = sum(about.size for about in missing.values())
    if not missing:
        return checked
    cache = Path(_cache_folder() or Path.home() / ".cache")
    while not cache.exists():
        cache = cache.parent
    free = store.free_bytes(cache)
    if free < total + _SPARE_BYTES:
        raise EnvironmentFailure(
            f"the disk has no room for {name}",
            why=f"{total / 1e9:,.1f} GB are needed, and {free / 1e9:,.1f} GB are free",
            fix="`graft model remove` frees space; set HF_HOME to use another disk",
            where=str(cache),
        )
    host = re.sub(r"^https?://", "", os.environ.get(ENDPOINT) or "huggingface.co")
    what = "the weights" if any(map(_is_weight, missing)) else "the config and the tokenizer"
    store.announce(f"fetching {what} of {name} from {host}: {total / 1e6:,.1f} MB at {commit[:12]}")
    from huggingface_hub import hf_hub_download

    done = 0
    for file, about in missing.items():

        def report(arrived: int, before: int = done) -> None:
            store.progress(f"fetch {name.repository}", before + arrived, total)

        if about.sha256 is not None:
            _fetch_blob(name, commit, file, about, report)
        path = Path(
            hf_hub_download(
                name.repository,
                file,
                revision=commit,
                endpoint=os.environ.get(ENDPOINT) or None,
                token=os.environ.get(TOKEN) or None,
                cache_dir=_cache_folder(),
                tqdm_class=_counting_bar(report),
            )
        )
        done += about.size
        store.progress(f"fetch {name.repository}", done, total)
        checked[file] = _check(name, file, about, path)
        link = folder / file
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return checked


def _fetch_blob(name: HubName, commit: str, file: str, about: HubFile, report: Callable[[int], None]) -> None:
    """Fetch a large file to its place in the client's cache, resuming an earlier download. The client's own
    download restarts in every process.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils._headers import build_hf_headers

    cache = Path(_cache_folder() or constants.HF_HUB_CACHE)
    blobs = cache / repo_folder_name(repo_id=name.repository, repo_type="model") / "blobs"
    blob, part = blobs / str(about.sha256), blobs / f"{about.sha256}.graft.incomplete"
    if blob.exists():
        return
    blobs.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as target:
        http_get(
            hf_hub_url(name.repository, file, revision=commit, endpoint=os.environ.get(ENDPOINT) or None),
            target,
            resume_size=target.tell(),
            headers=build_hf_headers(token=os.environ.get(TOKEN) or None),
            expected_size=about.size,
            tqdm_class=_counting_bar(report),
        )
    if file_digest(part) != about.sha256:
        part.unlink()
        raise _other_hash(name, file)
    part.replace(blob)


def _counting_bar(report: Callable[[int], None]) -> Any:
    """A progress bar for the client that draws nothing and counts bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            self._arrived = int(options.get("initial") or 0)
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._arrived += int(n or 0)
            report(self._arrived)
            return None

    return Bar


def _cache_folder() -> str | None:
    """The client's cache as the environment names it now; None for the client's own default."""
    stated = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME")
    return stated or (str(Path(home) / "hub") if home else None)


def _check(name: HubName, file: str, about: HubFile, path: Path) -> HubFile:
    """Compare a file with the hash that the Hub states; the client compares sizes only."""
    sha256 = file_digest(path)
    same = sha256 == about.sha256 if about.sha256 else True
    if about.git_hash:
        content = path.read_bytes()
        head = b"blob %d\0" % len(content)
        same = hashlib.sha1(head + content, usedforsecurity=False).hexdigest() == about.git_hash
    if not same:
        blob = path.resolve()
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
        raise _other_hash(name, file)
    return HubFile(size=path.stat().st_size, sha256=sha256, git_hash=about.git_hash)


def _other_hash(name: HubName, file: str) -> Corrupted:
    return Corrupted(
        f"{file} of {name} has a different hash than the Hub states",
        why="it was changed or damaged in transit; it is removed from the cache",
        fix="run the same command again; if that does not help, check the mirror",
        where=os.environ.get(ENDPOINT) or "huggingface.co",
    )


def _require_online(name: HubName) -> None:
    if os.environ.get(OFFLINE, "").strip().upper() in ("1", "ON", "YES", "TRUE"):
        raise EnvironmentFailure(
            f"{name} is not on this machine, and the Hub may not be contacted",
            why=f"{OFFLINE} is set",
            fix=f"unset it and run `graft model pull {name}`, or specify a folder as base",
        )


def _client() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=os.environ.get(TOKEN) or None)


def _no_such_model(name: HubName) -> UserError:
    return UserError(
        f"there is no base model {name}",
        why="it is neither the embedded model, a folder nor a repository that this account can see",
        fix=f"check the name; for a private model set {TOKEN}",
    )


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn errors of the client into ours, without the token."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise EnvironmentFailure(
            "the package huggingface_hub is not installed", fix=pip_install("train")
        ) from error
    try:
        yield
    except GraftError:
        raise
    except errors.GatedRepoError:
        raise UserError(
            f"{name} is gated",
            why="its owner asks who uses it, and this account has no access yet",
            fix=f"accept its terms at https://huggingface.co/{name.repository}, then set {TOKEN}",
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{name.repository} has no revision {name.revision or 'main'!r}",
            fix="specify a branch, a tag or a commit of it",
        ) from None
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        raise _no_such_model(name) from None
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            raise _no_such_model(name) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
            raise explain_os_error(error, Path(str(error.filename or _cache_folder() or "cache"))) from error
        message = redact_variables(
            str(error) or type(error).__name__, environment=os.environ, variables=(TOKEN, ENDPOINT)
        )
        raise EnvironmentFailure(
            f"{name} could not be fetched: {message}",
            why="the Hub did not answer, or the connection broke (write a folder as ./folder)",
            fix="run the same command again: it continues where it stopped",
            where=redact_variables(
                os.environ.get(ENDPOINT) or "huggingface.co", environment=os.environ, variables=(TOKEN,)
            ),
        ) from None
